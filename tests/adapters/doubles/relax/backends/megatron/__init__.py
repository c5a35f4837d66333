"""Relax's trainer, which imports MindSpeed first where it is installed."""
