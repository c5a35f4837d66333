"""The machinery every operator stands on: switches, registry, torch library, hardware, grid."""
