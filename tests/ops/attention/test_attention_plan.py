"""Attention's plan, i.e. which NPU operator computes a call, and each vendor operator's results."""

import json
import random
import subprocess
import sys

import pytest
import torch
from attention_calls import DEVICES, OPS, ORDER, chosen, compare, qkv, run, wanted
from npu_ops_tools import where
from support import (
    devices,
    floats,
)

import npu_ops
from npu_ops import AttentionSpec, plan_attention
from npu_ops.core import env, hardware
from npu_ops.ops.attention import limits, op, routing
from npu_ops.ops.attention.cases import CASES
from npu_ops.ops.attention.table import OPERATORS

# The plan: which vendor operator computes a call, with which arguments


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
        (TRAIN | {"layout": "SBND"}, {"operator": FA, "layout": "SBH"}),
        ({"layout": "SBND"}, {"operator": f"{FIA}_v2", "layout": "BSND"}),
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
        (TRAIN | {"dropout": True}, FA, "draws its own dropout mask"),
        (TRAIN | {"deterministic": True}, FA, "adds in any order"),
        (TRAIN | {"softcap": True}, FA, "does not support softcap"),
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
        "npu_fusion_attention runs the call, layout TND; without a mask: every key takes part; "
        "key lengths as a list of cumulative ends without the leading zero; heads padded to 80. "
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
        ({"keys": "paged", "block_size": 16, "mask": True}, "keys"),
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
    """Each of 2000 random specs gets an error or one consistent plan.

    The plan has a reason for each operator passed over.
    """
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
        # aclnn ignores a sparse mode without a mask tensor, so a plan has both or neither
        if plan.runs == "aclnn":
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
    """Cache blocks of 16 keys are too small for the compiler of the Ascend 950."""
    q, cache = torch.zeros(1, 1, 2, 64), torch.zeros(4, 16, 2, 64)
    call = {"seqlens_k": torch.tensor([20]), "block_table": torch.tensor([[0, 1]]).int()}
    for soc, why_not in (
        ("Ascend910B3", None),
        ("Ascend950PR_9579", "blocks of 16 keys are not a multiple of 32 keys"),
    ):
        with hardware.as_if_soc(soc):
            q_, k_, v_, extra, rule = npu_ops.ops.attention._prepare(q, cache, cache, **call)
            plan = routing.plan_of(q_, k_, v_, extra, rule, "npu")
            assert dict(plan.refused).get(TRITON) == why_not
            assert (
                limits.triton_why_not(op.forward.Arguments(q_, k_, v_, extra, rule, None, None))
                == why_not
            )


def test_the_table_and_the_op_name_the_same_implementations():
    assert {operator.runs for operator in OPERATORS} == set(ORDER)
    assert [table.op for table in (op.forward.table, op.backward.table)] == list(OPS)


@DEVICES
def test_explain_says_what_the_plan_says(device):
    """On any device, `explain` lists the vendor's operators and why each cannot run the call."""
    q, k, v = (x.to(device) for x in qkv())
    rows = npu_ops.explain("attention", q, k, v, softcap=3.0)
    first = rows[0]
    assert first.implementation == "aclnn"
    said = (
        "does not support softcap"
        if device == "npu"
        else f"tensors are on {device}, it runs on npu"
    )
    assert said in first.why_not


# Each vendor operator, run where there is an NPU or an emulated one


def only(monkeypatch, name):
    """Pretend that torch_npu has only this attention operator."""
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
        """The operator runs with the plan's arguments, and with gradients if it has a backward."""
        only(monkeypatch, name)
        case = next(case for case in CASES if case.name == case_name)
        inputs = case.inputs(torch.bfloat16, device)
        wrt = () if "infer" in name or case.lse else wanted(inputs)
        with torch.set_grad_enabled(bool(wrt)):
            q, k, v, extra, rule = npu_ops.ops.attention._prepare(
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
