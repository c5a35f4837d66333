"""slime of August 2026, as far as the adapter meets it; see ../../test_slime.py."""
