"""Run the test files in the folder `inside` on the emulated NPU, in new processes."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import textwrap

import pytest
from emulated import PYTHON, ROOT, emulate
from npu_ops_emulator import headers

INSIDE = pathlib.Path(__file__).parent / "inside"
MEGATRON = ROOT / ".cache" / "megatron" / "0.17.1"


def python(code: str, *options: str, **variables):
    return emulate(sys.executable, "-c", textwrap.dedent(code), options=options, **variables)


def pytest_inside(*names: str, options=(), **variables):
    """Run test files of the folder `inside` on the emulated NPU, in one process.

    A process takes six seconds to import torch and npu-ops, so tests share one if they can.
    """
    # Do not capture file descriptors: messages of a process that dies in a test would be lost.
    return emulate(
        sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--capture=sys",
        *(str(INSIDE / f"{name}.py") for name in names), options=options, **variables,
    )  # fmt: skip


def torchrun(ranks, name, *arguments, **variables):
    """Run a file of `inside` on this number of NPUs, with one process each."""
    return emulate(
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks),
        str(INSIDE / name), *arguments, options=["--devices", str(ranks)], OMP_NUM_THREADS="1",
        **variables,
    )  # fmt: skip


@pytest.mark.parametrize(
    "queue", ["1", *(pytest.param(queue, marks=pytest.mark.slow) for queue in "20")]
)
def test_aten(queue):
    done = pytest_inside("aten", TASK_QUEUE_ENABLE=queue)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(headers.why_not() is not None, reason=str(headers.why_not()))
def test_ascendc_kernels():
    done = pytest_inside("ascendc", "tools")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.skipif(headers.why_not() is not None, reason=str(headers.why_not()))
def test_ascendc_kernels_on_random_calls():
    path = os.pathsep.join(map(str, (ROOT, PYTHON, ROOT / "tests")))
    done = pytest_inside("ascendc_sweep", PYTHONPATH=path, seconds=3600)
    assert done.returncode == 0, done.stdout + done.stderr


def test_operators():
    done = pytest_inside("rope", "norm", "attention", "delta", "moe", "loss", "npu_ops_calls")
    assert done.returncode == 0, done.stdout + done.stderr


def test_models_of_transformers():
    done = pytest_inside("transformers_qwen")
    assert done.returncode == 0, done.stdout + done.stderr


def test_triton_kernels_and_wrong_index_values_leave_no_tensor():
    path = os.pathsep.join(map(str, (ROOT, PYTHON, ROOT / "tests", ROOT / "tests" / "ops")))
    done = pytest_inside(
        "triton_kernels",
        "microbenchmarks",
        "index_values",
        options=["--check-bounds"],
        PYTHONPATH=path,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_collectives(ranks):
    done = torchrun(ranks, "collectives.py")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("all collectives are right") == ranks


def test_context_parallel():
    path = os.pathsep.join(map(str, (ROOT, PYTHON, ROOT / "tests" / "ops")))
    done = torchrun(2, "context_parallel.py", PYTHONPATH=path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("as on one rank") == 2


@pytest.mark.parametrize("fault", ["killed", pytest.param("mismatch", marks=pytest.mark.slow)])
def test_broken_collective_ends_with_a_sentence(fault):
    done = emulate(
        sys.executable, str(INSIDE / "broken_collective.py"), fault, options=["--devices", "2"]
    )
    assert done.returncode != 0
    sentence = {"killed": "died while rank 0 waits in all_reduce", "mismatch": "ranks disagree"}
    assert sentence[fault] in done.stderr, done.stdout + done.stderr


def test_megatron_trains_and_two_ranks_equal_one():
    """A GPTModel with our Triton kernels: on one rank, with tensor and with context parallelism."""
    assert MEGATRON.exists(), "run tests/adapters/fetch_megatron.py"
    path = os.pathsep.join(map(str, (ROOT, PYTHON, MEGATRON)))
    done = torchrun(2, "megatron_training.py", PYTHONPATH=path)
    assert done.returncode == 0, done.stdout + done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    alone, *others = (result["losses"] for result in found)
    assert len(others) == 2
    assert alone[-1] < alone[0]
    assert all(losses == pytest.approx(alone, rel=1e-5) for losses in others)
    ours = {"_rope_kernel", "_bias_dropout_add_kernel"}
    assert all(ours <= set(result["kernels"]) for result in found), found


def test_autoload_and_options():
    done = python(
        """
        import json, torch
        info = torch.npu.get_device_properties(0)
        print(json.dumps([torch.npu.device_count(), info.name, info.total_memory,
                          info.cube_core_num]))
        """,
        "--devices", "3", "--soc", "Ascend910_9391", "--memory-gib", "0.5",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [3, "Ascend910_9391", 1 << 29, 24]


@pytest.mark.parametrize("named, count", [("2,0,7,1", 2), ("", 0)])
def test_visible_devices(named, count):
    """Ray sets ASCEND_RT_VISIBLE_DEVICES for each worker."""
    done = python(
        """
        import torch
        count = torch.npu.device_count()
        print(count, torch.npu.is_available(), *(torch.ones(1).npu(i).device for i in range(count)))
        """,
        "--devices", "3", ASCEND_RT_VISIBLE_DEVICES=named,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    devices = [f"npu:{i}" for i in range(count)]
    assert done.stdout.split() == [str(count), str(count > 0), *devices]


@pytest.mark.parametrize("soc", ["Ascend910B1", "Ascend950PR_9579"])
def test_other_chips(soc):
    done = python(
        """
        import torch
        print(torch.npu.get_device_name(), torch.ones(3, device="npu").sum())
        """,
        "--soc",
        soc,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{soc} tensor(3.")


def test_in_process():
    code = """
    import npu_ops_emulator
    npu_ops_emulator.install(npu_ops_emulator.Settings(devices=1))
    import torch, torch_npu
    print(torch.npu.device_count(), (torch.ones(3).npu() + 1).tolist())
    npu_ops_emulator.install()
    npu_ops_emulator.install(npu_ops_emulator.Settings(devices=1))
    try:
        npu_ops_emulator.install(npu_ops_emulator.Settings(devices=3))
    except npu_ops_emulator.EmulatorError as error:
        print(error)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env=os.environ | {"PYTHONPATH": str(PYTHON)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "1 [2.0, 2.0, 2.0]" in done.stdout
    assert "this process already has Settings(devices=1, " in done.stdout


@pytest.mark.parametrize("first", ["torch", "npu_ops_emulator.triton_driver", "npu_ops"])
def test_triton_is_ours_however_it_is_imported(first):
    done = python(
        f"""
        import importlib.util
        import {first}
        assert importlib.util.find_spec("triton") and importlib.util.find_spec("triton")
        import os
        from triton.runtime import driver
        print(type(driver.active).__module__, os.environ["ASCEND_UB_CAPACITY_BITS"])
        """
    )
    expected = f"npu_ops_emulator.triton_driver {192 * 1024 * 8}"
    assert expected in done.stdout, done.stdout + done.stderr


def test_ordinary_environment_is_untouched():
    code = "import torch; print(hasattr(torch, 'npu'))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "False", done.stderr


def test_failure_in_the_task_queue_ends_the_process():
    done = python(
        """
        import torch, torch_npu
        x = torch.ones(2, 3, device="npu")
        torch_npu.npu_swiglu(x)
        print("not reached" if torch.npu.synchronize() is None else "")
        """,
        TASK_QUEUE_ENABLE="2",
    )
    assert done.returncode not in (0, -signal.SIGSEGV)
    assert "not reached" not in done.stdout
    assert "aclnnSwiGlu: x: dimension -1 is 3, needs an even size" in done.stderr


def test_values_that_read_other_memory():
    """A device reads values only when it computes, so aclnn's first phase must not check them."""
    calls = {
        # torch ignores this label; the device would read memory before the row.
        "npu_cross_entropy_loss(x, torch.tensor([0, 2, -100]).npu())": "a label outside [0, 4)",
        "npu_cross_entropy_loss(x, torch.tensor([0, 2, -1]).npu())": "a label outside [0, 4)",
        "npu_moe_token_permute(x, torch.tensor([0, -1, 2]).npu())": "indices: got one outside",
        "npu_grouped_matmul([x.t()], [x], group_list=torch.tensor([2, 4]).npu(), split_item=3,"
        "group_type=2)": "a group that ends at 4 after one that ends at 2, needs 2 to 3",
        "npu_grouped_matmul([x], [x.t()[None].contiguous()], group_list=torch.tensor([4]).npu(),"
        "split_item=3, group_type=0)": "a group that ends at 4 after one that ends at 0",
    }
    done = python(
        f"""
        import json, torch, torch_npu
        x = torch.ones(3, 4).npu()
        for call in {list(calls)}:
            try:
                eval("torch_npu." + call)
            except RuntimeError as error:
                print(json.dumps(str(error)))
        """,
        TASK_QUEUE_ENABLE="0",
    )
    errors = done.stdout.splitlines()
    assert len(errors) == len(calls), done.stdout + done.stderr
    assert all(sentence in error for error, sentence in zip(errors, calls.values(), strict=True))


def test_operator_that_is_not_emulated():
    done = python(
        """
        import torch, torch_npu
        x = torch.ones(2, 3, 4, 4, device="npu")
        try:
            torch_npu.npu_geglu(x, -1, 1)
        except RuntimeError as error:
            print(error)
        """
    )
    assert "aclnnGeGlu" in done.stdout, done.stdout + done.stderr


def test_missing_compiler(tmp_path):
    code = "from npu_ops_emulator import build; build.compiler()"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": str(PYTHON), "CXX": "no-such-compiler"},
        capture_output=True,
        text=True,
    )
    assert "C++ compiler 'no-such-compiler' was not found" in done.stderr


