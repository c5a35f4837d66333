"""A double of Relax's trainer. The real one imports MindSpeed first, if that is installed."""
