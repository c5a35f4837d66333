"""Attention: dropout, torch operator rules, and inputs that must not affect outputs."""

import contextlib
import itertools

import pytest
import torch
import torch.nn.functional as F
from attention_calls import (
    CLOSE,
    IMPLEMENTATIONS,
    OPS,
    compare,
    heads_first,
    moved,
    qkv,
    run,
    runs,
    wanted,
)
from support import (
    assert_all_close,
    evaluate,
    exact,
    floats,
    forced,
    implementations,
)
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import npu_ops
from npu_ops.core import rng
from npu_ops.core.compare import assert_close
from npu_ops.ops.attention import op, reference
from npu_ops.ops.attention.cases import CASES, DIFFERENTIABLE, TOLERANCES

# Dropout


def test_dropout_keeps_the_mean():
    v = torch.ones(2, 300, 4, 16)
    q = torch.zeros_like(v)
    torch.manual_seed(0)
    out = npu_ops.attention(q, q, v, dropout_p=0.3)
    assert abs(out.mean().item() - 1) < 2e-3 and 0.01 < out.std() < 0.1


@IMPLEMENTATIONS
@pytest.mark.parametrize("p", [1e-6, 0.9999, 0.99999])
def test_dropout_scales_by_what_is_drawn(p, implementation, device):
    """The scale uses p rounded to steps of 2^-16. With the exact p it would be half
    too large at 0.99999."""
    n = 512
    q, v = torch.zeros(1, n, 1, 16, device=device), torch.ones(1, n, 1, 16, device=device)
    state = torch.tensor([3, 4])
    keep = reference.keep_mask(torch.arange(n), n, p, state).sum(-1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rng, "new_state", lambda device, generator: state.to(device))
        inputs = {"q": q, "k": q, "v": v, "dropout_p": p}
        by = implementation if runs(implementation, inputs, ("v",)) else None
        out = run(inputs, ("v",), by)
    assert keep.any()
    expected = keep / n * 65536 / (65536 - rng.threshold(p))
    torch.testing.assert_close(out["output 0"][0, :, 0, 0].cpu(), expected)
    grad = exact(out["output 0"], 7)[0, :, 0].cpu().double()
    expected = (grad * expected.double()[:, None]).sum(0)
    total = out["gradient of v"][0, :, 0].cpu().double().sum(0)
    torch.testing.assert_close(total, expected, rtol=2e-5, atol=1e-4)  # sums of 512 in fp32


def test_dropout_is_the_reference_s_mask():
    """A query of zeros weighs all keys equally, so one-hot values show which keys are kept."""
    n, p = 200, 0.4
    q, v = torch.zeros(1, n, 1, n), torch.eye(n)[None, :, None]
    generator = torch.Generator().manual_seed(5)
    out = npu_ops.attention(q, q, v, dropout_p=p, generator=generator)[0, :, 0]
    state = rng.new_state(torch.device("cpu"), torch.Generator().manual_seed(5))
    keep = reference.keep_mask(torch.arange(n), n, p, state)
    torch.testing.assert_close(out, keep / n * rng.scale(p))
    assert abs(keep.float().mean() - 0.6) < 0.01