def test_missing_wheel(tmp_path):
    done = emulate(
        "true", options=["--torch-npu", str(tmp_path / "none.whl")], XDG_CACHE_HOME=str(tmp_path)
    )
    assert done.returncode == 1
    assert "none.whl does not exist" in done.stderr


def test_status_says_what_is_built(tmp_path):
    done = emulate(options=["--status"])
    assert done.returncode == 0
    lines = dict(line.split(": ", 1) for line in done.stdout.splitlines())
    assert list(lines) == [
        "torch", "torch_npu", "library", "compiler", "triton-ascend", "AscendC headers",
        "ascendnpu-ir",
    ]  # fmt: skip
    done = emulate(options=["--status"], XDG_CACHE_HOME=str(tmp_path), CXX="no-such-compiler")
    assert "not installed yet" in done.stdout and "library: not built yet" in done.stdout
    assert "'no-such-compiler' was not found" in done.stdout


def test_commands_come_from_this_environment():
    """Also without `--`, and if PATH has another Python or none."""
    command = ["--devices", "1", "python", "-c", "import sys; print(sys.prefix)"]
    done = subprocess.run(
        [sys.executable, "-m", "npu_ops_emulator", *command],
        env=os.environ | {"PYTHONPATH": str(PYTHON), "PATH": os.defpath},
        capture_output=True,
        text=True,
    )
    assert done.stdout.strip() == sys.prefix, done.stderr


def test_arguments_are_checked():
    assert "needs a command after --" in emulate(options=[]).stderr
    assert "devices: got 0, needs 1 to 64" in emulate("true", options=["--devices", "0"]).stderr
    assert "soc: got 'H100'" in emulate("true", options=["--soc", "H100"]).stderr
