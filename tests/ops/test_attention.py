"""attention: implementations against the reference, the reference against others', the plan."""

import contextlib
import gc
import inspect
import itertools
import json
import random
import subprocess
import sys
import types

import pytest
import torch
import torch.nn.functional as F
from npu_ops_tools import where
from support import (
    assert_all_close,
    copies,
    devices,
    evaluate,
    exact,
    floats,
    forced,
    implementations,
    parametrize_cases,
    parametrize_dtypes,
)
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import npu_ops
from npu_ops import AttentionSpec, plan_attention
from npu_ops.core import env, hardware, rng
from npu_ops.core.compare import assert_close
from npu_ops.ops.attention import limits, op, reference, routing
from npu_ops.ops.attention.cases import CASES, DIFFERENTIABLE, TOLERANCES
from npu_ops.ops.attention.table import OPERATORS

OPS = ("attention", "attention_backward")
CLOSE = TOLERANCES[torch.float32]
IMPLEMENTATIONS = pytest.mark.parametrize(
    "implementation, device", implementations(op.forward_table)
)
DEVICES = pytest.mark.parametrize(
    "device", sorted({p.values[1] for p in implementations(op.forward_table)})
)


def moved(inputs, device):
    """`inputs` on a device, but for what belongs to the host."""
    on_host = ("cu_seqlens_cpu", "seqlens_k_cpu")
    return {
        name: value.to(device) if isinstance(value, torch.Tensor) and name not in on_host else value
        for name, value in inputs.items()
    }


def wanted(inputs, names=DIFFERENTIABLE):
    given = [name for name in names if inputs.get(name) is not None]
    return () if inputs.get("block_table") is not None else tuple(given)


def run(inputs, wrt=(), implementation=None):
    """Outputs and gradients; by one implementation, or by whatever takes it."""
    torch.manual_seed(11)
    if implementation is None:
        return evaluate(npu_ops.attention, inputs, wrt)
    with forced(implementation, *OPS):
        return evaluate(npu_ops.attention, inputs, wrt)


def runs(implementation, inputs, wrt):
    """Whether an implementation takes a call forward and backward."""
    with torch.set_grad_enabled(bool(wrt)):
        asking = {n: v.detach().requires_grad_() if n in wrt else v for n, v in inputs.items()}
        rows = npu_ops.explain("attention", **asking)
    forward = next(row for row in rows if row.implementation == implementation)
    needs_lse = wrt and inputs.get("return_lse")
    return forward.why_not in (None, *(f"{i} comes first" for i in ORDER)) and not (
        needs_lse and implementation == "aclnn"
    )


ORDER = [implementation.name for implementation in op.forward_table.implementations]


# The values


@parametrize_cases(CASES, large=False)
@parametrize_dtypes()
@IMPLEMENTATIONS
def test_against_reference(case, dtype, implementation, device):
    """By the implementation, or where it says that it cannot, by the one that runs in its place."""
    inputs = case.inputs(dtype, device)
    wrt = wanted(inputs)
    wide = floats(case.inputs(dtype), torch.float64)
    state = torch.tensor([1, 2])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rng, "new_state", lambda device, generator: state.to(device))
        expected = run(wide, wrt, "reference")
        actual = run(inputs, wrt, implementation if runs(implementation, inputs, wrt) else None)
    assert actual["output 0"].dtype == dtype
    assert all(value.dtype == dtype for n, value in actual.items() if n.startswith("gradient"))
    compare(actual, expected, dtype)


def compare(actual, expected, dtype):
    assert actual.keys() == expected.keys()
    for name, value in actual.items():
        there = expected[name]
        nothing = there == -torch.inf  # the log of a sum of nothing
        assert torch.equal(value.cpu() == -torch.inf, nothing), name
        tidy = [x.cpu().masked_fill(nothing, 0) for x in (value, there)]
        assert_close(name, *tidy, TOLERANCES[dtype])


@pytest.mark.slow
@parametrize_cases(CASES, large=True)
def test_large_against_torch(case):
    """Memory for all pairs is out of reach: a sequence at a time, by torch."""
    inputs = case.inputs(torch.bfloat16)
    actual = npu_ops.attention(**inputs)
    starts = inputs.get("cu_seqlens_q")
    bounds = [0, case.tokens] if starts is None else starts.tolist()
    q, k, v = (inputs[x].flatten(0, -3) for x in "qkv")
    for begin, end in itertools.pairwise(bounds):
        one = [x[begin:end].transpose(0, 1).float() for x in (q, k, v)]
        expected = F.scaled_dot_product_attention(*one, is_causal=case.causal, enable_gqa=True)
        mine = actual.flatten(0, -3)[begin:end].transpose(0, 1)
        assert_close("output", mine, expected, TOLERANCES[torch.bfloat16])


def rules():
    """Every kind of mask: the call, and whether query i sees key j of lq and lk."""
    yield "none", {}, lambda i, j, lq, lk: True
    for causal, left, right in itertools.product((False, True), (-1, 0, 2), (-1, 0, 3)):
        for alignment in ("bottom_right", "top_left"):
            if not causal and left == right == -1:
                continue
            call = {"is_causal": causal, "causal_alignment": alignment}
            call |= {} if left == right == -1 else {"window": (left, right)}

            def sees(i, j, lq, lk, causal=causal, left=left, right=right, alignment=alignment):
                diagonal = i + (lk - lq if alignment == "bottom_right" else 0)
                before = left == -1 or diagonal - j <= left
                after = (right == -1 or j - diagonal <= right) and not (causal and j > diagonal)
                return before and after

            yield f"{'causal-' * causal}{left}-{right}-{alignment}", call, sees


RULES = list(rules())
EACH_RULE = pytest.mark.parametrize(
    "call, sees", [r[1:] for r in RULES], ids=[rule[0] for rule in RULES]
)


def seen(sees, lq, lk):
    return torch.tensor([[sees(i, j, lq, lk) for j in range(lk)] for i in range(lq)])


@EACH_RULE
@pytest.mark.parametrize("lengths", [(5, 5), (3, 7), (7, 3), (1, 6)], ids=str)
@DEVICES
def test_one_hot_values_reveal_the_softmax(call, sees, lengths, device):
    """out[i, j] is the weight of key j for query i: a mask dropped, shifted or forced shows.

    Every weight that should be 0 is 0, and the others are torch's softmax of the same scores.
    """
    lq, lk = lengths
    draw = torch.Generator().manual_seed(0)
    q, k = (torch.randn(2, n, h, lk, generator=draw) for n, h in ((lq, 4), (lk, 2)))
    v = torch.eye(lk)[None, :, None].expand(2, lk, 2, lk)
    part = seen(sees, lq, lk)
    out = npu_ops.attention(*(x.to(device) for x in (q, k, v)), **call).cpu()
    scores = torch.einsum("bind,bjnd->bnij", q, k.repeat_interleave(2, 2)) * lk**-0.5
    expected = scores.masked_fill(~part, -torch.inf).softmax(-1).nan_to_num()
    assert_close("weights", out.transpose(1, 2), expected, CLOSE)
    assert (out.transpose(1, 2)[:, :, ~part] == 0).all()


