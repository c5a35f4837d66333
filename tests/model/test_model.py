"""The NPU time model on compiled kernels: values, order among pipes, refused input."""

import dataclasses
import json
import pathlib
import re

import pytest
import torch
from npu_ops_tools import model
from npu_ops_tools.cli import app
from npu_ops_tools.model import core, costs, ir, machine, scalars
from npu_ops_tools.model.launched import beside
from npu_ops_tools.model.prediction import _loader, module_of
from npu_ops_tools.model.validation import check
from typer.testing import CliRunner

import npu_ops
from npu_ops.core import cases

SOC = "Ascend910B4-1"
KERNELS = pathlib.Path(__file__).parents[1] / "compile" / "kernels.py"
PRICES = costs.of(SOC).replace(latency=1.0)
UB, GM = "#hivm.address_space<ub>", "#hivm.address_space<gm>"
HEAD = (
    'module attributes {x = <"CUBE_CORE_COUNT", 20 : i32>, y = <"VECTOR_CORE_COUNT", 40 : i32>} {\n'
)


def function(body, name="kernel", kind="AIV", arguments=""):
    runtime = [f"%arg{i}: i64" for i in range(3)]
    given = [
        f"%arg{3 + i}: {each}" for i, each in enumerate([*arguments.split("; "), *["i32"] * 3])
    ]
    listed = ", ".join([*runtime, *(each for each in given if not each.endswith(": "))])
    return (
        f"func.func @{name}({listed}) attributes {{hacc.function_kind<DEVICE>, "
        f"hivm.func_core_type<{kind}>}} {{\n{body}\nreturn\n}}\n"
    )


def time_of(*functions, values=(), grid=(1, 1, 1), load=core.nothing, footprint=0.0):
    module = ir.parse(HEAD + "".join(functions) + "}")
    return machine.run(module, list(values), grid, PRICES, footprint=footprint, load=load)


LOADED = f"memref<4096xf32, {GM}>"
TILE = f"memref<4096xf32, {UB}>"
SETUP = f"""
%c0 = arith.constant 0 : i64
%ub = hivm.hir.pointer_cast(%c0) : {TILE}
"""
LOAD = f"hivm.hir.load ins(%arg3 : {LOADED}) outs(%ub : {TILE})\n"
ADD = f"hivm.hir.vadd ins(%ub, %ub : {TILE}, {TILE}) outs(%ub : {TILE})\n"
FLAG = "hivm.hir.{}_flag[<PIPE_MTE2>, <PIPE_V>, <EVENT_ID0>]\n"


def programs(body, **settings):
    (walked,) = time_of(function(body, arguments=LOADED), values=[None], **settings).programs
    return walked


# Values that the model computes


@pytest.mark.parametrize(
    ("name", "text", "values", "result"),
    [
        ("divsi", "%a, %b : i32", [-7, 2], -3),
        ("remsi", "%a, %b : i32", [-7, 2], -1),
        ("floordivsi", "%a, %b : i32", [-7, 2], -4),
        ("ceildivsi", "%a, %b : i32", [7, 2], 4),
        ("cmpi", "slt, %a, %b : i32", [1, 2], 1),
        ("cmpi", "uge, %a, %b : i32", [1, 2], 0),
        ("cmpf", "ogt, %a, %b : f32", [2.5, 2.0], 1),
        ("select", "%c, %a, %b : i32", [0, 5, 6], 6),
        ("select", "%c, %a, %b : i32", [None, 5, 6], None),
        ("addi", "%a, %b : i32", [None, 1], None),
        ("trunci", "%a : i64 to i32", [2**32 + 5], 5),
        ("trunci", "%a : i64 to i32", [2**31], -(2**31)),
        ("index_cast", "%a : index to i1", [3], 1),
    ],
)
def test_arithmetic(name, text, values, result):
    assert scalars.arith(name, text, values) == result


def test_affine_maps():
    text = "#map = affine_map<(d0)[s0] -> ((d0 + 1) ceildiv 4, d0 floordiv s0, d0 mod 3)>"
    assert ir._maps(text)["#map"](8, 3) == (3, 2, 2)


def test_views_keep_their_place():
    source = ir.view_type(f"memref<8x16xf32, strided<[32, 1], offset: ?>, {GM}>")
    names = {"%i": 2, "%n": 3}

    def value(name):
        return names[name] if name.startswith("%") else int(name)

    part = scalars.view("subview", "%x[%i, 4] [%n, 8] [1, 2] : a to memref<?x8xf32>", source, value)
    assert (part.shape, part.strides, part.offset) == ((3, 8), (32, 2), 2 * 32 + 4)
    assert part.runs() == (24, 4)
    flat = scalars.view("collapse_shape", "%x [[0, 1]] : a", ir.view_type("memref<4x8xf32>"), value)
    assert (flat.shape, flat.strides, flat.runs()) == ((32,), (1,), (1, 128))


