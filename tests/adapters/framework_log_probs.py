"""Check whether a framework's log-probabilities equal log_softmax in fp32.

python framework_log_probs.py verl|megatron

Prints for each function: "right" if every bit is equal, "1e-6" if the error is below 1e-5,
"rounded" if it is larger. An error above 0.01 plus 1 % of the value fails.
"""

from __future__ import annotations

import sys

import torch
from test_log_probs import drawn, right

import npu_ops  # noqa: F401

DEVICE = "npu" if hasattr(torch, "npu") else "cpu"


def kind(found, expected) -> str:
    error = (found.float() - expected).abs()
    assert (error <= 0.01 * expected.abs() + 0.01).all(), error.max()
    return "right" if torch.equal(found, expected) else "1e-6" if error.max() < 1e-5 else "rounded"


def verl() -> dict[str, str]:
    from verl.utils.torch_functional import logprobs_from_logits
    from verl.workers.engine.fsdp.transformer_impl import _scale_logits_by_temperature

    logits, labels, seeds = (x.to(DEVICE) for x in drawn())
    of_verl = logprobs_from_logits.__wrapped__(logits, labels)
    found = {"verl's own": kind(of_verl, right(logits, labels))}
    for name, x in (("bf16", logits), ("fp32", logits.float())):
        leaf = x.clone().requires_grad_()
        of_verl = logprobs_from_logits(leaf, labels)
        found[name] = kind(of_verl.detach(), right(x, labels))
        (grad,) = torch.autograd.grad(of_verl, leaf, seeds.to(of_verl.dtype))
        wide = x.float().requires_grad_()
        (expected,) = torch.autograd.grad(right(wide, labels), wide, seeds)
        assert (grad.float() - expected).abs().max() < 0.01 * expected.abs().max()
    hot = torch.full((len(logits), 1), 0.7, device=DEVICE)
    scaled = _scale_logits_by_temperature(logits, hot, is_unit_temperature=False)
    of_verl = logprobs_from_logits(scaled, labels)
    found["temperature"] = kind(of_verl, right(logits.float() / hot, labels))
    assert _scale_logits_by_temperature(logits, hot, is_unit_temperature=True) is logits
    return found


def megatron() -> dict[str, str]:
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy

    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    group = parallel_state.get_tensor_model_parallel_group()
    cross_entropy = tensor_parallel.vocab_parallel_cross_entropy
    logits, labels, _ = drawn(36, torch.float32)
    logits, labels = logits.view(9, 4, -1), labels.view(9, 4)
    outside = labels.clone()
    outside[0, 0] = -100  # a token that a loss mask drops
    dropped = cross_entropy(logits.clone(), outside)
    assert dropped.isfinite().all() and torch.equal(dropped[1:], -right(logits, labels)[1:])
    return {
        "cross_entropy": kind(-cross_entropy(logits.clone(), labels), right(logits, labels)),
        "fused": kind(
            -fused_vocab_parallel_cross_entropy(logits.clone(), labels, group),
            right(logits, labels),
        ),
        "smoothed": kind(-cross_entropy(logits.clone(), labels, 0.1), smoothed(logits, labels)),
        "Megatron's own": kind(
            -cross_entropy.__wrapped__(logits.clone(), labels), right(logits, labels)
        ),
    }


def smoothed(logits, labels):
    """Return smoothed log-probabilities: each word except the label has weight 0.1 / (V - 1)."""
    rows = torch.log_softmax(logits, -1)
    others = rows.sum(-1) - right(logits, labels)
    return 0.9 * right(logits, labels) + 0.1 * others / (rows.shape[-1] - 1)


for name, value in {"verl": verl, "megatron": megatron}[sys.argv[1]]().items():
    print(f"{name}: {value}")
