"""The vendor's compiler vectorises every Triton kernel, and keeps double buffering."""

import dataclasses
import inspect
import json
import pkgutil

import pytest
import torch
from npu_ops_tools.cli import app
from npu_ops_tools.compile import SOCS, compile_launch
from npu_ops_tools.model.launched import of_call
from triton.runtime.jit import JITFunction
from typer.testing import CliRunner

import npu_ops
from npu_ops import ops
from npu_ops.core import cases, hardware, registry
from npu_ops.core.socs import ub_bytes

OPS = [
    module.name
    for module in pkgutil.iter_modules(ops.__path__)
    if cases.of(module.name).REPRESENTATIVE
]
# (op, case, SoC) -> the compiler's message, for the cases that do not compile.
REFUSED = {
    ("rope", "head-2-interleaved-half-table", SOCS[2]): "pass pipeline failed",
}


def compile_reports(*arguments):
    """Return the rows of `npu-ops compile`, and its exit status."""
    found = CliRunner().invoke(app, ["compile", *arguments, "--json"])
    assert found.stdout, found.stderr
    return json.loads(found.stdout), found.exit_code


def check(rows):
    assert rows
    for row in rows:
        assert row["faults"] == [], f"{row['kernel']} {row['case']} {row['soc']}"
        assert row["scalar_loops"] == row["unread_masks"] == [] and row["multi_buffer"]
        # these kernels use only the cube core
        multiplies = row["kernel"] in ("products_kernel", "_linear_kernel")
        assert (row["ub_bytes"] > 0 or multiplies) and row["ub_bytes"] <= ub_bytes(row["soc"])
        # these kernels load nothing: they compute all that they store
        makes = row["kernel"] in ("_keep_kernel", "_one_length_kernel")
        assert row["vector"] > 0 or multiplies
        assert (row["loaded"] > 0 or makes) and row["stored"] > 0


def test_a_row_that_fits_in_a_tile_is_read_once():
    """If a row fits in a tile, both loops over its columns share one load per input."""
    rows, _ = compile_reports(
        "l2norm", "--dtype=bfloat16", "--case=wide-4096", "--case=wide-20000",
        *(f"--soc={soc}" for soc in SOCS),
    )  # fmt: skip
    loads = {(row["kernel"], row["case"].removesuffix("-bfloat16")): row["loads"] for row in rows}
    assert loads == {
        ("_l2norm_kernel", "wide-4096"): 1,
        ("_l2norm_kernel", "wide-20000"): 2,
        ("_l2norm_backward_kernel", "wide-4096"): 2,
        ("_l2norm_backward_kernel", "wide-20000"): 4,
    }


# The tests of ops already compile for the chip of the emulated NPU (SOCS[0]). Here only each op's
# last case is compiled for it, to inspect the output. For Ascend950 (SOCS[2]), `make test` compiles
# the two ops that have their own tile sizes there. `make test-all` compiles everything: every
# branch, fp32, the other ops, and SOCS[1], which differs from SOCS[0] only in its name.
def chips(op):
    yield op, SOCS[0], slice(-1, None)
    yield pytest.param(op, SOCS[0], slice(None, -1), marks=pytest.mark.slow)
    seldom = [] if op in ("chunk_gated_delta_rule", "rope") else [pytest.mark.slow]
    yield pytest.param(op, SOCS[2], slice(-1, None), marks=seldom)


@pytest.mark.parametrize("op, soc, chosen", [row for op in OPS for row in chips(op)])
def test_representative_kernels(op, soc, chosen):
    chosen = [f"--case={case}" for case in cases.of(op).REPRESENTATIVE[chosen]]
    rows, status = compile_reports(op, "--soc", soc, "--dtype", "bfloat16", *chosen)
    check(rows)
    assert {row["soc"] for row in rows} == {soc}
    assert status == 0


@pytest.mark.parametrize("op, case, soc", REFUSED)
def test_what_a_compiler_refuses(op, case, soc):
    """If a compiler accepts a case, remove its entry in REFUSED and docs/evidence/compilers.md."""
    chosen = ("--case", case, "--soc", soc, "--dtype", "bfloat16")
    rows, status = compile_reports(op, *chosen)
    assert rows and all(REFUSED[op, case, soc] in row["faults"][0] for row in rows)
    assert status == 1


