"""Attention against the reference, torch and models, and random calls of any kind."""

import inspect
import itertools
import random
import subprocess
import sys
import types

import pytest
import torch
import torch.nn.functional as F
from attention_calls import (
    CLOSE,
    DEVICES,
    IMPLEMENTATIONS,
    OPS,
    compare,
    heads_first,
    moved,
    qkv,
    run,
    runs,
    seen,
    wanted,
)
from npu_ops_tools import where
from support import (
    evaluate,
    exact,
    floats,
    forced,
    parametrize_cases,
    parametrize_dtypes,
)

import npu_ops
from npu_ops.core import rng
from npu_ops.core.compare import assert_close
from npu_ops.ops.attention.cases import CASES, TOLERANCES

# Results, compared with the reference


@parametrize_cases(CASES, large=False)
@parametrize_dtypes()
@IMPLEMENTATIONS
def test_against_reference(case, dtype, implementation, device):
    """If the implementation declines a case, the one that dispatch chooses runs instead."""
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


@pytest.mark.slow
@parametrize_cases(CASES, large=True)
def test_large_against_torch(case):
    """Compare with torch, one sequence at a time: the reference needs memory for all pairs."""
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
    """Yield each kind of mask: its name, its arguments, and whether query i of lq
    sees key j of lk."""
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


@EACH_RULE
@pytest.mark.parametrize("lengths", [(5, 5), (3, 7), (7, 3), (1, 6)], ids=str)
@DEVICES
def test_one_hot_values_reveal_the_softmax(call, sees, lengths, device):
    """With one-hot values out[i, j] is the weight of key j for query i, so a wrong mask shows.

    Every weight of a masked key is 0, and the others are torch's softmax of the same scores.
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
    """Some sequences have no queries or no keys."""
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
    """Decode and verification as SGLang and vLLM call them, against torch on the dense keys."""
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
    for b, length in enumerate(lengths):  # ids after a sequence's last block must not be read
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


# Comparison with other implementations


@pytest.mark.parametrize("causal", [False, True])
@DEVICES
def test_torch_and_its_gradients(causal, device):
    """torch's own causal mask is aligned to the top left."""
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
    """Compare attention sinks with a sliding window, and their gradients."""
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
    """The soft cap applies before the mask."""
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
    # If all keys of a query are masked, Megatron returns the mean of v and npu-ops returns 0.
    rows = torch.ones(2, 7) if mask is None else (~mask).any(-1).squeeze(1).expand(2, 7)
    grad, keep = grad * rows.T[..., None], rows.T[..., None].bool()
    torch.testing.assert_close(out * keep, expected * keep, atol=3e-6, rtol=1e-5)
    for a, b in zip(torch.autograd.grad(out, (q, k, v), grad),
                    torch.autograd.grad(expected, (q, k, v), grad)):
        torch.testing.assert_close(a, b, atol=5e-6, rtol=1e-5)
    print(kind.name)
"""


def test_megatron_dot_product_attention():
    """Runs in a process of its own, because Megatron needs an initialised process group."""
    folder = where.ROOT / ".cache" / "megatron" / "0.16.1"
    code = f"import sys\nsys.path[:0] = [{str(where.ROOT)!r}, {str(folder)!r}]\n{MEGATRON}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.split() == ["causal", "no_mask", "arbitrary"], done.stderr


# Random calls: each is computed correctly, or rejected with a message.


ARGUMENTS = inspect.signature(npu_ops.attention).parameters


def random_call(draw: random.Random) -> dict:
    """Draw the arguments of a call, which may be invalid."""
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


# On an NPU nearly every draw compiles a kernel, so NPU tests run only one draw in 50.
@DEVICES
@pytest.mark.parametrize("count", [2000, pytest.param(20000, marks=pytest.mark.slow)])
def test_any_call_is_right_or_refused(device, count):
    """Half of the calls run backward too."""
    ran, refused, chosen = 0, 0, set()
    step = 1 if device == "cpu" else 50
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
        # gradients may be 0 up to rounding, so errors are relative to 1 + |expected|
        for name, value in actual.items():
            error = (value.cpu() - expected[name]).nan_to_num().abs() / (1 + expected[name].abs())
            missing = (value.cpu() == -torch.inf) != (expected[name] == -torch.inf)
            assert not value.isnan().any() and not missing.any(), f"seed {seed}: {name}"
            worst = error.nan_to_num().max() if error.numel() else 0
            assert worst < 4 * TOLERANCES[dtype].max_abs, f"seed {seed}: {name}: {worst:.3g}"
        chosen.add((call["layout"], "block_table" in call, "window" in call, train))
    calls = count // step
    assert ran > calls // 2 and refused > calls // 10 and len(chosen) > min(30, calls // 10)


@pytest.mark.parametrize("layout", ["BSH", "SBH"])
def test_heads_in_one_dimension(layout):
    """Outputs and gradients equal those of the layout with a dimension for heads."""
    draw = torch.Generator().manual_seed(0)
    given = {
        n: torch.randn(2, 5, heads, 8, generator=draw)
        for n, heads in zip("qkv", (4, 2, 2), strict=True)
    }

    def folded(x):
        return (x.transpose(0, 1) if layout == "SBH" else x).flatten(2)

    def by_layout(q, k, v):
        heads = {"num_heads": 4, "num_key_value_heads": 2}
        q, k, v = map(folded, (q, k, v))
        return npu_ops.attention(q, k, v, is_causal=True, layout=layout, **heads)

    def by_heads(q, k, v):
        return folded(npu_ops.attention(q, k, v, is_causal=True))

    expected = evaluate(by_heads, given, tuple("qkv"))
    for name, value in evaluate(by_layout, given, tuple("qkv")).items():
        torch.testing.assert_close(value, expected[name])
