"""No op returns a stale result after a write that does not raise the input's version counter."""

import itertools

import pytest
import torch
from npu_ops_tools.where import ops
from support import devices
from test_defaults import calls, same
from writes import WRITES

import npu_ops


def another(name, x):
    """Return other values for an argument, valid like the first ones."""
    if name.endswith("_cpu") and isinstance(x, list):  # lengths on the host
        return another(name, torch.tensor(x)).tolist()
    if isinstance(x, tuple):
        return tuple(another(name, y) for y in x)
    if not isinstance(x, torch.Tensor) or not x.numel():
        return x
    backwards = x.flip(tuple(range(x.dim())))
    is_starts = name.startswith("cu_") or name == "query_start_loc"
    if name == "offs":  # ends of groups; the first group starts at 0
        return x[-1] - torch.nn.functional.pad(backwards[1:], (0, 1))
    return x[-1] - backwards if is_starts else backwards


def copied(inputs):
    """Return the inputs with each tensor cloned to contiguous memory."""

    def copy(x):
        return x.clone(memory_format=torch.contiguous_format)

    return torch.utils._pytree.tree_map_only(torch.Tensor, copy, inputs)


def tensors(x):
    """Return the non-empty tensors of an argument."""
    leaves = torch.utils._pytree.tree_leaves(x)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.numel()]


def results(function, inputs):
    """Return outputs and arguments, some of which the function writes."""
    out = function(**inputs)
    return dict(enumerate(out if isinstance(out, tuple) else (out,))) | inputs


@pytest.mark.parametrize("op", ops())
def test_what_was_rewritten_is_read_again(op):
    writes, stale = itertools.cycle(WRITES.items()), []
    for name, function, make_inputs, _ in calls(op):
        inputs = make_inputs(torch.float32)
        rewritten = copied({n: another(n, x) for n, x in inputs.items()})
        torch.manual_seed(0)
        expected = results(function, copied(rewritten))
        for _ in range(2):
            how, write = next(writes)
            kept = copied(inputs)
            function(**kept)
            for n, x in kept.items():
                if isinstance(x, list):
                    x[:] = rewritten[n]
                for old, new in zip(tensors(x), tensors(rewritten[n]), strict=True):
                    write(old, new)
            torch.manual_seed(0)
            if not same(results(function, kept), expected):
                stale.append(f"{name}: {how}")
    assert stale == []


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("packed", [False, True])
def test_angles_on_a_device(device, packed):
    """Tensors are rewritten through `.data`, because NumPy cannot write to device memory."""
    q, freqs, other = (torch.randn(8, n, 1, 16).to(device) for n in (1, 1, 1))
    starts, others = (torch.tensor([0, n, 8], device=device) for n in (3, 6))
    q, packing = (q[:, 0], {"layout": "TND", "max_seqlen": 8}) if packed else (q, {})

    def rotated():
        given = {"cu_seqlens": starts} if packed else {}
        return npu_ops.apply_rotary_pos_emb_freqs(q, None, freqs, **packing, **given)[0]

    first = rotated()
    freqs.data.copy_(other)
    starts.data.copy_(others)
    second = rotated()
    freqs, starts = freqs.clone(), starts.clone()
    assert second.equal(rotated()) and not second.equal(first)
