"""Each public function that is fuzzed: what it is called with, and its formula."""
