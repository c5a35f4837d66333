"""How a check ended, for a process that reports its checks one by one."""

from __future__ import annotations

import traceback


def error_of(check, *arguments, **options) -> str | None:
    """The traceback of what the check raises; None if it passes."""
    try:
        check(*arguments, **options)
    except Exception:
        return traceback.format_exc()
    return None
