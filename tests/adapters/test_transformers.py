"""Test that transformers' models give the same logits and gradients with npu-ops' operators."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import types

import fetch_frameworks
import npu_ops_adapters
import npu_ops_import_hook
import pytest
import torch
import transformers_models
from npu_ops_adapters.transformers import attention as adapter
from npu_ops_adapters.transformers import models
from processes import HERE, environment
from support import often
from transformers import StaticCache, modeling_utils
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, create_causal_mask
from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next
from transformers.models.qwen3_vl import modeling_qwen3_vl as qwen3_vl
from writes import WRITES

import npu_ops
from npu_ops.core import env
from npu_ops.core.compare import Tolerance, assert_close

ROUNDED = Tolerance(ratio=2e-2, max_abs=5e-2)


def rows(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def states(status):
    """Return the states of the patches of transformers and of MODELS.

    Other tests import models whose functions are not all replaced.
    """
    homes = [models.home(name) for name in transformers_models.MODELS]
    homes += ["transformers.integrations", "transformers.modeling_utils", "transformers.masking"]
    return {row.target: row.sentence for row in status if row.target.startswith(tuple(homes))}


# Models

QWEN3_5 = ("qwen3_5", "qwen3_5_moe")
DELTA_NET = ("qwen3_next", *QWEN3_5)
VISION = (*models.QWEN2_VL, *models.QWEN3_VL, *QWEN3_5)


def norms(name: str) -> int:
    """Return the number of RMSNorm calls: around each layer's parts, after the last layer, of q
    and k."""
    if name in DELTA_NET:
        return 5 + 2
    if not name.startswith("qwen2"):
        return 5 + 4
    return 5 + (5 if name == "qwen2_5_vl" else 0)  # Qwen2.5-VL's vision tower has RMSNorms, too


def swiglus(name: str) -> int:
    """Return the number of SwiGLU calls: in layers, shared experts and Qwen2.5-VL's tower."""
    shared = name in ("qwen3_next", "qwen3_5_moe")
    return 2 + 2 * (shared or name == "qwen2_5_vl")


def expected_calls(name: str, attention: bool) -> dict:
    """Return the calls in one step: two text layers and, if there is one, two of
    the vision tower."""
    linear, vision = name in DELTA_NET, 2 * (name in VISION)
    calls = {"rope": vision + (1 if linear else 2), "rms_norm": norms(name)}
    calls["swiglu"] = swiglus(name)
    if linear:
        names = ("causal_conv1d", "chunk_gated_delta_rule", "rms_norm_gated")
        calls |= dict.fromkeys(names, 1)  # the rule normalises q and k in its kernels
    if attention:
        calls["attention"] = vision + (1 if linear else 2)
    return calls


@pytest.mark.parametrize("attention", [None, "npu_ops"])
@pytest.mark.parametrize("name", transformers_models.MODELS)
def test_same_logits_and_gradients(name, attention):
    calls = transformers_models.compare(name, attention)
    assert calls == expected_calls(name, bool(attention))


OLDER = {
    "4.57.6": [name for name in transformers_models.MODELS if not name.startswith("qwen3_5")],
    "5.10.4": ["qwen3", "qwen2_vl", "qwen3_vl", "qwen3_next", "qwen3_5"],
}


def expected_calls_of(version: str, name: str, attention: bool) -> dict:
    """Return the calls in an older version of transformers.

    Up to 5.10 each layer of Qwen2-VL gets tables of three axes. 4.57 calls attention per image and
    SwiGLU per expert, except Qwen3-VL's experts, which have formulas of their own.
    """
    expected = expected_calls(name, attention)
    experts = {"qwen3_moe": 8, "qwen3_next": 10, "qwen3_vl_moe": 0}
    if version == "4.57.6" and name in experts:
        expected["swiglu"] = experts[name]
    expected = {op: calls for op, calls in expected.items() if calls}
    if name in models.QWEN2_VL:
        expected |= {"mrope": 2, "rope": 2}
    if attention and name in VISION and version == "4.57.6":
        images, windows = 4, 6  # one of Qwen2.5-VL's layers attends within windows
        expected["attention"] = 2 + images + (windows if name == "qwen2_5_vl" else images)
    return expected


OLDER_RELEASES = pytest.mark.parametrize("version", often(OLDER, ("4.57.6",)))


