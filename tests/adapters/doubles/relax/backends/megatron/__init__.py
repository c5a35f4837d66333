"""A stand-in for Relax's trainer. The real one imports MindSpeed first, if it is installed."""
