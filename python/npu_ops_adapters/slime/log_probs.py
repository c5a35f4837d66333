"""With NPU_OPS_CONSISTENT, log-probabilities in slime of August 2026 equal those of servers.

Older slime and Relax call Megatron's cross entropy (`npu_ops_adapters.megatron.log_probs`).
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable

from npu_ops.core import env
from npu_ops_adapters.log_probs import log_probs
from npu_ops_adapters.patching import Patch

_HOME, _NAME = "slime.utils.ppo_utils", "_calculate_log_probs_and_entropy_chunk"


def patches() -> Iterable[Patch]:
    """Patch slime's function, if it exists; nothing without NPU_OPS_CONSISTENT."""
    home = sys.modules.get(_HOME)  # older slime has no such function
    if env.settings.consistent and (home is None or hasattr(home, _NAME)):
        yield Patch(
            target=f"{_HOME}:{_NAME}",
            op="slime_log_probs",
            make=_replace,
            why="it adds exponentials in another order than an inference server",
            signatures=(
                (
                    "logits", "tokens", "tp_group", "with_entropy", "with_entropy_grad",
                    "log_prob_keep_mask",
                ),
            ),
            versions="slime of August 2026",
            remove_when="slime takes log_softmax",
        )  # fmt: skip


def _replace(original: Callable) -> Callable:
    @functools.wraps(original, assigned=(), updated=())
    def npu_ops_log_probs(
        logits, tokens, tp_group, *, with_entropy, with_entropy_grad=True, log_prob_keep_mask
    ):
        def theirs():
            return original(
                logits, tokens, tp_group, with_entropy=with_entropy,
                with_entropy_grad=with_entropy_grad, log_prob_keep_mask=log_prob_keep_mask,
            )  # fmt: skip

        if log_prob_keep_mask is not None:  # top-p sampling keeps a part of the vocabulary
            return theirs()
        found = log_probs(logits, tokens, tp_group).unsqueeze(-1)
        return found, theirs()[1] if with_entropy else None

    return npu_ops_log_probs