@OLDER_RELEASES
def test_older_versions(version):
    """Run the models of each older version of transformers, in another process."""
    done = subprocess.run(
        [sys.executable, HERE / "transformers_models.py", *OLDER[version]],
        env=environment(HERE, fetch_frameworks.tree(f"transformers-{version}")),
        capture_output=True, text=True,
    )  # fmt: skip
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    expected = {
        f"{name} {attention}": expected_calls_of(version, name, bool(attention))
        for name in OLDER[version]
        for attention in (None, "npu_ops")
    }
    assert dict(lines) == expected, done.stderr[-3000:]


@OLDER_RELEASES
def test_nothing_of_an_older_version_is_refused(version):
    """`npu-ops doctor` imports all models of that version."""
    done = subprocess.run(
        [sys.executable, "-m", "npu_ops_tools", "doctor", "--json"],
        env=environment(HERE, fetch_frameworks.tree(f"transformers-{version}")),
        capture_output=True, text=True,
    )  # fmt: skip
    rows = json.loads(done.stdout)["patches"]
    theirs = [row for row in rows if row["target"].startswith("transformers.")]
    assert {row["state"] for row in theirs} <= {"applied", "not in this version"}, theirs
    assert {row["op"] for row in theirs if row["state"] == "applied"} >= {"rope", "rms_norm"}
    if version == "5.10.4":
        assert any("conv1d_update" in row["target"] for row in theirs)


def test_packed_sequences_need_no_fla(applied):
    """Without fla, transformers refuses packed sequences. With npu-ops no layer mixes them."""
    model, call = transformers_models.compare_packed("qwen3_next")
    npu_ops_adapters.revert()
    model.set_attn_implementation("sdpa")
    with pytest.raises(ValueError, match="can't keep packed sequences apart"):
        call()


# Attention


def attend(implementation, mask=None, module=None, shape=(2, 4, 7, 16), keys=7, **options):
    """Return output and gradients of one of transformers' attention functions."""
    batch, heads, length, dim = shape
    q = rows(*shape).requires_grad_()
    k, v = (rows(batch, 2, keys, dim, seed=n).requires_grad_() for n in (1, 2))
    module = module or types.SimpleNamespace(is_causal=True, num_key_value_groups=2)
    out, weights = implementation(module, q, k, v, mask, **options)
    assert weights is None
    grads = torch.autograd.grad(out, (q, k, v), rows(*out.shape, seed=3))
    return out, *grads


def ours(*args, **options):
    return modeling_utils.ALL_ATTENTION_FUNCTIONS["npu_ops"](*args, **options)


def random_mask(*shape):
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(5)) < 0.6
    mask[..., 0] = True
    return mask


MASKS = {
    "none": None,
    "boolean": random_mask(2, 1, 7, 7),
    "by head": random_mask(2, 4, 7, 7),
    "one row": random_mask(2, 1, 1, 7),
    "added": rows(2, 1, 7, 7, seed=6),
    "added, with -inf": torch.zeros(2, 1, 7, 7).masked_fill(~random_mask(2, 1, 7, 7), -torch.inf),
}


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("causal", [None, True, False])
def test_attention_is_sdpas(applied, mask, causal):
    for options in ({}, {"scaling": 0.3}):
        actual = attend(ours, mask, is_causal=causal, **options)
        expected = attend(sdpa_attention_forward, mask, is_causal=causal, **options)
        for a, e in zip(actual, expected, strict=True):
            assert_close("attention", a, e, Tolerance(1e-5, 1e-5))


@pytest.mark.parametrize("length, keys", [(1, 7), (1, 1), (7, 12)])
def test_attention_with_a_cache_is_sdpas(applied, length, keys):
    """There are more keys than queries and no mask: a single query sees all keys."""
    arguments = {"shape": (2, 4, length, 16), "keys": keys}
    actual, expected = attend(ours, **arguments), attend(sdpa_attention_forward, **arguments)
    ratio = 1e-5 if keys > 1 else torch.inf  # with one key SDPA's gradient is only rounding errors
    for a, e in zip(actual, expected, strict=True):
        assert_close("attention", a, e, Tolerance(ratio, 1e-5))


def test_a_mask_longer_than_the_keys_is_of_keys_that_are_not_there(applied):
    mask = random_mask(2, 1, 7, 9)
    actual, expected = attend(ours, mask), attend(sdpa_attention_forward, mask[..., :7])
    assert_close("attention", actual[0], expected[0], Tolerance(1e-5, 1e-5))