@pytest.mark.parametrize("soc", [SOCS[0], pytest.param(SOCS[2], marks=pytest.mark.slow)])
@pytest.mark.parametrize("state_v_first", [True, False])
def test_segments_of_the_chunked_delta_rule(state_v_first, soc):
    """The launches are planned for 24 cube and 48 vector cores."""
    q, gates = torch.zeros(1, 4096, 2, 128, dtype=torch.bfloat16), torch.zeros(1, 4096, 2)
    inputs = {"q": q, "k": q, "v": q, "g": gates, "beta": gates, "state_v_first": state_v_first}
    state = torch.zeros(1, 2, 128, 128) if state_v_first else None
    function = npu_ops.chunk_gated_delta_rule
    wrt = ("q",) if state_v_first else ()
    with hardware.as_if_soc(soc, (24, 48)):
        found = [
            compile_launch(launch, soc)
            for launch in of_call("", soc, function, inputs | {"initial_state": state}, wrt)
            if launch.name in ("ends_kernel", "gradient_ends_kernel", "join_kernel")
        ]
    assert len(found) == (6 if wrt else 2)
    for report in found:
        assert report.faults() == [] and report.ub_bytes <= ub_bytes(soc)


@pytest.mark.slow
@pytest.mark.parametrize("soc", SOCS)
@pytest.mark.parametrize("op", OPS)
def test_every_case(op, soc):
    rows, _ = compile_reports(op, "--soc", soc)
    check([row for row in rows if not is_refused(row)])


def is_refused(row):
    case, _, _ = row["case"].rpartition("-")  # the rest is the dtype
    return (row["op"], case, row["soc"]) in REFUSED


def compiled_by(kernel, named: dict) -> tuple:
    """Return the key by which Triton specialises a kernel for these arguments."""
    bound = inspect.signature(kernel.fn).bind(**named).arguments
    key = [kernel.fn.__name__]
    for parameter in kernel.params:
        value = bound[parameter.name]
        if isinstance(value, torch.Tensor):
            key.append(str(value.dtype))
        elif parameter.is_constexpr or value is None or isinstance(value, float):
            key.append(value)
        elif parameter.do_not_specialize:
            key.append("int")
        else:
            key.append(1 if value == 1 else value % 16 == 0)
    return tuple(key)


@pytest.mark.parametrize(
    "op, function, case",
    [
        ("bias_dropout_add", "bias_dropout_add", "qwen3-4b-decode-64"),
        ("rope", "apply_rotary_pos_emb", "qwen3-vl-8b-tp4-t64"),
        ("rope", "apply_rotary_pos_emb", "qwen3.5-9b-tp1-t64"),
        ("mrope", "apply_multimodal_rotary_pos_emb", "qwen3-vl-8b-tp1-t64"),
        ("fused_recurrent_gated_delta_rule", "fused_recurrent_gated_delta_rule", "packed"),
        ("gated_delta_rule_update", "gated_delta_rule_update", "decode"),
        ("gated_delta_rule_update", "gated_delta_rule_update", "vllm-ragged-k-first"),
    ],
)
def test_one_compile_serves_20_lengths(op, function, case, monkeypatch):
    launched = set()

    def run(kernel, *args, grid, warmup, **named):
        names = [parameter.name for parameter in kernel.params]
        launched.add(compiled_by(kernel, dict(zip(names, args, strict=False)) | named))

    monkeypatch.setattr(JITFunction, "run", run)
    case = next(each for each in cases.of(op).CASES if each.name == case)
    decodes = getattr(case, "mode", "") == "decode"  # one token per sequence
    for tokens in range(2, 42, 2):
        sizes = {"tokens": tokens} | ({"sequences": tokens} if decodes else {})
        inputs = dataclasses.replace(case, **sizes).inputs(torch.bfloat16)
        with registry.as_if_on("npu"):
            getattr(npu_ops, function)(**inputs)
    names = [name for name, *_ in launched]
    assert names and len(names) == len(set(names)), launched
