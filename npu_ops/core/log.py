"""Logging: warnings that are said once, and the traces that NPU_OPS_LOG asks for."""

from __future__ import annotations

import logging
import sys

from npu_ops.core import env

logger = logging.getLogger("npu_ops")
_said: set[str] = set()


def once(sentence: str) -> None:
    """Warn with `sentence` the first time it is said in this process."""
    if sentence in _said or env.settings.log == "off":
        return
    _said.add(sentence)
    logger.warning(sentence)


def trace(sentence: str) -> None:
    """Log at INFO what NPU_OPS_LOG asked for; on stderr if the program has not set up logging."""
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)
    if logger.hasHandlers():
        logger.info(sentence)
    else:
        print(sentence, file=sys.stderr, flush=True)
