"""The parts of slime of August 2026 that the adapter meets; see ../../test_slime.py."""
