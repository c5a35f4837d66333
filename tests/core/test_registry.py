"""Dispatch: which implementation runs, what is logged, and what importing npu_ops costs."""

import contextlib
import copy
import dataclasses
import importlib
import inspect
import logging
import os
import pathlib
import pkgutil
import subprocess
import sys

import pytest
import torch
from support import DispatchRecorder, copies, floats

import npu_ops
from npu_ops import ops
from npu_ops.core import env, library, log, registry
from npu_ops.core.registry import Implementation, Table, Verdict

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    """Start with no registered op and an empty log."""
    monkeypatch.setattr(Table, "tables", {})
    monkeypatch.setattr(registry, "_explained", {})
    monkeypatch.setattr(log, "_said", set())


def implementation(name, devices=(), reason=None, ran=None):
    """Return an implementation that declines for `reason`, else adds its name to `ran`."""
    ran = [] if ran is None else ran
    return Implementation(
        name, lambda: lambda x: ran.append(name), frozenset(devices), lambda x: reason
    )


X = torch.ones(3)


# Selection


def test_first_that_has_nothing_against_the_call_runs():
    ran = []
    names = {"ascendc": "too wide", "cpu": None, "reference": None}
    table = Table("op", [implementation(n, reason=r, ran=ran) for n, r in names.items()])
    table.run(X)
    assert ran == ["cpu"]


def test_implementations_of_other_devices_are_passed_over_in_silence(caplog):
    table = Table("op", [implementation("triton_ascend", {"npu"}), implementation("cpu", {"cpu"})])
    with env.override(strict=True):
        assert table.select(X).name == "cpu"
    assert not caplog.records


def test_nothing_runs():
    table = Table(
        "op", [implementation("cpu", {"npu"}), implementation("reference", reason="too wide")]
    )
    with pytest.raises(
        RuntimeError, match=r"^op: no implementation runs on cpu \(reference: too wide\)$"
    ):
        table.run(X)


def test_an_implementation_is_loaded_once_when_first_chosen():
    loads = []
    table = Table(
        "op",
        [
            Implementation(
                "cpu", lambda: loads.append(1) or (lambda x: None), frozenset(), lambda x: None
            )
        ],
    )
    table.select(X)
    assert loads == []
    table.run(X)
    table.run(X)
    assert loads == [1]


def test_from_module_imports_when_asked(monkeypatch):
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    load = registry.from_module("colorsys:rgb_to_hls")
    assert "colorsys" not in sys.modules
    assert load() is sys.modules["colorsys"].rgb_to_hls


# Registration


def test_an_op_is_registered_once():
    Table("op", [implementation("cpu")])
    with pytest.raises(ValueError, match="op 'op' is registered already"):
        Table("op", [implementation("reference")])


def test_an_implementation_is_registered_once():
    with pytest.raises(ValueError, match=r"op 'op': .* twice in \['cpu', 'cpu'\]"):
        Table("op", [implementation("cpu"), implementation("cpu")])
    assert "op" not in Table.tables


def test_a_torch_operator_is_defined_once():
    with pytest.raises(RuntimeError, match="rope"):
        library.define("rope(Tensor q) -> Tensor")


def test_a_function_is_explained_once():
    table = Table("op", [implementation("cpu")])
    registry.explains("function", table, lambda x: (x,))
    with pytest.raises(ValueError, match="'function' is registered already"):
        registry.explains("function", table, lambda x: (x,))


# Forcing


def test_forced_implementation_runs():
    ran = []
    table = Table("op", [implementation(n, ran=ran) for n in ("cpu", "reference")])
    with env.override(impl={"op": "reference", "another": "cpu"}):
        table.run(X)
    assert ran == ["reference"]


@pytest.mark.parametrize("other", [{}, {"another": "cpu"}])
def test_forcing_another_op_changes_nothing(other):
    table = Table("op", [implementation("cpu"), implementation("reference")])
    with env.override(impl=other):
        assert table.select(X).name == "cpu"


