"""With NPU_OPS_CONSISTENT, cross entropy is minus the log-probabilities that servers compute.

slime, Relax and verl's Megatron engine take log-probabilities from two functions of Megatron. These
add exponentials in another order than log_softmax. The replacements gather the logits of all ranks
that share the vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable

from npu_ops.core import env
from npu_ops_adapters.log_probs import log_probs
from npu_ops_adapters.patching import Patch

_LOGITS = ("vocab_parallel_logits", "target")


def patches() -> Iterable[Patch]:
    """Patch both functions; nothing without NPU_OPS_CONSISTENT."""
    if not env.settings.consistent:
        return
    for target, make, *signatures in (
        (
            "megatron.core.tensor_parallel.cross_entropy:vocab_parallel_cross_entropy",
            _smoothed, (*_LOGITS, "label_smoothing"), (*_LOGITS, "label_smoothing", "tp_group"),
        ),
        (
            "megatron.core.fusions.fused_cross_entropy:fused_vocab_parallel_cross_entropy",
            _fused, (*_LOGITS, "tp_group"),
        ),
    ):  # fmt: skip
        yield Patch(
            target=target,
            op="megatron_log_probs",
            make=make,
            why="it adds exponentials in another order than an inference server",
            signatures=tuple(signatures),
            versions="Megatron-Core 0.12 to 0.19",
            remove_when="Megatron-Core takes log_softmax",
        )


def _smoothed(original: Callable) -> Callable:
    @functools.wraps(original, assigned=(), updated=())
    def npu_ops_cross_entropy(vocab_parallel_logits, target, label_smoothing=0.0, tp_group=None):
        if label_smoothing:
            # older Megatron-Core has no argument tp_group
            group = () if tp_group is None else (tp_group,)
            return original(vocab_parallel_logits, target, label_smoothing, *group)
        return _cross_entropy(vocab_parallel_logits, target, tp_group)

    return npu_ops_cross_entropy


def _fused(original: Callable) -> Callable:
    @functools.wraps(original, assigned=(), updated=())
    def npu_ops_fused_cross_entropy(vocab_parallel_logits, target, tp_group):
        return _cross_entropy(vocab_parallel_logits, target, tp_group)

    return npu_ops_fused_cross_entropy


def _cross_entropy(logits, target, group):
    if group is None:
        from megatron.core import parallel_state

        group = parallel_state.get_tensor_model_parallel_group()
    vocabulary = logits.shape[-1] * group.size()
    # Megatron accepts labels outside the vocabulary, because a loss mask drops their tokens.
    return -log_probs(logits, target.clamp(0, vocabulary - 1), group)
