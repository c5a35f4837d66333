"""Shared by megatron, slime, verl: log-probabilities of labels, computed as servers do.

SGLang and vLLM compute log_softmax of the logits in fp32. This module does the same for one block
of rows at a time. So besides the logits and their gradient it needs memory for the fp32 logits of
one block (see `BLOCK`) and for one fp32 number per row.
"""

from __future__ import annotations

import torch

from npu_ops.core.collective import all_gather

# Bytes of fp32 logits per block and rank. With a group, each rank gathers the blocks of all ranks.
BLOCK = 1 << 28


def log_probs(logits: torch.Tensor, labels: torch.Tensor, group=None) -> torch.Tensor:
    """Return log_softmax(logits)[..., labels] in fp32 (fp64 for fp64), differentiable in logits.

    Args:
        logits: `[..., V]`. With a group, each rank has V of the vocabulary's V * ranks columns, in
            the order of ranks.
        labels: `[...]`, int64, indices into the whole vocabulary.
        group: the ranks that share the vocabulary. None or a group of one: logits have all columns.

    Returns:
        `[...]`, fp32 or fp64.
    """
    rows = logits.reshape(-1, logits.shape[-1])
    if group is not None and group.size() == 1:
        group = None
    return _LogProbs.apply(rows, labels.reshape(-1), group).view(labels.shape)


class _LogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, labels, group):
        """logits: [N, V]. labels: [N]."""
        wide = torch.float64 if logits.dtype is torch.float64 else torch.float32
        found = logits.new_empty(len(labels), dtype=wide)
        logsumexp = torch.empty_like(found)  # of each row
        for block in _blocks(logits, labels, found, logsumexp):
            _of_rows(*block, group)
        ctx.group = group
        ctx.save_for_backward(logits, labels, logsumexp)
        return found

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        logits, labels, logsumexp = ctx.saved_tensors
        found = torch.empty_like(logits)
        for out, *block in _blocks(found, logits, labels, logsumexp, grad):
            out.copy_(_gradient(*block, ctx.group))
        return found, None, None


def _blocks(first, *others):
    """Split tensors of equally many rows into blocks of rows, sized by the first's columns."""
    count = max(1, BLOCK // (4 * max(1, first.shape[1])))
    return zip(*(x.split(count) for x in (first, *others)), strict=True)


def _of_rows(logits, labels, found, logsumexp, group) -> None:
    """Write the log-probabilities and the logsumexp of one block."""
    logits = logits.to(found.dtype)
    if group is not None:
        logits = all_gather(logits, group).transpose(0, 1).flatten(1)
    at = labels.unsqueeze(-1)
    found.copy_(torch.log_softmax(logits, -1).gather(-1, at).squeeze(-1))
    torch.sub(logits.gather(-1, at).squeeze(-1), found, out=logsumexp)


def _gradient(logits, labels, logsumexp, grad, group):
    """Return grad * (1 at the label - softmax) for this rank's columns."""
    columns = logits.shape[1]
    grad = grad.to(logsumexp.dtype).unsqueeze(-1)
    found = (logits.to(logsumexp.dtype) - logsumexp.unsqueeze(-1)).exp_().mul_(-grad)
    local = labels - (0 if group is None else group.rank() * columns)
    here = (local >= 0) & (local < columns)
    at_label = torch.where(here.unsqueeze(-1), grad, 0)
    return found.scatter_add_(-1, local.clamp(0, columns - 1).unsqueeze(-1), at_label)
