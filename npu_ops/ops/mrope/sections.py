"""Shared by mrope and qk_norm_rope: which frequencies T, H and W own, checked."""

from __future__ import annotations

from collections.abc import Sequence

from npu_ops.core import check

SECTION_LAYOUTS = ("chunked", "interleaved")


def check_section(section, section_layout, frequencies) -> None:
    """Check that T, H and W share all frequencies and that interleaved ones stay within them."""
    check.one_of("section_layout", section_layout, SECTION_LAYOUTS)
    if not isinstance(section, Sequence):
        raise TypeError(f"mrope_section: got {type(section).__name__}, needs a list of three")
    section = list(section)
    if len(section) != 3 or any(not isinstance(n, int) or n < 0 for n in section):
        raise ValueError(f"mrope_section: got {section}, needs three counts, for T, H and W")
    if sum(section) != frequencies:
        raise ValueError(
            f"mrope_section: got {section} with sum {sum(section)}, needs the sum "
            f"{frequencies}, half the rotary dimension"
        )
    last = max([0] + [3 * (n - 1) + axis for axis, n in enumerate(section) if axis and n])
    if section_layout == "interleaved" and last >= frequencies:
        raise ValueError(
            f"mrope_section: got {section}, which interleaved reaches frequency {last}, "
            f"needs less than {frequencies}"
        )