@EACH_RULE
@DEVICES
def test_packed_is_each_sequence_by_itself(call, sees, device):
    """Also sequences without queries or without keys."""
    lengths = [(3, 3), (0, 2), (4, 6), (2, 0), (5, 1), (1, 1), (1, 1)]
    starts = [list(itertools.accumulate(n, initial=0)) for n in zip(*lengths, strict=True)]
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(s[-1], h, 8, generator=draw) for s, h in zip(
        (starts[0], starts[1], starts[1]), (4, 2, 2), strict=True))  # fmt: skip
    inputs = {"q": q, "k": k, "v": v, "layout": "TND", **call}
    inputs |= {f"cu_seqlens_{x}": torch.tensor(s) for x, s in zip("qk", starts, strict=True)}
    out = npu_ops.attention(**moved(inputs, device), cu_seqlens_cpu=starts).cpu()
    for (lq, lk), bq, bk in zip(lengths, *starts, strict=False):
        one = (x[b : b + n].transpose(0, 1) for x, b, n in ((q, bq, lq), (k, bk, lk), (v, bk, lk)))
        part = seen(sees, lq, lk).view(lq, lk).bool()
        expected = F.scaled_dot_product_attention(
            *one, attn_mask=torch.zeros(lq, lk).masked_fill(~part, -1e30), enable_gqa=True
        ) * part.any(-1)[:, None]  # fmt: skip
        assert_close("output", out[bq : bq + lq].transpose(0, 1), expected, CLOSE)


@DEVICES
@pytest.mark.parametrize("length", [5, 513, 700])
def test_dense_mask_of_a_single_row(length, device):
    """vllm-ascend #15503: a mask [1, 1, 1, S] was ignored past key 512."""
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, n, 4, 16, generator=draw) for n in (1, length, length))
    mask = torch.arange(length) < length // 2
    inputs = moved({"q": q, "k": k, "v": v, "attn_mask": mask[None, None, None]}, device)
    out = npu_ops.attention(**inputs).cpu()
    expected = npu_ops.attention(q, k[:, mask], v[:, mask])
    assert_close("output", out, expected, CLOSE)


