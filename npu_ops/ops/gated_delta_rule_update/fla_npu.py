"""Runs gated_delta_rule_update with fla_npu's `npu_recurrent_gated_delta_rule`.

It works as in `aclnn.py`, but the first of the operator's lengths is the number of tokens in no
sequence, here 0. Its limits are from fla_npu's documentation of August 2026; only a test double of
the operator was ever called.
"""

from __future__ import annotations

import functools
import importlib

import torch

from npu_ops.core import make
from npu_ops.core.library import fla_npu_why_not
from npu_ops.ops.gated_delta_rule_update import aclnn


def why_not(arguments) -> str | None:
    """Return None, or a sentence on why the operator does not support the arguments."""
    return aclnn.limits(arguments) or _missing()


_missing = functools.partial(
    fla_npu_why_not, "npu_recurrent_gated_delta_rule", "beta", "scale", "actual_seq_lengths",
    "ssm_state_indices", "num_accepted_tokens", "g",
)  # fmt: skip


def gated_delta_rule_update(*arguments) -> None:
    """Write o, and update the states in place. Arguments as in the operator."""
    aclnn.update_by(_recurrent, *arguments)


def _recurrent(q, k, v, states, beta, g, count: int, scale: float):
    """Do the same as `aclnn.recurrent`, but always pass num_accepted_tokens.

    fla_npu's and torch_npu's documentation disagree on what the operator does without it.
    """
    tokens = q.shape[0]
    lengths = torch.full((count + 1,), tokens // count, dtype=torch.int32, device=q.device)
    lengths[0] = 0
    operators = importlib.import_module("fla_npu.ops.ascendc")
    return operators.npu_recurrent_gated_delta_rule(
        q.contiguous(), k.contiguous(), v.contiguous(), states, beta=beta, scale=scale,
        actual_seq_lengths=lengths, g=g, num_accepted_tokens=torch.ones_like(lengths[1:]),
        ssm_state_indices=make.counted(tokens, device=q.device).int(),
    )  # fmt: skip
