"""What is known of the NPUs by their names. Imports nothing, and asks no device."""

# Unified buffer of one vector core, from the vendor's target description.
UB_BYTES = {
    "Ascend910B": 192 * 1024,
    "Ascend910_93": 192 * 1024,
    "Ascend910_95": 248 * 1024,  # an older name of Ascend950
    "Ascend950": 248 * 1024,
}


def ub_bytes(soc: str) -> int:
    """Bytes of on-chip memory that one vector core's tiles share.

    Raises:
        ValueError: an SoC that is not known.
    """
    for family, size in UB_BYTES.items():
        if soc.startswith(family):
            return size
    raise ValueError(f"soc: got {soc!r}, needs one of {', '.join(UB_BYTES)}...")


def is_ascend950(soc: str) -> bool:
    """Whether it is of the generation that has a compiler of its own."""
    return soc.startswith(("Ascend950", "Ascend910_95"))


def ascendc_family(soc: str) -> str | None:
    """The family that one build of AscendC kernels serves; None where there is no build."""
    families = {"Ascend910B": "ascend910b", "Ascend910_93": "ascend910_93"}
    return next((name for prefix, name in families.items() if soc.startswith(prefix)), None)