@pytest.mark.parametrize(
    "mask", [torch.ones(7, 7, dtype=torch.bool), torch.ones(2, 1, 7, 5, dtype=torch.bool)]
)
def test_a_mask_that_is_not_understood_raises(applied, mask):
    with pytest.raises(ValueError, match="attention_mask: got shape"):
        attend(ours, mask)


def test_images_of_a_vision_tower_are_one_call(applied):
    module = types.SimpleNamespace(is_causal=False, num_key_value_groups=2)
    starts = torch.tensor([0, 3, 3, 7], dtype=torch.int32)
    packed = {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts, "is_causal": False}
    shape = (1, 4, 7, 16)
    out = attend(ours, module=module, shape=shape, **packed, max_length_q=4, max_length_k=4)[0]
    mask = torch.block_diag(torch.ones(3, 3), torch.ones(4, 4)).bool()[None, None]
    expected = attend(sdpa_attention_forward, mask, module, shape, is_causal=False)[0]
    assert_close("attention", out, expected, Tolerance(1e-5, 1e-5))


@pytest.mark.parametrize(
    "wrong, sentence",
    [
        ({"cu_seq_lens_q": torch.tensor([0, 9, 7])}, "cu_seq_lens_q: got"),
        ({"cu_seq_lens_q": torch.tensor([0.0, 7.0])}, "cu_seq_lens_q: got float32"),
        ({"cu_seq_lens_k": torch.tensor([0, 9, 7])}, "cu_seq_lens_k: got"),
        ({"dropout": 2.0}, "dropout: got 2.0"),
        ({"s_aux": torch.zeros(3)}, "s_aux: got shape"),
    ],
)
def test_errors_name_what_the_layer_gave(applied, wrong, sentence):
    given = {"cu_seq_lens_q": torch.tensor([0, 3, 7])} | wrong
    with pytest.raises((TypeError, ValueError), match=f"^{sentence}") as error:
        attend(ours, shape=(1, 4, 7, 16), **given)
    assert not {"cu_seqlens_q", "cu_seqlens_k", "dropout_p", "sinks"} & set(
        re.findall(r"\w+", str(error.value))
    )


def test_a_mask_and_lengths_together_let_through_what_both_do(applied):
    starts = torch.tensor([0, 3, 7])
    mask = random_mask(1, 1, 7, 7) | torch.eye(7, dtype=torch.bool)
    apart = torch.block_diag(torch.ones(3, 3), torch.ones(4, 4)).bool()
    shape = (1, 4, 7, 16)
    actual = attend(ours, mask, shape=shape, cu_seq_lens_q=starts)
    expected = attend(sdpa_attention_forward, mask & apart, shape=shape)
    assert_close("attention", actual[0], expected[0], Tolerance(1e-5, 1e-5))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_added_mask_and_lengths_together(applied, dtype):
    """With cu_seq_lens, a float mask may keep sequences apart, or leave that to cu_seq_lens.

    Both give the result of SDPA with a mask that keeps them apart.
    """
    starts, shape = torch.tensor([0, 3, 7]), (1, 4, 7, 16)
    apart = torch.block_diag(torch.ones(3, 3), torch.ones(4, 4)).bool()
    added = rows(1, 4, 7, 7, seed=8).to(dtype)
    lowest = torch.finfo(dtype).min
    told = added.masked_fill(~apart, lowest)
    expected = attend(sdpa_attention_forward, told.float(), shape=shape)
    for mask in (told, added):
        actual = attend(ours, mask, shape=shape, cu_seq_lens_q=starts)
        for a, e in zip(actual, expected, strict=True):
            assert_close("attention", a, e, Tolerance(1e-5, 1e-5))


def packed_mask(*lengths):
    """Return the mask that transformers makes from positions that restart."""
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    config = types.SimpleNamespace(_attn_implementation="npu_ops")
    embeddings = torch.zeros(1, sum(lengths), 1)
    return create_causal_mask(config, embeddings, None, None, positions)


def test_packed_text_is_known_by_its_mask(applied, monkeypatch):
    calls = []
    attention = npu_ops.attention
    monkeypatch.setattr(npu_ops, "attention", lambda *a, **k: calls.append(k) or attention(*a, **k))
    mask, shape = packed_mask(2, 1, 4), (1, 4, 7, 16)
    starts, apart = torch.tensor([0, 2, 3, 7]), torch.tensor([0, 3, 7])
    expected = attend(sdpa_attention_forward, mask, shape=shape)
    for given in ({}, {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts}):
        actual = attend(ours, mask, shape=shape, **given)
        for a, e in zip(actual, expected, strict=True):
            assert_close("attention", a, e, Tolerance(1e-5, 1e-5))
    # The lengths and the mask disagree: a token sees a key only if both allow it.
    attend(ours, mask, shape=shape, cu_seq_lens_q=apart)
    attend(ours, mask.clone(), shape=shape)
    mask[0, 0, 6, 0] = True  # the mask allows more now
    attend(ours, mask, shape=shape)
    assert [call.get("layout") for call in calls] == ["TND", "TND", None, None, None]
    assert calls[0]["cu_seqlens_q"].tolist() == [0, 2, 3, 7]