# Order among pipes


def test_pipes_run_beside_each_other_unless_a_flag_says_otherwise():
    apart = programs(SETUP + LOAD + ADD)
    after = programs(SETUP + LOAD + FLAG.format("set") + FLAG.format("wait") + ADD)
    busy = apart.busy
    assert apart.time < busy["vector.MTE2"] + busy["vector.V"]
    needs = busy["vector.MTE2"] + PRICES.latency + busy["vector.V"]
    assert after.time == pytest.approx(needs, abs=0.02)


def test_a_barrier_waits_for_all():
    barrier = "hivm.hir.pipe_barrier[<PIPE_ALL>]\n"
    alone, twice = programs(SETUP + LOAD + barrier), programs(SETUP + (LOAD + barrier) * 2)
    assert twice.time == pytest.approx(2 * alone.time, rel=0.02)


def test_a_flag_that_nobody_set_is_refused():
    with pytest.raises(machine.Unknown, match="a flag that is never set"):
        programs(SETUP + FLAG.format("wait") + ADD)


def mixed(cube, vector):
    parts = [
        function(cube, "k_mix_aic", "AIC", LOADED),
        function(vector, "k_mix_aiv", "AIV", LOADED),
    ]
    return time_of(*parts, values=[None])


SET = "hivm.hir.sync_block_set[<{}>, <PIPE_{}>, <PIPE_S>] flag = {} ffts_base_addr = %arg0\n"
WAIT = "hivm.hir.sync_block_wait[<{}>, <PIPE_{}>, <PIPE_S>] flag = {}\n"


def test_cores_wait_for_each_other():
    cube = SET.format("CUBE", "FIX", 0) + WAIT.format("CUBE", "MTE3", 1)
    vector = SETUP + WAIT.format("VECTOR", "FIX", 0) + LOAD + SET.format("VECTOR", "MTE3", 1)
    assert mixed(cube, vector).cores >= 2 * PRICES.block_flag
    with pytest.raises(machine.Unknown, match="never set"):
        mixed(cube, SETUP + LOAD)


# Loops and branches

LOOP = f"""
%c1 = arith.constant 1 : i32
%zero = arith.constant 0 : i32
scf.for %i = %zero to %arg4 step %c1  : i32 {{
{LOAD}
}}
"""


def loop(count, **settings):
    found = time_of(
        function(SETUP + LOOP, arguments=f"{LOADED}; i32"), values=[None, count], **settings
    )
    return found.programs[0]


def test_a_loop_runs_as_often_as_its_bounds_say():
    assert loop(5).bytes["loaded"] == 5 * 4096 * 4
    assert loop(0).bytes["loaded"] == 0


def test_a_long_loop_is_not_walked_to_its_end_and_comes_to_the_same(monkeypatch):
    kept = next(
        text for name, text in check._compiled().items() if '"add"' in name and "16384" in name
    )
    module, values = ir.parse(kept), [None, None, None, 40 * 16384 * 61 + 5]
    steps = []
    block = core.Core._block
    monkeypatch.setattr(core.Core, "_block", lambda *a: steps.append(1) or block(*a))
    quick = machine.walk(module, values, (40, 1, 1), PRICES)
    count = len(steps)
    monkeypatch.setattr(core, "SURE", 10**9)
    whole = machine.walk(module, values, (40, 1, 1), PRICES)
    assert count < (len(steps) - count) / 2
    for a, b in zip(quick, whole, strict=True):
        assert a.time == pytest.approx(b.time, rel=1e-6) and a.bytes == b.bytes


BOUND_FROM_MEMORY = f"""
%c2 = arith.constant 2 : index
%n = memref.load %arg4[%c2] : memref<?xi32, {GM}>
%c1 = arith.constant 1 : i32
%zero = arith.constant 0 : i32
scf.for %i = %zero to %n step %c1  : i32 {{
{LOAD}
}}
"""


def test_bounds_from_memory_are_those_of_the_launch():
    kernel = function(SETUP + BOUND_FROM_MEMORY, arguments=f"{LOADED}; memref<?xi32, {GM}>")
    found = time_of(kernel, values=[None, [7, 8, 9]], load=lambda tensor, offset: tensor[offset])
    assert found.programs[0].bytes["loaded"] == 9 * 4096 * 4 + 4
    with pytest.raises(machine.Unknown, match="bounds of a loop"):
        time_of(kernel, values=[None, [7, 8, 9]])


