"""Logging: warnings that appear once per process, and traces for NPU_OPS_LOG."""

from __future__ import annotations

import logging
import sys

from npu_ops.core import env

logger = logging.getLogger("npu_ops")
_said: set[str] = set()


def once(sentence: str) -> None:
    """Log `sentence` as a warning, once per process; never if NPU_OPS_LOG=off."""
    if sentence in _said or env.settings.log == "off":
        return
    _said.add(sentence)
    logger.warning(sentence)


def trace(sentence: str) -> None:
    """Log `sentence` at INFO, or print it to stderr if the program has not set up logging."""
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)
    if logger.hasHandlers():
        logger.info(sentence)
    else:
        print(sentence, file=sys.stderr, flush=True)