@DEVICES
@pytest.mark.parametrize("block_size", [16, 64, 128])
@pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])
@pytest.mark.parametrize("queries", [1, 4, 16])
def test_paged_as_servers_call_it(queries, packed, block_size, device):
    """Decode and verification, as SGLang and vLLM do on Ascend, against torch on dense keys."""
    draw = torch.Generator().manual_seed(0)
    lengths = [queries + n for n in (70, 0, 131)]
    width = -(-max(lengths) // block_size)
    shape = 3 * width + 1, block_size, 2, 64
    cache = [torch.randn(shape, generator=draw).bfloat16() for _ in range(2)]
    table = torch.randperm(shape[0], generator=draw)[: 3 * width].view(3, width).int()
    q = torch.randn(3, queries, 8, 64, generator=draw).bfloat16()
    inputs = {"q": q, "k": cache[0], "v": cache[1], "block_table": table, "is_causal": True}
    inputs |= {"seqlens_k": torch.tensor(lengths, dtype=torch.int32)}
    if packed:
        starts = torch.arange(4) * queries
        inputs |= {"q": q.flatten(0, 1), "layout": "TND", "cu_seqlens_q": starts}
        inputs |= {"cu_seqlens_cpu": starts, "max_seqlen_q": queries}
    for b, length in enumerate(lengths):  # what lies behind the end must not be read
        unused = table[b, -(-length // block_size) :]
        table[b, -(-length // block_size) :] = torch.full_like(unused, 2**30)
    out = npu_ops.attention(**moved(inputs, device), seqlens_k_cpu=lengths).cpu()
    for b, length in enumerate(lengths):
        used = table[b, : -(-length // block_size)].long()
        k, v = (x[used].flatten(0, 1)[:length].transpose(0, 1).float() for x in cache)
        causal = torch.ones(queries, length, dtype=torch.bool).tril(length - queries)
        expected = F.scaled_dot_product_attention(
            q[b].transpose(0, 1).float(), k, v, attn_mask=causal, enable_gqa=True
        )
        mine = out.unflatten(0, (3, -1))[b] if packed else out[b]
        assert_close("output", mine.transpose(0, 1), expected, TOLERANCES[torch.bfloat16])


# Against others'


def qkv(batch=2, queries=9, keys=None, heads=4, kv_heads=2, dim=16, seed=0):
    """[B, S, N, D]."""
    draw = torch.Generator().manual_seed(seed)
    keys = queries if keys is None else keys
    return (
        torch.randn(batch, queries, heads, dim, generator=draw),
        torch.randn(batch, keys, kv_heads, dim, generator=draw),
        torch.randn(batch, keys, kv_heads, dim, generator=draw),
    )


def heads_first(*tensors):
    return [x.transpose(1, 2) for x in tensors]


@pytest.mark.parametrize("causal", [False, True])
@DEVICES
def test_torch_and_its_gradients(causal, device):
    """torch's own causal mask starts at the top left."""
    leaves = [x.requires_grad_() for x in qkv(keys=12)]
    expected = F.scaled_dot_product_attention(
        *heads_first(*leaves), is_causal=causal, enable_gqa=True
    ).transpose(1, 2)
    theirs = torch.autograd.grad(expected, leaves, exact(expected))
    ours = [x.detach().to(device).requires_grad_() for x in leaves]
    out = npu_ops.attention(*ours, is_causal=causal, causal_alignment="top_left")
    mine = torch.autograd.grad(out, ours, exact(out.cpu()).to(device))
    for name, a, b in zip(("out", *"qkv"), (out, *mine), (expected, *theirs), strict=True):
        assert_close(name, a.cpu(), b, CLOSE)


def test_transformers_gpt_oss():
    """Attention sinks with a sliding window, and their gradients."""
    from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

    q, k, v = (x.requires_grad_() for x in qkv())
    module = types.SimpleNamespace(
        sinks=torch.randn(4, requires_grad=True), num_key_value_groups=2, training=False
    )
    ahead = torch.arange(9) - torch.arange(9)[:, None]
    mask = torch.zeros(9, 9).masked_fill((ahead > 0) | (ahead < -3), -torch.inf)[None, None]
    expected, _ = eager_attention_forward(module, *heads_first(q, k, v), mask, 0.25)
    out = npu_ops.attention(q, k, v, is_causal=True, window=(3, 0), sinks=module.sinks, scale=0.25)
    assert_close("output", out, expected, CLOSE)
    leaves = (q, k, v, module.sinks)
    found = zip(
        leaves,
        torch.autograd.grad(out, leaves, exact(out)),
        torch.autograd.grad(expected, leaves, exact(out)),
        strict=True,
    )
    for leaf, ours, theirs in found:
        assert_close(f"gradient {list(leaf.shape)}", ours, theirs, CLOSE)


def test_transformers_gemma2():
    """A soft cap, before the mask."""
    from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward

    module = types.SimpleNamespace(num_key_value_groups=2, training=False)
    q, k, v = qkv()
    mask = torch.full((9, 9), -torch.inf).triu(1)[None, None]
    expected, _ = eager_attention_forward(
        module, *heads_first(q * 5, k, v), mask, scaling=0.25, softcap=3.0
    )
    out = npu_ops.attention(q * 5, k, v, is_causal=True, softcap=3.0, scale=0.25)
    assert_close("output", out, expected, CLOSE)


def test_transformers_qwen3_vl_vision():
    """The vision tower's attention is one call: packed images, 16 heads of 72, never causal."""
    from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig
    from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionAttention

    torch.manual_seed(0)
    config = Qwen3VLVisionConfig(hidden_size=16 * 72, num_heads=16)
    config._attn_implementation = "eager"
    layer = Qwen3VLVisionAttention(config)
    x, starts = torch.randn(50, 16 * 72), torch.tensor([0, 12, 16, 50])
    cos, sin = torch.randn(50, 72), torch.randn(50, 72)
    expected = layer(x, starts, position_embeddings=(cos, sin))
    q, k, v = layer.qkv(x).view(50, 3, 16, 72).unbind(1)
    q, k = npu_ops.apply_rotary_pos_emb(q, k, cos, sin, layout="TND")
    out = npu_ops.attention(q, k, v, layout="TND", cu_seqlens_q=starts)
    assert_close("output", layer.proj(out.flatten(1)), expected, CLOSE)


MEGATRON = """
import torch
from megatron.core.transformer import dot_product_attention as ours
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
torch.cuda.current_device = lambda: torch.device("cpu")
torch.distributed.init_process_group(
    "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
from megatron.core import parallel_state
parallel_state.initialize_model_parallel(1, 1)
config = TransformerConfig(num_layers=1, hidden_size=64, num_attention_heads=4, num_query_groups=2,
    attention_dropout=0.0, masked_softmax_fusion=False, use_cpu_initialization=True)
import npu_ops
torch.manual_seed(0)
for kind in (AttnMaskType.causal, AttnMaskType.no_mask, AttnMaskType.arbitrary):
    layer = ours.DotProductAttention(config, 1, kind, "self")
    layer.eval()
    layer.config.sequence_parallel = True  # or dropout wants a generator of CUDA's
    q, k, v = (torch.randn(7, 2, n, 16, requires_grad=True) for n in (4, 2, 2))
    mask = torch.rand(2, 1, 7, 7) < 0.4 if kind == AttnMaskType.arbitrary else None
    if kind == AttnMaskType.causal:
        mask = torch.ones(1, 1, 7, 7, dtype=torch.bool).triu(1)
    expected = layer(q, k, v, mask)
    call = {"is_causal": kind == AttnMaskType.causal}
    if kind == AttnMaskType.arbitrary:
        call = {"attn_mask": ~mask}
    out = npu_ops.attention(q, k, v, layout="SBND", **call).flatten(2)
    grad = torch.randn_like(out)
    # A row that Megatron masks entirely is a plain average; ours is 0.
    rows = torch.ones(2, 7) if mask is None else (~mask).any(-1).squeeze(1).expand(2, 7)
    grad, keep = grad * rows.T[..., None], rows.T[..., None].bool()
    torch.testing.assert_close(out * keep, expected * keep, atol=3e-6, rtol=1e-5)
    for a, b in zip(torch.autograd.grad(out, (q, k, v), grad),
                    torch.autograd.grad(expected, (q, k, v), grad)):
        torch.testing.assert_close(a, b, atol=5e-6, rtol=1e-5)
    print(kind.name)
"""


def test_megatron_dot_product_attention():
    """In a process of its own: Megatron wants one to be a rank."""
    folder = where.ROOT / ".cache" / "megatron" / "0.16.1"
    code = f"import sys\nsys.path[:0] = [{str(where.ROOT)!r}, {str(folder)!r}]\n{MEGATRON}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.split() == ["causal", "no_mask", "arbitrary"], done.stderr


# A property: whatever is asked for is computed, or refused with a sentence


ARGUMENTS = inspect.signature(npu_ops.attention).parameters


def random_call(draw: random.Random) -> dict:
    """Arguments of a call that may make no sense."""
    some = lambda *choices: draw.choice(choices)  # noqa: E731
    generator = torch.Generator().manual_seed(draw.randrange(2**31))
    dtype = some(torch.float32, torch.float32, torch.bfloat16, torch.float16)

    def normal(*shape):
        return torch.randn(shape, generator=generator).to(dtype)

    kv_heads = some(1, 2)
    heads, dim = kv_heads * some(1, 2, 3), some(8, 16, 24)
    value = some(dim, dim, dim, 8)
    lq, lk, batch = draw.randrange(0, 9), draw.randrange(0, 9), some(1, 2, 3)
    call = {"layout": some("BSND", "BNSD", "SBND", "BSH", "SBH", "TND", "TND")}
    keys = some("own", "own", "padded", "paged")
    lengths_q = [draw.randrange(0, 5) for _ in range(batch)]
    lengths_k = [draw.randrange(0, 5) for _ in range(batch)]
    starts = [list(itertools.accumulate(n, initial=0)) for n in (lengths_q, lengths_k)]
    if call["layout"] == "TND":
        call |= {"q": normal(starts[0][-1], heads, dim), "cu_seqlens_q": torch.tensor(starts[0])}
        call |= {x: normal(starts[1][-1], kv_heads, d) for x, d in (("k", dim), ("v", value))}
        if keys == "own":
            call |= {"cu_seqlens_k": torch.tensor(starts[1]), "cu_seqlens_cpu": starts}
        else:
            call |= {"cu_seqlens_cpu": starts[0]}
    else:
        call |= {"q": normal(batch, lq, heads, dim)}
        call |= {x: normal(batch, lk, kv_heads, d) for x, d in (("k", dim), ("v", value))}
        first = {"BNSD": lambda x: x.transpose(1, 2), "SBND": lambda x: x.transpose(0, 1)}
        fold = {"BSH": lambda x: x.flatten(2), "SBH": lambda x: x.transpose(0, 1).flatten(2)}
        move = (first | fold).get(call["layout"], lambda x: x)
        call |= {x: move(call[x]) for x in "qkv"}
        if call["layout"] in fold:
            call |= {"num_heads": heads, "num_key_value_heads": kv_heads}
    if keys == "padded":
        lengths_k = [min(n, lk) for n in lengths_k]
        call |= {"seqlens_k": torch.tensor(lengths_k), "seqlens_k_cpu": lengths_k}
    if keys == "paged":
        size = some(4, 16)
        shape = (4 * batch, size, kv_heads)
        shape = (shape[0], kv_heads, size) if call["layout"] == "BNSD" else shape
        call |= {"k": normal(*shape, dim), "v": normal(*shape, value)}
        call |= {"block_table": torch.randperm(4 * batch, generator=generator).view(batch, 4).int()}
        call |= {"seqlens_k": torch.tensor(lengths_k), "seqlens_k_cpu": lengths_k}
    options = {
        "is_causal": True,
        "causal_alignment": "top_left",
        "window": (draw.randrange(-1, 4), draw.randrange(-1, 4)),
        "attn_mask": torch.rand(batch, some(1, heads), lq, lk, generator=generator) < 0.7,
        "bias": normal(some(1, batch), heads, some(1, lq), lk),
        "softcap": 2.0,
        "sinks": normal(heads),
        "dropout_p": 0.25,
        "return_lse": True,
        "scale": some(0.3, 0.0, -0.3),
    }
    chance = {"is_causal": 0.4, "window": 0.25, "causal_alignment": 0.3, "return_lse": 0.3}
    return call | {n: v for n, v in options.items() if draw.random() < chance.get(n, 0.12)}


# On an NPU nearly every one of them is a kernel to compile, so there it is one of 20.
@DEVICES
@pytest.mark.parametrize("count", [2000, pytest.param(20000, marks=pytest.mark.slow)])
def test_any_call_is_right_or_refused(device, count):
    """Forward, and half of them backward."""
    ran, refused, chosen = 0, 0, set()
    step = 1 if device == "cpu" else 20
    for seed in range(0, count, step):
        draw = random.Random(seed)
        call = random_call(draw)
        dtype, train = call["q"].dtype, draw.random() < 0.5
        state = torch.tensor([seed, 1])
        wrt = wanted(call) if train else ()
        with pytest.MonkeyPatch.context() as patch, torch.set_grad_enabled(bool(wrt)):
            patch.setattr(rng, "new_state", lambda device, generator, s=state: s.to(device))
            try:
                actual = evaluate(npu_ops.attention, moved(call, device), wrt)
            except (TypeError, ValueError) as error:
                assert ": got " in str(error) and ", needs " in str(error), f"{seed}: {error}"
                assert str(error).partition(":")[0] in ARGUMENTS, f"{seed}: {error}"
                refused += 1
                continue
            with forced("reference", *OPS):
                wide = floats(call, torch.float64)
                expected = evaluate(npu_ops.attention, wide, wrt)
        ran += 1
        assert actual.keys() == expected.keys(), seed
        for name, value in actual.items():  # gradients that are 0 but for rounding: no ratios
            error = (value.cpu() - expected[name]).nan_to_num().abs() / (1 + expected[name].abs())
            missing = (value.cpu() == -torch.inf) != (expected[name] == -torch.inf)
            assert not value.isnan().any() and not missing.any(), f"seed {seed}: {name}"
            worst = error.nan_to_num().max() if error.numel() else 0
            assert worst < 4 * TOLERANCES[dtype].max_abs, f"seed {seed}: {name}: {worst:.3g}"
        chosen.add((call["layout"], "block_table" in call, "window" in call, train))
    calls = count // step
    assert ran > calls // 2 and refused > calls // 10 and len(chosen) > min(30, calls // 10)


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
    """p is rounded to steps of 2^-16; an expectation that is not is off by a third at 0.99999."""
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
    """A query of zeros weighs all keys the same, and one-hot values show which are kept."""
    n, p = 200, 0.4
    q, v = torch.zeros(1, n, 1, n), torch.eye(n)[None, :, None]
    generator = torch.Generator().manual_seed(5)
    out = npu_ops.attention(q, q, v, dropout_p=p, generator=generator)[0, :, 0]
    state = rng.new_state(torch.device("cpu"), torch.Generator().manual_seed(5))
    keep = reference.keep_mask(torch.arange(n), n, p, state)
    torch.testing.assert_close(out, keep / n * rng.scale(p))
    assert abs(keep.float().mean() - 0.6) < 0.01


def test_keep_mask_uses_every_draw_once():
    """128 columns share 16 Philox calls: each 16-bit half of each word decides one of them."""
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
    q, k, v, extra, rule, _ = npu_ops.ops.attention._prepare(**inputs)
    state = torch.tensor([1, 2]) if rule.dropout_p else None
    args = (*(x.detach().requires_grad_() for x in (q, k, v)), *extra._replace(rng_state=state))
    args = [x.detach().requires_grad_(x.requires_grad) if x is not None else x for x in args]
    torch.library.opcheck(torch.ops.npu_ops.attention.default, (*args, *rule))
    out, lse = torch.ops.npu_ops.attention(*args, *rule)
    args = [x.detach() if x is not None else x for x in args]
    dout, out, lse = torch.randn(out.shape), out.detach(), lse.detach()
    flags = extra.bias is not None, extra.sinks is not None
    torch.library.opcheck(
        torch.ops.npu_ops.attention_backward.default, (dout, None, out, lse, *flags, *args, *rule)
    )


@pytest.mark.parametrize("name", ["causal-64", "packed-causal", "sinks", "mask", "paged-decode"])
def test_compile(name):
    """One graph, eager's results."""
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
    """Slices of [.., 3, N, D]: strides, not copies; the output is contiguous in its layout."""
    fused = torch.randn(2, 9, 3, 4, 16)
    q, k, v = fused.unbind(2)
    order = {"BSND": (0, 1, 2, 3), "BNSD": (0, 2, 1, 3), "SBND": (1, 0, 2, 3)}[layout]
    out = npu_ops.attention(*(x.permute(order) for x in (q, k, v)), layout=layout)
    assert out.is_contiguous()
    expected = npu_ops.attention(q.contiguous(), k.contiguous(), v.contiguous())
    assert torch.equal(out, expected.permute(order))


def test_gradient_of_the_log_sum_exp():
    """Merging two halves of the keys by their lse gives the whole, and its gradients."""
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
    """There lse is the sink."""
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


MASKS = {
    "causal": {"is_causal": True},
    "causal, fewer keys": {"is_causal": True, "causal_alignment": "top_left"},
    "window": {"window": (3, 0)},
    "window, left alone": {"window": (-1, 2)},
    "mask": {"attn_mask": torch.ones(40, 40).tril().bool()},
    "capped": {"is_causal": True, "softcap": 3.0},
    "bias": {"is_causal": True, "bias": torch.zeros(40, 40)},
}


@IMPLEMENTATIONS
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_a_key_that_takes_no_part_holds_does_not_matter(mask, value, implementation, device):
    torch.manual_seed(0)
    inputs = {x: torch.randn(1, 40, 2, 16, device=device) for x in "qkv"} | moved(
        MASKS[mask], device
    )
    by = implementation if runs(implementation, inputs, ()) else None
    expected = run(inputs, (), by)["output 0"][:, :30]
    inputs["k"][:, 33:] = value
    actual = run(inputs, (), by)["output 0"][:, :30]
    torch.testing.assert_close(actual, expected)


def test_no_second_gradient():
    q, k, v = (x.requires_grad_() for x in qkv())
    (grad,) = torch.autograd.grad(npu_ops.attention(q, k, v).sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="a gradient of its gradient"):
        grad.sum().backward()


# Memory


def allocated(tokens, **more):
    case = next(case for case in CASES if case.name == "qwen3-vl-vision-200")
    inputs = {k: v[:tokens] if k in "qkv" else v for k, v in case.inputs(torch.float32).items()}
    inputs |= {"cu_seqlens_q": torch.tensor([0, tokens]), "cu_seqlens_k": None}
    del inputs["cu_seqlens_cpu"]
    gc.collect()
    with copies() as seen:
        npu_ops.attention(**inputs | more)
    return seen.allocated


@pytest.mark.parametrize("lengths", [(700, 700), (300, 900), (900, 300)], ids=str)
@pytest.mark.parametrize("top_left", [False, True])
def test_windows_over_several_blocks(lengths, top_left):
    """The CPU takes some queries at a time; their keys overlap."""
    inputs = dict(zip("qkv", qkv(1, *lengths, dim=8), strict=True))
    inputs |= {"window": (100, 30), "causal_alignment": "top_left" if top_left else "bottom_right"}
    expected = run(floats(inputs, torch.float64), ("q", "k", "v"), "reference")
    assert_all_close(run(inputs, ("q", "k", "v"), "cpu"), expected, TOLERANCES)


def test_packed_memory_is_linear_in_tokens():
    """Twice the tokens, twice the memory; all pairs would be four times."""
    assert allocated(200) < 2.2 * allocated(100)


# Wrong calls


def packed_call(**changes):
    q, k, v = (torch.randn(10, n, 8) for n in (4, 2, 2))
    starts = torch.tensor([0, 4, 10])
    return {"q": q, "k": k, "v": v, "layout": "TND", "cu_seqlens_q": starts} | changes


def paged_call(**changes):
    table = torch.tensor([[0, 1], [2, 3]], dtype=torch.int32)
    call = {"q": torch.randn(2, 1, 4, 8), "block_table": table, "seqlens_k": torch.tensor([5, 8])}
    return call | {"k": torch.randn(4, 4, 2, 8), "v": torch.randn(4, 4, 2, 8)} | changes


def dense_call(**changes):
    return dict(zip("qkv", qkv(), strict=True)) | changes


BOOL = torch.bool


@pytest.mark.parametrize(
    "make, changes, error, argument",
    [
        (dense_call, {"q": None}, TypeError, "q"),
        (dense_call, {"q": torch.zeros(2, 9, 4, 16, dtype=torch.int32)}, TypeError, "q"),
        (dense_call, {"k": torch.zeros(2, 9, 2, 16).bfloat16()}, TypeError, "k"),
        (dense_call, {"v": torch.zeros(2, 9, 2, 16).to(torch.float8_e4m3fn)}, TypeError, "v"),
        (dense_call, {"q": torch.zeros(9, 4, 16)}, ValueError, "q"),
        (dense_call, {"q": torch.zeros(3, 9, 4, 16)}, ValueError, "k"),
        (dense_call, {"q": torch.zeros(2, 9, 5, 16)}, ValueError, "k"),
        (dense_call, {"q": torch.zeros(2, 9, 4, 8)}, ValueError, "k"),
        (dense_call, {"v": torch.zeros(2, 8, 2, 16)}, ValueError, "v"),
        (dense_call, {"k": torch.zeros(2, 9, 2, 16, device="meta")}, ValueError, "k"),
        (dense_call, {"layout": "BSDN"}, ValueError, "layout"),
        (dense_call, {"layout": "SBH"}, ValueError, "q"),
        (dense_call, {"cu_seqlens_q": torch.tensor([0, 9])}, ValueError, "layout"),
        (dense_call, {"causal_alignment": "left"}, ValueError, "causal_alignment"),
        (dense_call, {"window": 4}, ValueError, "window"),
        (dense_call, {"window": (4, -2)}, ValueError, "window"),
        (dense_call, {"window": (4, None)}, ValueError, "window"),
        # A mask that could be read in two ways, or is of another kind.
        (dense_call, {"attn_mask": torch.ones(9, dtype=BOOL)}, ValueError, "attn_mask"),
        (dense_call, {"attn_mask": torch.ones(2, 9, dtype=BOOL)}, ValueError, "attn_mask"),
        (dense_call, {"attn_mask": torch.ones(2, 9, 9, dtype=BOOL)}, ValueError, "attn_mask"),
        (dense_call, {"attn_mask": torch.ones(2, 4, 9, 8, dtype=BOOL)}, ValueError, "attn_mask"),
        (dense_call, {"attn_mask": torch.zeros(9, 9)}, TypeError, "attn_mask"),
        (dense_call, {"attn_mask": torch.ones(2048, 2048, dtype=BOOL)}, ValueError, "attn_mask"),
        (dense_call, {"attn_mask": torch.ones(9, 9, dtype=BOOL), "is_causal": True},
         ValueError, "is_causal"),
        (dense_call, {"attn_mask": torch.ones(9, 9, dtype=BOOL), "window": (1, 1)},
         ValueError, "window"),
        (dense_call, {"bias": torch.zeros(4, 9, 9)}, ValueError, "bias"),
        (dense_call, {"bias": torch.zeros(9, 9).half()}, TypeError, "bias"),
        (dense_call, {"sinks": torch.zeros(2)}, ValueError, "sinks"),
        (dense_call, {"scale": float("inf")}, ValueError, "scale"),
        (dense_call, {"softcap": 0.0}, ValueError, "softcap"),
        (dense_call, {"softcap": -1.0}, ValueError, "softcap"),
        (dense_call, {"dropout_p": 1.0}, ValueError, "dropout_p"),
        (dense_call, {"dropout_p": -0.1}, ValueError, "dropout_p"),
        (dense_call, {"dropout_p": 0.1, "generator": 3}, TypeError, "generator"),
        (dense_call, {"seqlens_k": torch.tensor([9])}, ValueError, "seqlens_k"),
        (dense_call, {"seqlens_k": torch.tensor([9, 10])}, ValueError, "seqlens_k"),
        (dense_call, {"seqlens_k": torch.tensor([9, -1])}, ValueError, "seqlens_k"),
        (dense_call, {"seqlens_k_cpu": [9, 9]}, ValueError, "seqlens_k_cpu"),
        (dense_call, {"max_seqlen_q": 9}, ValueError, "max_seqlen_q"),
        (packed_call, {"cu_seqlens_q": None}, ValueError, "cu_seqlens_q"),
        (packed_call, {"cu_seqlens_q": torch.tensor([4, 10])}, ValueError, "cu_seqlens_q"),
        (packed_call, {"cu_seqlens_q": torch.tensor([0, 4, 9])}, ValueError, "cu_seqlens_q"),
        # sglang #31867: lengths where starts are wanted.
        (packed_call, {"cu_seqlens_q": torch.tensor([4, 6])}, ValueError, "cu_seqlens_q"),
        (packed_call, {"cu_seqlens_q": torch.tensor([0, 6, 4, 10])}, ValueError, "cu_seqlens_q"),
        (packed_call, {"cu_seqlens_q": torch.tensor([0.0, 10.0])}, TypeError, "cu_seqlens_q"),
        (packed_call, {"cu_seqlens_k": torch.tensor([0, 10])}, ValueError, "cu_seqlens_k"),
        (packed_call, {"cu_seqlens_k": torch.tensor([0, 4, 11])}, ValueError, "cu_seqlens_k"),
        (packed_call, {"cu_seqlens_cpu": [4, 10]}, ValueError, "cu_seqlens_cpu"),
        (packed_call, {"cu_seqlens_cpu": [0, 4, 9]}, ValueError, "cu_seqlens_cpu"),
        (packed_call, {"max_seqlen_q": 5}, ValueError, "max_seqlen_q"),
        (packed_call, {"seqlens_k": torch.tensor([4, 6])}, ValueError, "seqlens_k"),
        (packed_call, {"attn_mask": torch.ones(10, 10, dtype=BOOL)}, ValueError, "attn_mask"),
        (packed_call, {"bias": torch.zeros(10, 10)}, ValueError, "bias"),
        (paged_call, {"seqlens_k": None}, ValueError, "seqlens_k"),
        (paged_call, {"seqlens_k": torch.tensor([5, 9])}, ValueError, "seqlens_k"),
        (paged_call, {"block_table": torch.zeros(2, 2).long()}, TypeError, "block_table"),
        (paged_call, {"block_table": torch.zeros(3, 2).int()}, ValueError, "block_table"),
        (paged_call, {"q": torch.zeros(2, 1, 4, 8, requires_grad=True)}, ValueError, "block_table"),
        (paged_call, {"cu_seqlens_k": torch.tensor([0, 5])}, ValueError, "cu_seqlens_k"),
    ],
    ids=lambda value: ", ".join(value) if isinstance(value, dict) else None,
)  # fmt: skip
def test_wrong_calls(make, changes, error, argument):
    with pytest.raises(error, match=rf"^{argument}: got .*, needs "):
        npu_ops.attention(**make(**changes))
    assert npu_ops.attention(**make()) is not None


# The plan


def chosen(**fields):
    return plan_attention(AttentionSpec(**fields))


VISION = {"layout": "TND", "keys": "packed", "heads": 16, "head_dim": 72, "same_lengths": True}
HOST = {"host_lengths": True}
DECODE = {
    "layout": "TND", "keys": "paged", "block_size": 128, "heads": 32, "kv_heads": 8,
    "query_length": 1, "is_causal": True, **HOST,
}  # fmt: skip
FIA = "npu_fused_infer_attention_score"
FA = "npu_fusion_attention"
TRITON = "our flash attention"
TRAIN = {"training": True}
SQUARE = {"query_length": 9, "key_length": 9}


@pytest.mark.parametrize(
    "fields, expected",
    [
        (VISION | HOST, {"operator": FA, "layout": "TND", "sparse_mode": 0, "mask": "none",
                         "pad_head_dim": 80, "lengths": "ends", "drop_leading_zero": True}),
        (VISION | HOST | TRAIN, {"operator": FA, "mask_kind": "none"}),
        (VISION | HOST | {"leading_zero": False}, {"drop_leading_zero": False}),
        (TRAIN | {"is_causal": True}, {"operator": FA, "sparse_mode": 3, "mask": "compressed"}),
        (TRAIN | {"is_causal": True, "causal_alignment": "top_left"}, {"sparse_mode": 2}),
        (TRAIN | {"is_causal": True, "layout": "SBH"}, {"operator": FA, "layout": "SBH"}),
        (TRAIN | {"is_causal": True, "window": (128, 0)},
         {"sparse_mode": 4, "pre_tokens": 128, "next_tokens": 0}),
        (TRAIN | {"window": (7, -1)}, {"pre_tokens": 7, "next_tokens": 2**31 - 1}),
        (TRAIN | {"window": (7, 1), "causal_alignment": "top_left", **SQUARE}, {"sparse_mode": 4}),
        (TRAIN | {"window": (7, 1), "causal_alignment": "top_left"}, {"operator": TRITON}),
        (TRAIN | {"mask": True}, {"operator": FA, "sparse_mode": 1, "mask": "dense"}),
        (TRAIN | {"prefix": True, "is_causal": True}, {"sparse_mode": 1, "mask": "dense"}),
        (TRAIN | {"bias": True}, {"operator": f"{FA}_v2"}),
        (TRAIN | {"sinks": True}, {"operator": FA}),
        (TRAIN | {"graph_capture": True}, {"operator": f"{FA}_v3"}),
        (TRAIN | {"head_dim": 192, "value_dim": 128}, {"operator": FA, "pad_head_dim": 0}),
        (TRAIN | {"head_dim": 100, "value_dim": 90}, {"pad_head_dim": 112}),
        (TRAIN | {"deterministic": True}, {"operator": TRITON}),
        (TRAIN | {"dropout": True}, {"operator": TRITON}),
        (TRAIN | {"softcap": True}, {"operator": TRITON}),
        ({"is_causal": True}, {"operator": f"{FIA}_v2", "sparse_mode": 3}),
        ({"is_causal": True, "dtype": "float32"}, {"operator": FA}),
        ({"mask": True}, {"operator": FA}),
        ({"is_causal": True, "query_length": 1}, {"sparse_mode": 0, "mask": "none"}),
        ({"layout": "TND", "keys": "packed", "is_causal": True, **HOST},
         {"operator": f"{FIA}_v2", "layout": "TND", "lengths": "ends"}),
        ({"layout": "TND", "keys": "packed", "is_causal": True, "head_dim": 256, **HOST},
         {"operator": FA}),
        (DECODE, {"operator": f"{FIA}_v2", "lengths": "each", "sparse_mode": 0}),
        (DECODE | {"query_length": 4}, {"layout": "TND", "sparse_mode": 3, "mask": "compressed"}),
        (DECODE | {"graph_capture": True}, {"graph_update": "actual_seq_kvlen"}),
        (DECODE | {"graph_capture": True, "operators": (FIA,)},
         {"operator": FIA, "graph_update": "actual_seq_lengths_kv"}),
        (DECODE | {"block_size": 8}, {"operator": "reference"}),
        (DECODE | {"block_size": 16, "operators": ()}, {"operator": TRITON}),
        (DECODE | {"block_size": 16, "operators": (), "soc": "Ascend950PR_9579"},
         {"operator": "reference"}),
        (DECODE | {"contiguous_blocks": False}, {"operator": TRITON}),
        (DECODE | {"operators": ()}, {"operator": TRITON}),
        ({"device": "cpu", "is_causal": True}, {"operator": "torch flash attention"}),
        ({"device": "cpu", "window": (4, 4)}, {"operator": "torch flash attention"}),
        ({"device": "cpu", "softcap": True}, {"operator": "blocks of queries"}),
        ({"device": "cpu", "dtype": "float64"}, {"operator": "reference"}),
        ({"device": "cuda"}, {"operator": TRITON}),
        ({"device": "cuda", "head_dim": 512}, {"operator": "reference"}),
    ],
    ids=lambda value: " ".join(f"{k}={v}" for k, v in value.items())[:60],
)  # fmt: skip
def test_plan(fields, expected):
    found = chosen(**fields).as_dict()
    assert {name: found[name] for name in expected} == expected


@pytest.mark.parametrize(
    "fields, name, sentence",
    [
        (VISION | HOST | {"head_dim": 64}, FIA, "plain average (vllm-ascend #13699)"),
        (VISION | HOST, FIA, "head dimension 64, 128, 192, 192/128, not 72 (vllm-ascend #9632)"),
        ({"mask": True}, FIA, "past key 512 (vllm-ascend #15503)"),
        (VISION, FA, "pass cu_seqlens_cpu"),
        (TRAIN | {"bias": True}, FA, "multiplies a bias by the scale"),
        (TRAIN | {"dropout": True}, FA, "draws a mask of its own"),
        (TRAIN | {"deterministic": True}, FA, "adds in any order"),
        (TRAIN | {"softcap": True}, FA, "has no softcap"),
        (TRAIN | {"graph_capture": True}, FA, "a graph cannot capture it"),
        (TRAIN | {"heads": 512}, FA, "512 heads are above 256"),
        (TRAIN | {"head_dim": 640}, FA, "head dimension 640 is above 512"),
        (DECODE | {"block_size": 24}, FIA, "blocks of 24 keys"),
        (DECODE | {"head_dim": 72, "layout": "BSND"}, f"{FIA}_v2", "would have to be padded"),
        (DECODE | {"operators": (FIA,)}, f"{FIA}_v2", "this torch_npu does not have it"),
        (TRAIN, FIA, "no backward"),
    ],
)
def test_plan_says_why_not(fields, name, sentence):
    plan = chosen(**fields)
    assert sentence in dict(plan.refused)[name]
    assert f"Not {name}: " in str(plan) and sentence in str(plan)


def test_a_plan_reads_as_a_paragraph():
    assert str(chosen(**VISION, **HOST, **TRAIN)) == (
        "npu_fusion_attention runs it, layout TND; without a mask: every key takes part; keys' "
        "lengths as a list of cumulative ends, the leading zero dropped; heads padded to 80. "
        "Not npu_fused_infer_attention_score_v2: it has no backward. "
        "Not npu_fused_infer_attention_score: it has no backward."
    )


@pytest.mark.parametrize(
    "fields, field",
    [
        ({"window": (3, 0), "prefix": True}, "window"),
        ({"mask": True, "is_causal": True}, "mask"),
        ({"mask": True, "prefix": True}, "mask"),
        ({"layout": "TND"}, "keys"),
        ({"layout": "BSND", "keys": "packed"}, "layout"),
        ({"keys": "paged"}, "block_size"),
        ({"keys": "paged", "block_size": 16, "training": True}, "training"),
        ({"keys": "paged", "block_size": 16, "bias": True}, "keys"),
        ({"keys": "padded", "prefix": True}, "keys"),
        ({"dtype": "float8_e4m3fn"}, "dtype"),
        ({"soc": "Ascend310P3"}, "soc"),
        ({"heads": 6, "kv_heads": 4}, "kv_heads"),
        ({"layout": "SBD"}, "layout"),
    ],
)
def test_plan_refuses(fields, field):
    with pytest.raises(ValueError, match=rf"^{field}: got .*, needs "):
        chosen(**fields)


def random_spec(draw: random.Random) -> AttentionSpec:
    heads = draw.choice([1, 4, 32, 300])
    flags = ("same_lengths", "host_lengths", "is_causal", "prefix", "mask", "bias", "softcap",
             "sinks", "dropout", "training", "lse_gradient", "deterministic", "graph_capture",
             "leading_zero", "contiguous_blocks", "nonpositive_scale")  # fmt: skip
    return AttentionSpec(
        layout=draw.choice(["BSND", "BNSD", "SBND", "TND", "BSH", "SBH"]),
        heads=heads,
        kv_heads=draw.choice([None, 1, heads]),
        head_dim=draw.choice([1, 64, 72, 128, 192, 256, 600]),
        value_dim=draw.choice([None, None, 128]),
        dtype=draw.choice(["bfloat16", "float16", "float32", "float64"]),
        query_length=draw.choice([None, 1, 9]),
        key_length=draw.choice([None, 1, 9]),
        keys=draw.choice(["dense", "dense", "packed", "padded", "paged"]),
        block_size=draw.choice([0, 16, 128]),
        causal_alignment=draw.choice(["bottom_right", "top_left"]),
        window=draw.choice([None, None, (3, 0), (-1, -1), (2, 5)]),
        device=draw.choice(["npu", "npu", "npu", "cpu", "cuda"]),
        soc=draw.choice(["Ascend910B3", "Ascend910_9391", "Ascend950PR_9579"]),
        **{name: draw.random() < 0.2 for name in flags},
    )


def test_any_spec_has_a_plan_or_a_sentence():
    """2000 of them: one operator, told consistently, and a reason for each that comes before."""
    planned = 0
    for seed in range(2000):
        spec = random_spec(random.Random(seed))
        try:
            plan = plan_attention(spec)
        except ValueError as error:
            assert ": got " in str(error) and ", needs " in str(error)
            continue
        planned += 1
        json.dumps(plan.as_dict())
        before = [o.name for o in OPERATORS if spec.device in o.devices]
        assert [name for name, _ in plan.refused] == before[: before.index(plan.operator)]
        assert all(why and not why.endswith(".") for _, why in plan.refused)
        assert str(plan).count("Not ") == len(plan.refused)
        if plan.runs == "aclnn":  # without a tensor a sparse mode is ignored: never one alone
            assert (plan.sparse_mode == 0) == (plan.mask == "none") == (plan.mask_kind == "none")
    assert planned > 600


def test_planning_reads_no_tensor_and_imports_no_framework():
    done = subprocess.run(
        [sys.executable, "-c", f"""
import sys, types
sys.path.insert(0, {str(where.ROOT)!r})
for name in ("npu_ops", "npu_ops.ops", "npu_ops.ops.attention"):
    package = sys.modules[name] = types.ModuleType(name)
    package.__path__ = [{str(where.ROOT)!r} + "/" + name.replace(".", "/")]
from npu_ops.ops.attention.plan import AttentionSpec, plan_attention
print(plan_attention(AttentionSpec(is_causal=True)).operator, "torch" in sys.modules)
"""],
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.stdout.split() == [f"{FIA}_v2", "False"], done.stderr


def test_a_call_is_planned_for_the_chip_it_is_on():
    """A cache's blocks of 16 keys are too small for the compiler of one of them."""
    q, cache = torch.zeros(1, 1, 2, 64), torch.zeros(4, 16, 2, 64)
    call = {"seqlens_k": torch.tensor([20]), "block_table": torch.tensor([[0, 1]]).int()}
    for soc, why_not in (
        ("Ascend910B3", None),
        ("Ascend950PR_9579", "blocks of 16 keys are not a multiple of 32"),
    ):
        with hardware.as_if_soc(soc):
            q_, k_, v_, extra, rule, _ = npu_ops.ops.attention._prepare(q, cache, cache, **call)
            plan = routing.plan_of(q_, k_, v_, extra, rule, "npu")
            assert dict(plan.refused).get(TRITON) == why_not
            assert limits.triton_why_not(q_, k_, v_, extra, rule) == why_not


def test_the_table_and_the_op_name_the_same_implementations():
    assert {operator.runs for operator in OPERATORS} == set(ORDER)
    assert [table.op for table in (op.forward_table, op.backward_table)] == list(OPS)


@DEVICES
def test_explain_says_what_the_plan_says(device):
    """A call on this device, explained: the vendor's operators and what they lack."""
    q, k, v = (x.to(device) for x in qkv())
    rows = npu_ops.explain("attention", q, k, v, softcap=3.0)
    first = rows[0]
    assert first.implementation == "aclnn"
    said = "has no softcap" if device == "npu" else f"tensors are on {device}, it runs on npu"
    assert said in first.why_not


# Each operator of the vendor on the emulated NPU


def only(monkeypatch, name):
    """As with a torch_npu that has one attention operator."""
    monkeypatch.setattr(routing, "_operators", lambda: (name,))


SERVES = {
    FA: ["causal-64", "layout-SBND", "layout-BNSD", "mask", "packed-causal", "sinks",
         "dim-40", "mla-192-128", "qwen3-vl-vision-200", "window-3-5-square"],
    f"{FA}_v2": ["causal-64", "layout-SBND", "bias-row", "bias-full-mask", "dim-40"],
    f"{FA}_v3": ["causal-64", "layout-BNSD", "mask", "dim-40"],
    FIA: ["causal-64", "layout-SBND", "layout-BNSD", "padded", "paged-decode", "paged-packed",
          "qwen3-8b-verify-4", "window-16-0-square", "packed-causal"],
    f"{FIA}_v2": ["causal-64", "layout-SBND", "layout-BNSD", "padded", "paged-decode",
                  "paged-packed", "qwen3-8b-decode", "packed-causal", "sinks"],
}  # fmt: skip


if "npu" in devices():

    @pytest.mark.parametrize(
        "name, case_name", [(n, c) for n, cases in SERVES.items() for c in cases]
    )
    @pytest.mark.parametrize("device", ["npu"])
    def test_each_vendor_operator(name, case_name, device, monkeypatch):
        """Told what the plan says, with gradients where it has them; its rules are enforced."""
        only(monkeypatch, name)
        case = next(case for case in CASES if case.name == case_name)
        inputs = case.inputs(torch.bfloat16, device)
        wrt = () if "infer" in name or case.lse else wanted(inputs)
        with torch.set_grad_enabled(bool(wrt)):
            q, k, v, extra, rule, _ = npu_ops.ops.attention._prepare(
                **{k: v for k, v in inputs.items() if k != "return_lse"}
            )
            rule = rule._replace(training=bool(wrt))
            assert routing.plan_of(q, k, v, extra, rule).operator == name
            actual = run(inputs, wrt, "aclnn")
        compare(actual, run(floats(case.inputs(torch.bfloat16), torch.float64), wrt, "reference"),
                torch.bfloat16)  # fmt: skip

    @pytest.mark.parametrize("device", ["npu"])
    def test_the_compressed_mask_is_made_once(device):
        from npu_ops.ops.attention import aclnn

        made = aclnn._compressed(torch.device("npu", 0))
        for _ in range(2):
            npu_ops.attention(*(x.to(device) for x in qkv()), is_causal=True)
        assert aclnn._compressed(torch.device("npu", 0)) is made
        assert len(aclnn._kept) == 1 and made.shape == (2048, 2048)


def test_fp64_falls_back():
    doubles = (x.double() for x in qkv())
    with env.override(strict=True), pytest.raises(RuntimeError, match="no float64 kernel"):
        npu_ops.attention(*doubles)


def test_settings_of_the_command():
    from npu_ops_tools.explain import explain

    settings = "layout=TND keys=packed heads=16 head_dim=72 host_lengths=true window=(3,0)"
    plan = explain("attention", [*settings.split(), f"operators={FA}"])
    assert (plan.operator, plan.pad_head_dim, plan.sparse_mode) == (FA, 80, 4)
    for wrong in (["heads"], ["nope=1"], ["heads=many"], ["mask=7"], ["window=3"], ["layout=XY"]):
        with pytest.raises(ValueError, match=": got .*, needs "):
            explain("attention", wrong)
    with pytest.raises(ValueError, match="op: got 'rope'"):
        explain("rope", [])