def test_forced_implementation_that_is_not_there():
    table = Table("op", [implementation("cpu"), implementation("reference")])
    with env.override(impl={"op": "aclnn"}):
        with pytest.raises(
            RuntimeError, match="NPU_OPS_IMPL forces op=aclnn, needs one of cpu, reference"
        ):
            table.run(X)


@pytest.mark.parametrize(
    "forced, reason",
    [("ascendc", "too wide"), ("triton_ascend", "tensors are on cpu, it runs on cuda, npu")],
)
def test_forced_implementation_that_cannot_run(forced, reason):
    """The error says why, and no other implementation runs instead."""
    table = Table(
        "op",
        [
            implementation("triton_ascend", {"npu", "cuda"}),
            implementation("ascendc", reason="too wide"),
            implementation("reference"),
        ],
    )
    with env.override(impl={"op": forced}):
        with pytest.raises(RuntimeError, match=f"NPU_OPS_IMPL forces op={forced}, but {reason}"):
            table.run(X)


# Falling back


def test_a_fallback_is_logged_once(caplog):
    table = Table(
        "op",
        [implementation("cpu", reason="it has no float64 kernel"), implementation("reference")],
    )
    for _ in range(3):
        table.run(X)
    assert [r.message for r in caplog.records] == [
        "op falls back to reference (cpu: it has no float64 kernel)"
    ]
    assert caplog.records[0].levelno == logging.WARNING and caplog.records[0].name == "npu_ops"


def test_each_reason_is_logged(caplog):
    reasons = iter(["too wide", "too narrow", "too wide"])
    first = Implementation("cpu", None, frozenset(), lambda x: next(reasons))
    table = Table("op", [first, implementation("reference")])
    for _ in range(3):
        table.run(X)
    assert ["too wide" in r.message for r in caplog.records] == [True, False]


def test_strict_makes_a_fallback_an_error():
    ran = []
    table = Table(
        "op", [implementation("cpu", reason="too wide"), implementation("reference", ran=ran)]
    )
    with env.override(strict=True):
        with pytest.raises(
            RuntimeError, match=r"^NPU_OPS_STRICT=1: op falls back to reference \(cpu: too wide\)$"
        ):
            table.run(X)
    assert ran == []


def test_another_kernel_of_the_device_is_no_fallback(caplog):
    """Two kernels may each take a part of a device's calls."""
    kernels = [implementation("vendor", reason="too wide"), implementation("ours", ["cpu"])]
    table = Table("op", [*kernels, implementation("reference")])
    with env.override(strict=True):
        assert table.select(X).name == "ours"
    assert caplog.records == []


def test_strict_leaves_a_forced_implementation_alone():
    table = Table("op", [implementation("cpu", reason="too wide"), implementation("reference")])
    with env.override(strict=True, impl={"op": "reference"}):
        assert table.select(X).name == "reference"


@pytest.mark.parametrize("level, lines", [("off", 0), ("once", 1), ("calls", 4)])
def test_log_levels(level, lines, caplog):
    table = Table("op", [implementation("cpu", reason="too wide"), implementation("reference")])
    with env.override(log=level):
        for _ in range(3):
            table.run(X)
    assert len(caplog.records) == lines


def test_a_call_is_logged_before_it_runs(caplog):
    """The log line of a call survives a crash of the call."""

    def crash(*args):
        raise RuntimeError(f"crashed after {len(caplog.records)} line")

    table = Table("op", [Implementation("cpu", lambda: crash, frozenset(), lambda *args: None)])
    with env.override(log="calls"):
        with pytest.raises(RuntimeError, match="crashed after 1 line"):
            table.run(torch.ones(2, 3, dtype=torch.bfloat16), None, "BSND", 0.5)
    assert caplog.messages == ["op(bfloat16[2, 3]@cpu, None, 'BSND', 0.5) -> cpu"]
    assert caplog.records[0].levelno == logging.INFO  # a trace line, not a warning


def test_a_program_decides_which_traces_it_wants(caplog):
    table = Table("op", [implementation("cpu")])
    with caplog.at_level(logging.ERROR, "npu_ops"), env.override(log="calls"):
        table.run(X)
    assert caplog.messages == []


