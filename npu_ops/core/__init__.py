"""Code that all operators share: environment switches, registry, torch library, hardware, grids."""
