"""Logging that says a thing once."""

from __future__ import annotations

import logging

from npu_ops.core import env

logger = logging.getLogger("npu_ops")
_said: set[str] = set()


def once(sentence: str) -> None:
    """Warn with `sentence` the first time it is said in this process."""
    if sentence in _said or env.settings.log == "off":
        return
    _said.add(sentence)
    logger.warning(sentence)
