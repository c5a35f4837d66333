"""Run a check and return its error, for a process that reports its checks one by one."""

from __future__ import annotations

import traceback


def error_of(check, *arguments, **options) -> str | None:
    """Return the traceback of the error that the check raises, or None if it passes."""
    try:
        check(*arguments, **options)
    except Exception:
        return traceback.format_exc()
    return None
