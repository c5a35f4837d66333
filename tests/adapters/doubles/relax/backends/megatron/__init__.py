"""Stands for Relax's trainer. The real one imports MindSpeed first, if that is installed."""