def test_keep_mask_uses_every_draw_once():
    """A tile of 128 columns uses 16 Philox calls: each 16-bit half of a word decides one column."""
    state = torch.tensor([(3 << 40) + 5, (7 << 33) + 1])
    keep = reference.keep_mask(torch.tensor([9]), 256, 0.5, state)[0]
    for tile, call in itertools.product(range(2), range(16)):
        counter = (tile * 16 + call, 9, 1, 7 << 1)
        words = rng.philox4x32(counter, (5, 3 << 8))
        for lane in range(8):
            draw = (int(words[lane // 2]) >> 16 * (lane % 2)) & 0xFFFF
            assert bool(keep[tile * 128 + lane * 16 + call]) == (draw >= 32768)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_draws_the_same_mask(reentrant):
    q, k, v = (x.requires_grad_() for x in qkv(dim=8))

    def layer(q, k, v):
        return npu_ops.attention(q, k, v, is_causal=True, dropout_p=0.4)

    torch.manual_seed(3)
    expected = torch.autograd.grad(layer(q, k, v).square().sum(), (q, k, v))
    torch.manual_seed(3)
    out = checkpoint(layer, q, k, v, use_reentrant=reentrant)
    actual = torch.autograd.grad(out.square().sum(), (q, k, v)) if not reentrant else None
    if reentrant:
        out.square().sum().backward()
        actual = (q.grad, k.grad, v.grad)
    for a, b in zip(actual, expected, strict=True):
        assert torch.equal(a, b)


# torch operators


OPCHECKED = ["causal-64", "layout-SBND", "mask", "bias-row", "sinks", "dropout", "packed-causal"]


@pytest.mark.parametrize("name", [*OPCHECKED, "mla-192-128", "tokens-0", "padded"])
def test_opcheck(name):
    case = next(case for case in CASES if case.name == name)
    inputs = {k: v for k, v in case.inputs(torch.float32).items() if k != "return_lse"}
    for x in DIFFERENTIABLE:
        if inputs.get(x) is not None:
            inputs[x].requires_grad_()
    q, k, v, extra, rule = npu_ops.ops.attention._prepare(**inputs)
    state = torch.tensor([1, 2]) if rule.dropout_p else None
    args = (*(x.detach().requires_grad_() for x in (q, k, v)), *extra._replace(rng_state=state))
    args = [x.detach().requires_grad_(x.requires_grad) if x is not None else x for x in args]
    torch.library.opcheck(torch.ops.npu_ops.attention.default, (*args, *rule))
    out, lse = torch.ops.npu_ops.attention(*args, *rule)
    args = [x.detach() if x is not None else x for x in args]
    dout, out, lse = torch.randn(out.shape), out.detach(), lse.detach()
    flags = extra.bias is not None, extra.sinks is not None
    torch.library.opcheck(
        torch.ops.npu_ops.attention_backward.default, (dout, None, out, lse, *args, *rule, *flags)
    )


@pytest.mark.parametrize("name", ["causal-64", "packed-causal", "sinks", "mask", "paged-decode"])
def test_compile(name):
    """Compiled to one graph, outputs and gradients are those of eager mode."""
    case = next(case for case in CASES if case.name == name)
    inputs = case.inputs(torch.float32)

    def function(q, **rest):
        return npu_ops.attention(q.sin(), **rest)

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    wrt = wanted(inputs)
    with torch.set_grad_enabled(bool(wrt)):
        actual, expected = (evaluate(f, inputs, wrt) for f in (compiled, function))
    torch._dynamo.reset()
    assert_all_close(actual, expected, TOLERANCES)


def test_one_compilation_serves_all_lengths():
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(
        lambda q, k, v: npu_ops.attention(q, k, v, is_causal=True),
        fullgraph=True,
        dynamic=True,
        backend=counter,
    )
    frames = []
    for tokens in (7, 64, 131):
        inputs = qkv(queries=tokens)
        assert torch.equal(compiled(*inputs), npu_ops.attention(*inputs, is_causal=True))
        frames.append(counter.frame_count)
    torch._dynamo.reset()
    assert len(set(frames)) == 1, "compiled again for another length"


def test_fake_tensors():
    with FakeTensorMode():
        q, k, v = qkv()
        out, lse = npu_ops.attention(q, k, v[..., :8], return_lse=True)
    assert out.shape == (2, 9, 4, 8) and lse.shape == (2, 4, 9) and lse.dtype == torch.float32


def test_autocast_converts_as_torch_does():
    q, k, v = qkv()
    with torch.autocast("cpu", torch.bfloat16):
        out = npu_ops.attention(q, k.bfloat16(), v)
        theirs = F.scaled_dot_product_attention(*heads_first(q, q, q))
    assert out.dtype == theirs.dtype == torch.bfloat16


@pytest.mark.parametrize("layout", ["BSND", "BNSD", "SBND"])
def test_a_fused_projection_is_read_in_place(layout):
    """Slices of [.., 3, N, D] are read by their strides; the output is contiguous in its layout."""
    fused = torch.randn(2, 9, 3, 4, 16)
    q, k, v = fused.unbind(2)
    order = {"BSND": (0, 1, 2, 3), "BNSD": (0, 2, 1, 3), "SBND": (1, 0, 2, 3)}[layout]
    out = npu_ops.attention(*(x.permute(order) for x in (q, k, v)), layout=layout)
    assert out.is_contiguous()
    expected = npu_ops.attention(q.contiguous(), k.contiguous(), v.contiguous())
    assert torch.equal(out, expected.permute(order))


def test_gradient_of_the_log_sum_exp():
    """Two halves of the keys, merged by their lse, give the output and gradients of the whole."""
    q, k, v = (x.requires_grad_() for x in qkv(queries=5, keys=8))
    whole = npu_ops.attention(q, k, v)
    parts = [npu_ops.attention(q, k[:, s], v[:, s], return_lse=True)
             for s in (slice(0, 3), slice(3, 8))]  # fmt: skip
    total = torch.logaddexp(parts[0][1], parts[1][1])
    merged = sum(o * (lse - total).exp().transpose(1, 2)[..., None] for o, lse in parts)
    assert_close("output", merged, whole, CLOSE)
    found = (torch.autograd.grad(out, (q, k, v), exact(whole)) for out in (merged, whole))
    for ours, theirs in zip(*found, strict=True):
        assert_close("gradient", ours, theirs, CLOSE)


@IMPLEMENTATIONS
def test_gradient_of_sinks_where_there_are_no_keys(implementation, device):
    """Without keys, lse is the sink."""
    for keys in (0, 3):
        q, k = torch.randn(2, 5, 4, 16), torch.randn(2, keys, 4, 16)
        lengths = {"seqlens_k": torch.zeros(2, dtype=torch.int64, device=device)} if keys else {}
        sinks = torch.randn(4).to(device).requires_grad_()
        inputs = {"q": q.to(device), "k": k.to(device), "v": k.to(device), "return_lse": True}
        by = implementation if runs(implementation, inputs | lengths, ()) else None
        with forced(by, *OPS) if by else contextlib.nullcontext():
            out, lse = npu_ops.attention(**inputs, **lengths, sinks=sinks)
        assert not out.any() and torch.equal(lse, sinks[:, None].expand(2, 4, 5))
        grad = torch.randn(lse.shape).to(device)
        with forced(by, *OPS) if by and by != "aclnn" else contextlib.nullcontext():
            (found,) = torch.autograd.grad(lse, sinks, grad)
        torch.testing.assert_close(found, grad.sum((0, 2)))


@IMPLEMENTATIONS
@pytest.mark.parametrize("scale", [0.0, -0.7])
def test_scale_of_zero_or_less(scale, implementation, device):
    for case in ("causal-64", "bottom-right-more-keys", "packed-causal", "window-16-0-square"):
        inputs = next(c for c in CASES if c.name == case).inputs(torch.float32, device)
        inputs["scale"] = scale
        wrt = wanted(inputs)
        by = implementation if runs(implementation, inputs, wrt) else None
        wide = floats(moved(inputs, "cpu"), torch.float64)
        compare(run(inputs, wrt, by), run(wide, wrt, "reference"), torch.float32)


TOKENS, CAUSAL = 40, torch.ones(40, 40).tril().bool()
AHEAD = torch.arange(40) - torch.arange(40)[:, None]
HALVES = (torch.arange(40) < 17)[:, None] == (torch.arange(40) < 17)
STARTS = {"layout": "TND", "cu_seqlens_q": torch.tensor([0, 17, 40])}
BLOCKS = {"block_table": torch.tensor([[3, 0, 2]], dtype=torch.int32)}


# EVERY includes the vendor's operators. They multiply the value of a dropped weight by 0, so a NaN
# in it reaches the output.
EVERY = implementations(op.forward.table)
OURS = pytest.mark.parametrize(
    "implementation, device", [p for p in EVERY if p.values[0] in ("cpu", "reference")]
)
KERNELS = pytest.mark.parametrize(
    "implementation, device", [p for p in EVERY if p.values[0] != "aclnn"]
)


# Arguments of each mask, and which key (column) each query (row) sees.
MASKS = {
    "causal": ({"is_causal": True}, CAUSAL),
    "causal, top left": ({"is_causal": True, "causal_alignment": "top_left"}, CAUSAL),
    "window": ({"window": (3, 0)}, (AHEAD <= 0) & (AHEAD >= -3)),
    "window, left alone": ({"window": (-1, 2)}, AHEAD <= 2),
    "mask": ({"attn_mask": CAUSAL}, CAUSAL),
    "capped": ({"is_causal": True, "softcap": 3.0}, CAUSAL),
    "bias and causal": ({"is_causal": True, "bias": torch.zeros(40, 40)}, CAUSAL),
    "bias": ({"bias": torch.zeros(40, 40).masked_fill(~CAUSAL, -torch.inf)}, CAUSAL),
    "dropout": ({"is_causal": True, "dropout_p": 0.2}, CAUSAL),
    "sinks": ({"is_causal": True, "sinks": torch.zeros(4)}, CAUSAL),
    "packed": (STARTS, HALVES),
    "packed, causal": (STARTS | {"is_causal": True}, HALVES & CAUSAL),
    "lengths": ({"seqlens_k": torch.tensor([30])}, (torch.arange(40) < 30).expand(40, 40)),
    "blocks": (BLOCKS | {"seqlens_k": torch.tensor([40]), "is_causal": True}, CAUSAL),
    "blocks, lengths": (
        BLOCKS | {"seqlens_k": torch.tensor([30])}, (torch.arange(40) < 30).expand(40, 40),
    ),
}  # fmt: skip


def with_broken(asked, what, place, value, device, implementation):
    """Return output and gradients by name, tokens first.

    what, place: the input, and its row, whose element 3 in each head is set to `value`.
    """
    torch.manual_seed(0)
    given = {x: torch.randn(TOKENS, 4 if x in ("q", "dout") else 2, 16) for x in ("q", "k", "v")}
    given["dout"] = torch.randn(TOKENS, 4, 16)
    if what:
        given[what][place, :, 3] = value
    paged, packed = "block_table" in asked, asked.get("layout") == "TND"
    leaves = {name: x.to(device) for name, x in given.items()}
    if paged:  # 16 rows per block
        for name in "kv":
            cache = torch.full((4, 16, 2, 16), float("nan"), device=device)
            rows = F.pad(leaves[name], (0, 0, 0, 0, 0, 8), value=torch.nan)
            cache[[3, 0, 2]] = rows.view(3, 16, 2, 16)
            leaves[name] = cache
    dout = leaves.pop("dout")
    whole = {n: packed or (paged and n != "q") for n in leaves}
    calls = {n: (x if whole[n] else x[None]).requires_grad_(not paged) for n, x in leaves.items()}
    with forced(implementation, *OPS):
        torch.manual_seed(1)  # seeds dropout
        out = npu_ops.attention(**calls, **moved(asked, device))
        found = {"out": out}
        if not paged:
            grads = torch.autograd.grad(out, list(calls.values()), dout.view(out.shape))
            found |= dict(zip(("dq", "dk", "dv"), grads, strict=True))
    return {name: (x if packed else x[0]).detach().cpu() for name, x in found.items()}


@OURS
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_takes_no_part_does_not_matter(mask, value, implementation, device):
    """A NaN or infinity in one row of k, v, q or dout may change only rows that depend on it.

    A row of k or v may change out and dq of the queries that see it, a row of q its own out and
    dq, a row of dout its own dq. Each may change dk and dv of the keys that these queries see.
    """
    asked, part = MASKS[mask]
    expected = with_broken(asked, None, 0, value, device, implementation)
    paged = "block_table" in asked
    for what, place in [("k", 20), ("v", 20), ("k", 35), ("v", 35), ("q", 12), ("dout", 12)]:
        if paged and what in ("q", "dout"):
            continue
        actual = with_broken(asked, what, place, value, device, implementation)
        queries = part[:, place] if what in "kv" else torch.arange(TOKENS) == place
        keys = part[queries].any(0)
        touched = {"out": queries, "dq": queries, "dk": keys, "dv": keys}
        if what == "dout":
            touched["out"] = torch.zeros_like(queries)
        for name, x in actual.items():
            case = f"{name} with {value} in {what}[{place}]"
            left = ~touched[name]
            torch.testing.assert_close(x[left], expected[name][left], msg=lambda m, c=case: c + m)
        if what == "v":
            broken = ~actual["out"][..., 3].isfinite().all(-1)
            assert torch.equal(broken, queries), f"out with {value} in {what}[{place}]"


@KERNELS
@pytest.mark.parametrize("mask", [name for name in MASKS if name != "bias"])
def test_nan_in_a_key_is_in_the_outputs_of_queries_that_see_it(mask, implementation, device):
    """No other output has a NaN. For NaN in values, see the docstring of `npu_ops.attention`."""
    asked, part = MASKS[mask]
    expected = with_broken(asked, None, 0, torch.nan, device, implementation)["out"]
    for place in (20, 35):
        actual = with_broken(asked, "k", place, torch.nan, device, implementation)["out"]
        sees = part[:, place]
        torch.testing.assert_close(actual[~sees], expected[~sees])
        assert actual[sees].isnan().all()


@KERNELS
@pytest.mark.parametrize("keys", [1, 3, 15, 40])
@pytest.mark.parametrize("asked", [{}, {"is_causal": True}, {"window": (1, 1)}], ids=str)
def test_scores_that_are_all_nan_are_not_no_keys(asked, keys, implementation, device):
    """If all scores of a query are NaN, so is its output. torch's kernel gives 0 below 16 keys."""
    q, k, v = (torch.randn(1, n, 2, 16, device=device) for n in (3, keys, keys))
    q[:, 1] = torch.nan
    with forced(implementation, *OPS):
        out, lse = npu_ops.attention(q, k, v, return_lse=True, **asked)
    ahead = torch.arange(keys) - torch.arange(3)[:, None] - (keys - 3)
    part = torch.ones(3, keys, dtype=torch.bool)
    if "is_causal" in asked:
        part = ahead <= 0
    if "window" in asked:
        part = ahead.abs() <= 1
    nan = part.any(1) & (torch.arange(3) == 1)
    assert torch.equal(out.isnan().all(-1).cpu(), nan[None, :, None].expand(1, 3, 2))
    assert torch.equal(lse.isnan().cpu(), nan.expand(1, 2, 3))


def test_no_second_gradient():
    q, k, v = (x.requires_grad_() for x in qkv())
    (grad,) = torch.autograd.grad(npu_ops.attention(q, k, v).sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="a gradient of its gradient"):
        grad.sum().backward()
