"""Properties of NPUs by SoC name. Imports nothing, and queries no device."""

# Unified buffer of one vector core in bytes, from the vendor's target description.
UB_BYTES = {
    "Ascend910B": 192 * 1024,
    "Ascend910_93": 192 * 1024,
    "Ascend910_95": 248 * 1024,  # an older name of Ascend950
    "Ascend950": 248 * 1024,
}


def ub_bytes(soc: str) -> int:
    """Return the bytes of unified buffer of one vector core.

    Raises:
        ValueError: the SoC is unknown.
    """
    for family, size in UB_BYTES.items():
        if soc.startswith(family):
            return size
    raise ValueError(f"soc: got {soc!r}, needs one of {', '.join(UB_BYTES)}...")


def is_ascend950(soc: str) -> bool:
    """Return whether the SoC is an Ascend950, which has its own compiler."""
    return soc.startswith(("Ascend950", "Ascend910_95"))


def ascendc_family(soc: str) -> str | None:
    """Return the SoC family of the AscendC kernels' build; None if there is no build for `soc`."""
    families = {"Ascend910B": "ascend910b", "Ascend910_93": "ascend910_93"}
    return next((name for prefix, name in families.items() if soc.startswith(prefix)), None)