def test_packed_text_in_inference_mode(applied):
    with torch.inference_mode():
        mask, starts = packed_mask(2, 1, 4), torch.tensor([0, 2, 3, 7])
        q, k, v = rows(1, 4, 7, 16), rows(1, 2, 7, 16, seed=1), rows(1, 2, 7, 16, seed=2)
        module = types.SimpleNamespace(is_causal=True, num_key_value_groups=2)
        expected, _ = sdpa_attention_forward(module, q, k, v, mask)
        for given in ({}, {"cu_seq_lens_q": starts}):
            actual, _ = ours(module, q, k, v, mask, **given)
            assert_close("attention", actual, expected, Tolerance(1e-5, 1e-5))


@pytest.mark.parametrize(
    "mask",
    [
        torch.ones(1, 1, 5, 5, dtype=torch.bool),  # not causal
        torch.ones(1, 1, 5, 5, dtype=torch.bool).tril().triu(-2),  # a sliding window
        torch.ones(1, 1, 5, 7, dtype=torch.bool).tril(2),
        torch.ones(2, 1, 5, 5, dtype=torch.bool).tril(),
    ],
)
def test_a_mask_that_says_more_is_not_packing(mask):
    adapter._note_packing(mask)
    assert adapter._packing(mask) is None


def test_what_is_not_ours_goes_to_sdpa(applied):
    bias = rows(2, 4, 7, 7, seed=8)
    actual = attend(ours, position_bias=bias)
    expected = attend(sdpa_attention_forward, position_bias=bias)
    assert all(map(torch.equal, actual, expected))


def test_sinks_and_soft_cap(applied):
    q, k, v = (rows(2, n, 7, 16, seed=n) for n in (4, 2, 3))
    v, sinks = k + 1, rows(4)
    out, _ = ours(None, q, k, v, None, is_causal=True, softcap=5.0, s_aux=sinks)
    expected = npu_ops.attention(
        q, k, v, layout="BNSD", is_causal=True, softcap=5.0, sinks=sinks
    ).transpose(1, 2)
    assert_close("attention", out, expected, Tolerance(1e-6, 1e-6))


def test_a_static_cache(applied):
    model, inputs = transformers_models.built("qwen3")
    ids = inputs["input_ids"][:, :12]
    found = []
    for name in ("sdpa", "npu_ops"):
        model.set_attn_implementation(name)
        cache = StaticCache(config=model.config, max_cache_len=16)
        with torch.no_grad():
            first = model(ids[:, :10], past_key_values=cache).logits
            positions = torch.tensor([[10], [10]])
            then = model(ids[:, 10:11], past_key_values=cache, position_ids=positions).logits
        found.append((first, then))
    for actual, expected in zip(*found, strict=True):
        assert_close("logits", actual, expected, Tolerance(2e-5, 2e-5))


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES.keys())
@pytest.mark.parametrize("lengths", [(3, 3, 1), (7,)])
def test_a_mask_is_read_again_by_each_layer(applied, write, lengths):
    """Other code may write to the mask. If it still describes a packing, packed attention runs."""
    mask, shape = packed_mask(2, 1, 4), (1, 4, 7, 16)
    attend(ours, mask, shape=shape)
    full = torch.block_diag(*(torch.ones(n, n).tril() for n in lengths)).bool()[None, None]
    write(mask, full)
    actual = attend(ours, mask, shape=shape)
    expected = attend(sdpa_attention_forward, full, shape=shape)
    for a, e in zip(actual, expected, strict=True):
        assert_close("attention", a, e, Tolerance(1e-5, 1e-5))


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES.keys())
def test_lengths_are_read_again_by_each_layer(applied, write):
    """The lengths describe another packing than the mask, so both must allow a key."""
    mask, shape, starts = packed_mask(2, 1, 4), (1, 4, 7, 16), torch.tensor([0, 2, 3, 7])
    attend(ours, mask, shape=shape, cu_seq_lens_q=starts)
    write(starts, torch.tensor([0, 1, 5, 7]))
    actual = attend(ours, mask, shape=shape, cu_seq_lens_q=starts)
    both = mask & torch.block_diag(*(torch.ones(n, n) for n in (1, 4, 2))).bool()
    expected = attend(sdpa_attention_forward, both, shape=shape)
    assert_close("attention", actual[0], expected[0], Tolerance(1e-5, 1e-5))