@pytest.mark.parametrize("setup", ["", "logging.basicConfig(level='ERROR')"])
def test_calls_are_shown_however_logging_was_set_up(setup):
    """A call is logged exactly once: to stderr if no handler is set up, else by the handlers."""
    code = f"import logging, torch, npu_ops\n{setup}\nnpu_ops.l2norm(torch.ones(2, 4))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"NPU_OPS_LOG": "calls"}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.stderr.count("l2norm(float32[") == 1, done.stderr


# Explaining


def test_explain_rows():
    table = Table(
        "op",
        [
            implementation("ascendc", {"npu"}),
            implementation("triton_ascend", reason="too wide"),
            implementation("cpu"),
            implementation("reference"),
        ],
    )
    registry.explains("function", table, lambda x, scale=1: (x * scale,))
    expected = [
        Verdict("op", "ascendc", "tensors are on cpu, it runs on npu"),
        Verdict("op", "triton_ascend", "too wide"),
        Verdict("op", "cpu", None),
        Verdict("op", "reference", "cpu comes first"),
    ]
    assert npu_ops.explain("function", X, scale=2) == expected
    with env.override(impl={"op": "reference"}):
        forced = [verdict.why_not for verdict in npu_ops.explain("function", X)]
    assert forced == [*(v.why_not for v in expected[:2]), "NPU_OPS_IMPL forces reference", None]


def public_calls():
    """Return new arguments for every public function, by name."""
    calls = {}
    for op in pkgutil.iter_modules(ops.__path__):
        package, cases = (
            importlib.import_module(f"npu_ops.ops.{op.name}{of}") for of in ("", ".cases")
        )
        for call in cases.CALLS:
            calls.setdefault(call.function, call.arguments())
        small = dataclasses.replace(cases.CASES[0], tokens=1)
        calls[package.__all__[0]] = small.inputs(torch.float32, "cpu")
    return calls


PUBLIC = pytest.mark.parametrize("name", public_calls())


def ways(name):
    """Return the settings of `inplace` to try; only {} if the function has none."""
    has_choice = "inplace" in inspect.signature(getattr(npu_ops, name)).parameters
    return [{"inplace": False}, {"inplace": True}] if has_choice else [{}]


IN_PLACE = pytest.mark.parametrize("name", [n for n in public_calls() if len(ways(n)) == 2])
WAYS = pytest.mark.parametrize("name, way", [(n, way) for n in public_calls() for way in ways(n)])


# Ops that may run PyTorch's kernels on CPUs, and whose vendor operators come first on NPUs.
BY_TORCH = "attention", "grouped_linear"


@pytest.fixture
def registered(monkeypatch):
    """Restore the real registry."""
    monkeypatch.undo()
    monkeypatch.setattr(log, "_said", set())


def test_every_public_operator_can_be_explained(registered):
    plans = {"AttentionPlan", "AttentionSpec", "plan_attention"}
    asked = {"__version__", "build_info", "explain", "is_npu", "unfinished_rows"}
    operators = set(npu_ops.__all__) - asked - plans
    assert operators == set(public_calls()) == set(registry._explained)


@pytest.mark.parametrize("function", ["attention", "apply_rotary_pos_emb"])
def test_explain_names_a_wrong_argument_and_nothing_of_its_own(registered, function):
    with pytest.raises(TypeError, match=f"^{function}: missing a required argument: 'q'$"):
        npu_ops.explain(function)
    with pytest.raises(TypeError, match=f"^{function}: got an unexpected keyword argument 'no'$"):
        npu_ops.explain(function, **public_calls()[function], no=1)


@PUBLIC
def test_without_triton_the_reason_is_a_sentence(registered, monkeypatch, name):
    """Triton kernels are declined, so that no launch raises ImportError later."""
    sentence = "triton is not installed (for Ascend: pip install triton-ascend)"
    monkeypatch.setattr(library, "triton_why_not", lambda: sentence)
    with registry.as_if_on("npu"):
        rows = npu_ops.explain(name, **public_calls()[name])
    reasons = [row.why_not for row in rows if row.implementation == "triton_ascend"]
    assert reasons == [sentence]
    assert [row.implementation for row in rows if row.why_not is None] == ["reference"]


@PUBLIC
def test_explain_says_what_the_call_does(name, registered, caplog):
    """`explain` takes a name or a function. It chooses the implementation that a call logs."""
    arguments = public_calls()[name]
    function = getattr(npu_ops, name)
    verdicts = npu_ops.explain(name, **arguments)
    assert npu_ops.explain(function, **arguments) == verdicts
    chosen = [v.implementation for v in verdicts if v.why_not is None]
    order = [i.implementation for i in verdicts]
    op = verdicts[0].op
    known = ("aclnn", "fla_npu")
    vendors = [name for name in known if (ROOT / f"npu_ops/ops/{op}/{name}.py").exists()]
    first, behind = (vendors, []) if op in BY_TORCH else ([], vendors)
    native = ["ascendc"] if (ROOT / f"csrc/{op}/{op}_ascendc.cpp").exists() else []
    assert order == [*first, "triton_ascend", *native, *behind, "cpu", "reference"]
    with env.override(log="calls"):
        function(**arguments)
    assert chosen == ["cpu"] and caplog.messages[-1].endswith("-> cpu")
    assert caplog.messages[-1].startswith(f"{verdicts[0].op}(")


@PUBLIC
def test_explain_computes_nothing(name, registered):
    """`explain` allocates and copies nothing, except to check index values."""
    arguments = public_calls()[name]
    tensors = [x for x in arguments.values() if isinstance(x, torch.Tensor)]
    indexed = not all(x.is_floating_point() for x in tensors)
    with copies() as seen:
        npu_ops.explain(name, **arguments)
    assert seen.allocated < (1000 if indexed else 64)
    assert indexed or seen.operators == []


@PUBLIC
def test_fp64_falls_back_and_says_so(name, registered, caplog):
    arguments = public_calls()[name]
    wide = floats(arguments, torch.float64)
    function = getattr(npu_ops, name)
    function(**wide)
    function(**wide)
    op = npu_ops.explain(name, **wide)[0].op
    sentence = f"{op} falls back to reference (cpu: it has no float64 kernel)"
    assert caplog.messages == [sentence]
    with env.override(strict=True):
        with pytest.raises(RuntimeError) as error:
            function(**wide)
    assert str(error.value) == f"NPU_OPS_STRICT=1: {sentence}"


@PUBLIC
def test_without_native_kernels_everything_works(name, registered, monkeypatch):
    """Installed with NPU_OPS_SKIP_NATIVE=1, calls run the reference."""
    function = getattr(npu_ops, name)
    arguments = public_calls()[name]
    arguments |= {"p": 0.0} if "p" in arguments else {}
    expected = function(**copy.deepcopy(arguments))
    reason = "installed without native kernels (NPU_OPS_SKIP_NATIVE=1 at install time)"
    monkeypatch.setattr(library, "build_info", lambda: {"why_not": reason})
    if name not in BY_TORCH:
        reasons = {row.implementation: row.why_not for row in npu_ops.explain(name, **arguments)}
        assert reasons["cpu"] == reason
    torch.testing.assert_close(function(**arguments), expected)


# With and without torch's dispatcher


def outputs(function, arguments):
    torch.manual_seed(0)
    result = function(**arguments)
    return [out for out in (result if isinstance(result, tuple) else (result,)) if out is not None]


@WAYS
def test_a_dispatch_mode_sees_one_operator(name, way, registered):
    """Dispatch modes (profilers, fake tensors, checkpointing) see one operator per call."""
    arguments = public_calls()[name]
    op = npu_ops.explain(name, **arguments)[0].op
    with DispatchRecorder() as watch:
        getattr(npu_ops, name)(**arguments, **way)
    operator = f"{op}_" if way.get("inplace") else op
    assert [str(call) for call, _ in watch.calls] == [f"npu_ops.{operator}.default"]


@WAYS
def test_a_call_is_the_same_however_it_is_made(name, way, registered):
    """Results are equal under modes, inference_mode and, unless in place, with gradients."""
    arguments = public_calls()[name] | way
    first = next(n for n, x in arguments.items() if torch.is_tensor(x) and x.is_floating_point())

    def call(context, requires_grad=False):
        fresh = copy.deepcopy(arguments)
        fresh[first].requires_grad_(requires_grad)
        with context:
            return outputs(getattr(npu_ops, name), fresh)

    results = [
        call(contextlib.nullcontext()),
        call(DispatchRecorder()),
        call(torch.inference_mode()),
    ]
    if not way.get("inplace") and not name.endswith("_update"):
        results.append(call(contextlib.nullcontext(), requires_grad=True))
        assert results[-1][0].requires_grad
    for result in results[1:]:
        for actual, expected in zip(result, results[0], strict=True):
            assert torch.equal(actual, expected) and actual.stride() == expected.stride()


@IN_PLACE
@pytest.mark.parametrize("context", [contextlib.nullcontext, DispatchRecorder])
def test_autograd_notices_what_is_written_in_place(name, context, registered):
    arguments = public_calls()[name]
    first = "x" if "x" in arguments else "q"
    weight = torch.ones_like(arguments[first], requires_grad=True)
    product = weight * arguments[first]
    with context():
        getattr(npu_ops, name)(**arguments, inplace=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


# The installation


def test_build_info_of_this_installation():
    info = npu_ops.build_info()
    assert info["native"] and info["why_not"] is None
    assert info["torch"] and info["compiler"]


def test_a_missing_native_library_is_said(monkeypatch, tmp_path):
    monkeypatch.setattr(library, "_BUILD_INFO", tmp_path / "_build_info.json")
    assert "NPU_OPS_SKIP_NATIVE=1" in library._load_native.__wrapped__()


def build_info_with(monkeypatch, folder, *libraries):
    """Return the build info of an installation whose libraries do not load."""
    for name in libraries:
        (folder / name).write_bytes(b"not a library")
    monkeypatch.setattr(library, "_BUILD_INFO", folder / "_build_info.json")
    monkeypatch.setattr(library, "_load_native", library._load_native.__wrapped__)
    return library.build_info.__wrapped__()


def test_a_native_library_that_does_not_load_is_said(monkeypatch, tmp_path):
    info = build_info_with(monkeypatch, tmp_path, library._NATIVE)
    assert info["broken"] and not info["native"]
    assert info["why_not"].startswith("the native library does not load: ")
    assert "file too short" in info["why_not"] and "--no-binary npu-ops" in info["why_not"]


def test_a_native_library_for_another_torch_is_not_loaded(monkeypatch, tmp_path):
    info = build_info_with(monkeypatch, tmp_path, "_native_torch2_6.abi3.so")
    assert info["broken"] and f"for torch {torch.__version__}, is not installed" in info["why_not"]


def test_a_broken_native_library_is_warned_of_once(monkeypatch, caplog):
    monkeypatch.setattr(
        library, "build_info", lambda: {"broken": True, "why_not": "no such symbol"}
    )
    monkeypatch.setattr(log, "_said", set())
    library.say_what_is_broken()
    library.say_what_is_broken()
    assert [record.getMessage() for record in caplog.records] == ["no such symbol"]


def test_an_output_that_is_not_written_is_nan():
    """In tests, outputs are NaN until a kernel writes them. All other tests rely on this."""
    assert library.poison_outputs
    assert library.poisoned(torch.empty(4, dtype=torch.bfloat16)).isnan().all()


# Importing


def loaded_by(statement):
    """Return the top-level modules that a new Python process has loaded after `statement`."""
    program = f"{statement}\nimport sys\nprint(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    return {name.partition(".")[0] for name in done.stdout.split()}


def test_import_needs_torch_alone():
    """`import torch` may itself load vendor packages; `import npu_ops` must add none."""
    added = loaded_by("import npu_ops") - loaded_by("import torch")
    assert "npu_ops" in added
    vendors = {"torch_npu", "triton", "megatron", "mindspeed", "sglang", "transformers", "fla"}
    assert added & vendors == set()
    assert added & {"npu_ops_adapters", "npu_ops_emulator"} == set()
