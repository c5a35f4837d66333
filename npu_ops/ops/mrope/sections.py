"""Shared by mrope and qk_norm_rope: checks how many frequencies belong to T, H and W."""

from __future__ import annotations

from collections.abc import Sequence

from npu_ops.core import check

SECTION_LAYOUTS = ("chunked", "interleaved")


def resolve_section(section, section_layout, frequencies) -> list[int]:
    """Check the sections, and return how many of the `frequencies` belong to T, H and W.

    The sum of the sections may exceed `frequencies`. As in the kernels of vLLM and sgl-kernel-npu,
    the excess is ignored.
    """
    check.one_of("section_layout", section_layout, SECTION_LAYOUTS)
    if not isinstance(section, Sequence):
        raise TypeError(f"mrope_section: got {type(section).__name__}, needs a list of three")
    section = list(section)
    if len(section) != 3 or any(not isinstance(n, int) or n < 0 for n in section):
        raise ValueError(f"mrope_section: got {section}, needs three counts, for T, H and W")
    if sum(section) < frequencies:
        raise ValueError(
            f"mrope_section: got {section} with sum {sum(section)}, needs the sum "
            f"{frequencies} or more, half the rotary dimension"
        )
    t, h, w = section
    if section_layout == "interleaved":  # frequencies 3 n + 1 belong to H, 3 n + 2 to W
        h, w = min(h, (frequencies + 1) // 3), min(w, frequencies // 3)
        return [frequencies - h - w, h, w]
    t = min(t, frequencies)
    h = min(h, frequencies - t)
    return [t, h, frequencies - t - h]