BOUND_FROM_VECTORS = f"""
%c0 = arith.constant 0 : i32
%c1 = arith.constant 1 : i32
%five = arith.constant 5 : i32
%x = math.exp %arg4 : f32
%right = arith.cmpf ogt, %x, %x : f32
%n = arith.select %right, %five, %c1 : i32
scf.for %i = %c0 to %n step %c1  : i32 {{
{LOAD}
}}
"""


def test_a_choice_of_vectors_is_taken_as_true_and_said():
    """A kernel may check lengths before use; the model assumes the check passes and says so."""
    kernel = function(SETUP + BOUND_FROM_VECTORS, arguments=f"{LOADED}; f32")
    found = time_of(kernel, values=[None, 1.0])
    assert found.programs[0].assumed and found.programs[0].bytes["loaded"] == 5 * 4096 * 4
    plain = time_of(function(SETUP + LOAD, arguments=LOADED), values=[None])
    assert not plain.programs[0].assumed


def test_all_that_is_not_known_is_listed():
    body = f"""{SETUP}
    %x = math.exp %arg4 : f32
    %c = arith.cmpf ogt, %x, %x : f32
    scf.if %c {{
    {LOAD}
    }}
    hivm.hir.vsort ins(%ub : {TILE}) outs(%ub : {TILE})
    hivm.hir.vsort ins(%ub : {TILE}) outs(%ub : {TILE})
    gpu.launch %x : f32
    """
    with pytest.raises(machine.Unknown) as error:
        time_of(function(body, arguments=f"{LOADED}; f32"), values=[None, 1.0])
    assert error.value.what == {
        "condition of a branch": 1, "hivm.hir.vsort of f32/f32": 2, "gpu.launch": 1,
    }  # fmt: skip


# All cores


def test_more_programs_than_cores_take_turns():
    one = time_of(function(SETUP + LOAD, arguments=LOADED), values=[None], grid=(40, 1, 1))
    two = time_of(function(SETUP + LOAD, arguments=LOADED), values=[None], grid=(41, 1, 1))
    assert (one.waves, two.waves) == (1, 2)
    assert two.cores == pytest.approx(2 * one.cores + PRICES.restart)
    assert one.balance == 1 and two.balance == pytest.approx(41 / 80, rel=0.1)


def test_beyond_the_cache_the_memory_is_shared():
    kernel = function(SETUP + LOOP, arguments=f"{LOADED}; i32")
    small, large = (
        time_of(kernel, values=[None, 500], grid=(40, 1, 1), footprint=size) for size in (1e6, 1e9)
    )
    assert small.memory == 0 and large.memory == pytest.approx(500 * 40 * 4096 * 4 / PRICES.memory)
    assert large.total > small.total


# Our ops, and the command


def test_an_op():
    x = torch.empty(64, 8, 128, dtype=torch.bfloat16)
    (prediction,) = model.predict_all(model.of_call("call", SOC, npu_ops.l2norm, {"x": x}), SOC)
    moved = prediction.loaded + prediction.stored
    assert prediction.label == "npu-model" and prediction.core == "vector"
    assert 2 * x.nbytes <= moved < 2.1 * x.nbytes
    assert prediction.us < prediction.low_us < prediction.likely_us < prediction.high_us
    assert prediction.limit_us < prediction.us and 0 < prediction.of_limit < 1
    assert prediction.programs == 8 and prediction.waves == 1


def test_a_launch_of_autograd_is_known_as_one():
    inputs = {"q": torch.empty(1, 8, 4, 64), "k": None, "cos": torch.empty(4, 64)}
    inputs["sin"] = inputs["cos"].clone()
    found = model.of_call("call", SOC, npu_ops.apply_rotary_pos_emb, inputs, ("q",))
    assert [launch.backward for launch in found] == [False, True]


def test_the_limit_of_a_launch_is_of_the_part_that_it_moves():
    """A kernel that copies 65536 elements has the same bound whatever its tensor's size."""
    x, out = (torch.empty(1 << 24) for _ in range(2))
    (launch,) = model.kernel_of_file(*ADD_KERNEL[:1], ADD_KERNEL[2], ADD_KERNEL[4], 16)
    whole = dataclasses.replace(launch, values=(x, x.clone(), out, *launch.values[3:]))
    found = [model.predict(each, SOC) for each in (launch, whole)]
    assert found[0].limit_us == found[1].limit_us


