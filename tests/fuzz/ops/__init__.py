"""The fuzzed public functions: settings, arguments and formula of each."""
