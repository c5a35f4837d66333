"""Contains what operators share, e.g. dispatch, argument checks, settings and launch grids."""