def test_each_kind_of_core_has_its_range():
    q = torch.empty(1, 64, 1, 128, dtype=torch.bfloat16)
    gates = torch.zeros(1, 64, 1)
    inputs = {"q": q, "k": q, "v": q, "g": gates, "beta": gates}
    launches = model.of_call("call", SOC, npu_ops.chunk_gated_delta_rule, inputs)
    found = {said.core: said for said in model.predict_all(launches, SOC)}
    assert set(found) == {"vector", "cube", "mixed"}
    for kind, said in found.items():
        factors = (each / said.us for each in (said.low_us, said.likely_us, said.high_us))
        assert tuple(factors) == pytest.approx(PRICES.within(kind))


def test_pytorch_computes_with_the_indices_that_a_kernel_writes():
    """The wrapper derives segment lengths from indices, so launches need their real values."""
    q = torch.empty(1, 8192, 2, 128, dtype=torch.bfloat16)
    gates = torch.zeros(1, 8192, 2)
    inputs = {"q": q, "k": q, "v": q, "g": gates, "beta": gates}
    launches = model.of_call("call", SOC, npu_ops.chunk_gated_delta_rule, inputs)
    ends = next(launch for launch in launches if launch.name == "ends_kernel")
    starts, chunks = (
        x.tolist() for x in ends.values if isinstance(x, torch.Tensor) and x.dtype == torch.int32
    )
    assert starts == sorted(starts) and (starts[0], starts[-1]) == (0, 8192)
    assert [64 * chunk for chunk in chunks] == starts[:-1]


def test_what_an_earlier_kernel_writes_is_not_known():
    lengths = torch.tensor([3, 5])
    assert _loader(set())(lengths[1:], 0) == 5
    assert _loader({lengths.untyped_storage().data_ptr()})(lengths, 0) is None
    assert _loader(set())(lengths.float(), 0) is None
    assert _loader(set())(lengths, 2) is None


def test_what_a_kernel_does_not_touch_it_does_not_write():
    """Pointers that a kernel gets but does not use count as inputs.

    Without norms, intra_kernel does not use q, k and `spans` (each chunk's tokens). The backward
    reads loop bounds from `spans`, so the model must keep their values.
    """
    q = torch.empty(1, 64, 1, 128, dtype=torch.bfloat16)
    gates = torch.zeros(1, 64, 1)
    inputs = {"q": q, "k": q, "v": q, "g": gates, "beta": gates}
    launches = model.of_call("call", SOC, npu_ops.chunk_gated_delta_rule, inputs, ("q",))
    intra = next(launch for launch in launches if launch.name == "intra_kernel")
    assert module_of(intra, SOC).pointers == ("input",) * 7 + ("output",) * 2
    said = {prediction.kernel for prediction in model.predict_all(launches, SOC)}
    assert "gradients_kernel" in said


def test_an_soc_without_costs_is_refused():
    with pytest.raises(ValueError, match="soc: got 'Ascend950PR_9579', needs one of Ascend910B1"):
        costs.of("Ascend950PR_9579")
    assert costs.of("Ascend910B4").family == "Ascend910B4"
    assert costs.of("Ascend910B4-1").memory == 2 * costs.of("Ascend910B4").memory


def run(*arguments):
    return CliRunner().invoke(app, ["model", *map(str, arguments)])


ADD_KERNEL = (
    f"{KERNELS}::add", "--signature", "x=*fp32:65536,y=*fp32:65536,out=*fp32:65536,n=i32:65536",
    "--constexpr", "BLOCK=4096", "--grid", 16,
)  # fmt: skip


def test_the_command(tmp_path):
    trace = tmp_path / "trace.json"
    done = run(*ADD_KERNEL, "--json", "--trace", trace)
    assert done.exit_code == 0, done.output
    (found,) = json.loads(done.output)
    assert found["label"] == "npu-model" and found["programs"] == 16
    assert (found["loaded"], found["stored"]) == (2 * 65536 * 4, 65536 * 4)
    events = json.loads(trace.read_text())["traceEvents"]
    assert {event.get("tid") for event in events} >= {"vector.MTE2", "vector.V", "vector.MTE3"}
    assert "npu-model" in events[0]["args"]["name"]


def test_the_command_says_that_it_is_a_model():
    assert "npu-model: predicted from the compiled kernel, not measured" in run(*ADD_KERNEL).output