def test_nothing_is_read_while_a_graph_is_captured(applied, monkeypatch):
    """A graph would keep the value that was read. A patch makes the CPU report a capture."""
    calls = []
    attention = npu_ops.attention
    mask, shape = packed_mask(2, 1, 4), (1, 4, 7, 16)
    monkeypatch.setattr(npu_ops, "attention", lambda *a, **k: calls.append(k) or attention(*a, **k))
    monkeypatch.setattr(torch.cpu, "is_current_stream_capturing", lambda: True, raising=False)
    actual = attend(ours, mask, shape=shape)
    assert [call.get("layout") for call in calls] == [None]
    assert_close("attention", actual[0], attend(sdpa_attention_forward, mask, shape=shape)[0],
                 Tolerance(1e-5, 1e-5))  # fmt: skip
    noted = packed_mask(2, 1, 4)
    assert not hasattr(noted, "npu_ops_packing")


# Calls that are left to transformers


def test_what_is_not_ours_falls_through(applied):
    """For unsupported shapes and dtypes transformers' function returns the result, or raises."""
    q, k = rows(1, 2, 5, 16), rows(1, 2, 5, 16)
    narrow = rows(1, 5, 8)
    with pytest.raises(RuntimeError, match="must match"):
        # transformers' function rotates whole heads only
        qwen3_vl.apply_rotary_pos_emb(q, k, narrow, narrow)
    cos = rows(1, 5, 16).requires_grad_()
    out, _ = qwen3_vl.apply_rotary_pos_emb(q, k, cos, cos)
    assert out.requires_grad
    x, weight = rows(1, 6, 9), rows(6, 9)  # a filter of 9 taps
    original = qwen3_next.causal_conv1d_fn.__wrapped__
    assert qwen3_next.causal_conv1d_fn(x, weight).equal(original(x, weight))
    gated = qwen3_next.Qwen3NextRMSNormGated(6)
    gated.activation = "gelu"
    expected = type(gated).forward.__wrapped__(gated, x.mT, x.mT)
    assert gated(x.mT, x.mT).equal(expected)
    state = torch.zeros(1, 6, 4, requires_grad=True)
    weight = rows(6, 4)
    with pytest.raises(RuntimeError):  # transformers writes to a leaf that requires a gradient
        qwen3_next.causal_conv1d_update(x[..., :1], state, weight)


def test_under_autocast_the_tables_are_wider(applied):
    """With bf16 q and k and fp32 tables transformers' function returns fp32, and so does ours."""
    q, k = (rows(1, 2, 5, 16, dtype=torch.bfloat16, seed=n) for n in (0, 1))
    cos, sin = rows(1, 5, 16, seed=2), rows(1, 5, 16, seed=3)
    original = qwen3_vl.apply_rotary_pos_emb.__wrapped__
    for a, e in zip(
        qwen3_vl.apply_rotary_pos_emb(q, k, cos, sin), original(q, k, cos, sin), strict=True
    ):
        assert a.dtype == e.dtype == torch.float32
        assert_close("rope", a, e, Tolerance(1e-6, 1e-6))


@pytest.mark.parametrize("name", ["qwen3_vl", "qwen3_next"])
def test_in_bf16(name):
    """npu-ops rounds at other places and less often: its error is below 1.2x transformers'."""
    model, inputs = transformers_models.built(name)
    model.bfloat16()
    with torch.no_grad():
        expected = model(**inputs).logits
        npu_ops_adapters.apply()
        try:
            actual = model(**inputs).logits
        finally:
            npu_ops_adapters.revert()
        wide = model.float()(**inputs).logits
    error = [torch.linalg.vector_norm(x - wide) for x in (actual, expected)]
    assert error[0] < 1.2 * error[1] and actual.dtype == torch.bfloat16


# Patches: applied, reported and reverted