def test_the_command_takes_one_case_and_counts_what_pytorch_launches_beside():
    done = run("gdn_gate")
    case = cases.of("gdn_gate").REPRESENTATIVE[0]
    assert f"npu-ops: {case}" in done.stderr and "--all predicts every one" in done.stderr
    assert done.stdout.count("_gdn_gate_kernel") == 1
    assert re.search(r"in addition \d+ launches of PyTorch, at least \d+\.\d us: ", done.stdout)


def test_what_pytorch_launches_beside():
    x = torch.ones(4, 8)
    assert beside(SOC, lambda x: (x.t() + 1).sum(), {"x": x}) == {"add.Tensor": 1, "sum": 1}


def test_a_wrong_case_shows_a_few_names():
    done = run("rope", "--case", "qwen3-4b")
    assert done.exit_code == 2 and "qwen3-4b-tp1-t1," in done.stderr
    assert done.stderr.count(",") < 8 and "(of " in done.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nothing"], "target: got 'nothing', needs one of attention"),
        (["rope", "--case", "x"], "case: got 'x', needs one of"),
        (["rope", "--case", "qwen3-4b-tp1-t1", "--soc", "Ascend950PR_9579"], "soc: got"),
        (
            [ADD_KERNEL[0], "--signature", "x=*fp32"],
            "signature: got 'x=*fp32', needs name=type:value",
        ),
        ([*ADD_KERNEL, "--trace", "/nowhere/t.json"], "--trace: got '/nowhere/t.json'"),
    ],
)
def test_bad_input_is_named(arguments, says):
    done = run(*arguments)
    assert done.exit_code == 2 and says in done.output


DECORATED = KERNELS.with_name("decorated.py")
PLANES = (f"{DECORATED}::planes", "--signature", "x=*fp32:65536,n=i32:65536", "--constexpr",
          "BLOCK=4096")  # fmt: skip


def test_a_grid_of_several_axes():
    (found,) = json.loads(run(*PLANES, "--grid", "4,4,1", "--json").output)
    assert found["programs"] == 16 and found["case"] == "grid 4 x 4 x 1"
    assert (found["loaded"], found["stored"]) == (65536 * 4, 65536 * 4)


@pytest.mark.parametrize("grid", ["16", "1"])
def test_an_axis_that_is_not_given_is_asked_for(grid):
    """The kernel would read 0 for a missing axis, so the time would be another launch's."""
    done = run(*PLANES, "--grid", grid)
    assert done.exit_code == 2
    assert f"--grid: got {grid!r}, needs 2 numbers: planes uses program_id" in done.output


@pytest.mark.parametrize("grid", ["", "0", "1,2,3,4", "-1", "x", "4,", "1.5"])
def test_a_grid_that_is_none(grid):
    done = run(*PLANES, "--grid", grid)
    assert done.exit_code == 2 and f"--grid: got {grid!r}, needs one to three" in done.output


def test_each_configuration_of_an_autotuner_is_predicted():
    signature = "x=*fp32:65536,scale=*fp32:65536,out=*fp32:65536,n=i32:65536"
    done = run(f"{DECORATED}::scaled", "--signature", signature, "--grid", 16, "--json")
    cases = [row["case"] for row in json.loads(done.output)]
    assert [case.partition(",")[0] for case in cases] == ["BLOCK=512", "BLOCK=4096"]
    assert all(case.endswith(", grid 16") for case in cases)


def test_a_configuration_that_does_not_compile_is_left_out():
    signature = "x=*fp32:65536,n=i32:65536,step=i32:64"
    target = f"{DECORATED}::sizes", "--signature", signature, "--grid", 4, "--json"
    done = run(*target)
    (found,) = json.loads(done.stdout)
    assert found["case"] == "BLOCK=512, grid 4"
    assert "BLOCK=262144, grid 4: does not compile" in done.stderr and "ub overflow" in done.stderr
    done = run(*target, "--constexpr", "BLOCK=262144")
    assert done.exit_code == 2 and "ub overflow" in done.stderr and not done.stdout


def test_a_mixed_kernel():
    size = 256
    tensors = f"a=*bf16:{size * size},b=*bf16:{size * size},c=*fp32:{size * size}"
    launch = model.kernel_of_file(
        f"{KERNELS}::matmul", f"{tensors},M=i32:{size},N=i32:{size},K=i32:{size}",
        "BM=64,BN=64,BK=64", (4, 4),
    )  # fmt: skip
    (prediction,) = model.predict_all(launch, SOC)
    assert prediction.core == "mixed" and prediction.shares["cube.M"] > 0
    assert prediction.high_us == pytest.approx(PRICES.range_mixed[2] * prediction.us)