def test_every_patch_is_applied_verified_and_undone(applied):
    for model in (*models.TEXT, *VISION, "qwen3_next"):
        __import__(models.home(model))
    npu_ops_adapters.apply()
    planned, verified = states(npu_ops_adapters.plan()), states(npu_ops_adapters.verify())
    assert set(planned.values()) == set(verified.values()) == {"applied"}
    assert planned.keys() == verified.keys() and len(planned) == 68
    assert qwen3_vl.apply_rotary_pos_emb.__name__ == "npu_ops_function"
    assert set(states(npu_ops_adapters.revert()).values()) == {"reverted"}
    assert qwen3_vl.apply_rotary_pos_emb.__module__ == qwen3_vl.__name__
    assert "npu_ops" not in modeling_utils.ALL_ATTENTION_FUNCTIONS
    assert "npu_ops" not in ALL_MASK_ATTENTION_FUNCTIONS


@pytest.mark.parametrize("order", ["npu_ops first", "transformers first"])
def test_either_may_be_imported_first(order):
    imports = ["import torch", "from transformers.models.qwen3_vl import modeling_qwen3_vl as m"]
    if order != "npu_ops first":
        imports = ["import sys", *imports[1:], "import npu_ops_adapters; npu_ops_adapters.apply()"]
    program = "\n".join([
        *imports,
        "from transformers import AttentionInterface",
        "assert m.apply_rotary_pos_emb.__name__ == 'npu_ops_function'",
        "assert 'npu_ops' in AttentionInterface()",
        "import transformers; assert transformers.__file__.find('npu_ops_adapters') < 0",
    ])  # fmt: skip
    autoload = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "1" if order == "npu_ops first" else "0"}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment(**autoload), capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_a_model_that_was_built_before_uses_it(applied):
    npu_ops_adapters.revert()
    model, inputs = transformers_models.built("qwen3_next")
    npu_ops_adapters.apply()
    _, calls = transformers_models.step(model, inputs)
    assert calls == expected_calls("qwen3_next", False)


def test_a_model_compiles_in_one_graph_with_our_operators(applied):
    graphs = []

    def backend(module, inputs):
        graphs.append(str(module.graph))
        return module

    model, inputs = transformers_models.built("qwen3_next")
    model.set_attn_implementation("npu_ops")
    with torch.no_grad():
        expected = model(**inputs, use_cache=False).logits
        torch._dynamo.reset()
        compiled = torch.compile(model, fullgraph=True, backend=backend)
        actual = compiled(**inputs, use_cache=False).logits
    assert_close("logits", actual, expected, Tolerance(1e-5, 1e-5))
    (graph,) = graphs
    for op in expected_calls("qwen3_next", True):
        assert f"npu_ops.{op}" in graph or f"npu_ops_{op}" in graph, op


@pytest.mark.parametrize("op", ["rope", "rms_norm_gated"])
def test_a_disabled_op_stays_transformers(op):
    npu_ops_adapters.revert()
    with env.override(disable=frozenset({op})):
        npu_ops_adapters.apply()
    model, inputs = transformers_models.built("qwen3_next")
    try:
        _, calls = transformers_models.step(model, inputs)
    finally:
        npu_ops_adapters.revert()
    assert op not in calls and len(calls) == len(expected_calls("qwen3_next", False)) - 1


def test_an_unknown_signature_is_refused_and_the_others_applied(monkeypatch):
    npu_ops_adapters.revert()
    monkeypatch.setattr(qwen3_vl, "apply_rotary_pos_emb", lambda x, angles: x)
    found = states(npu_ops_adapters.apply())
    npu_ops_adapters.revert()
    refused = {target for target, state in found.items() if state.startswith("refused")}
    assert refused == {f"{qwen3_vl.__name__}:apply_rotary_pos_emb"}


def test_nothing_is_patched_in_this_process_but_where_a_test_asks():
    """Other tests compare with transformers' functions, which must not be patched."""
    assert not npu_ops_import_hook.is_watching()
    assert qwen3_vl.apply_rotary_pos_emb.__module__ == qwen3_vl.__name__


@pytest.mark.parametrize("name", ["qwen3", "qwen3_vl"])
def test_a_loaded_model_goes_on_with_sdpa_after_revert(name, applied, caplog):
    model, inputs = transformers_models.built(name)
    model.set_attn_implementation("npu_ops")
    npu_ops_adapters.revert()
    assert "loaded models now use 'sdpa'" in caplog.text
    expected, _ = transformers_models.built(name)
    expected.set_attn_implementation("sdpa")
    with torch.no_grad():
        actual, wanted = (one(**inputs, use_cache=False).logits for one in (model, expected))
    assert torch.equal(actual, wanted)
