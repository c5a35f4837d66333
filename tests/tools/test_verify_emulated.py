"""`npu-ops verify --device npu-emulated`: l2norm, right and with faults, in a minute.

A few jobs of l2norm run in one process; its kernels are compiled, launched and judged like any
other. Faults that need separate processes (a hang, a crash, another rank) are in `test_verify.py`,
on the CPU. The slow test in that file covers every op and two ranks, in minutes.
"""

import pytest
from npu_ops_tools import verify
from npu_ops_tools.verify import jobs, report, runs
from verify_faults import faulty, job, ranks, width

pytestmark = pytest.mark.xdist_group("verify on the emulated NPU")  # shares one run
BY = "triton_ascend"
RIGHT = "qwen3-next-dense-t64"
FAULTS = {  # case of l2norm: (what the kernel does, what the report says)
    "one-head": ("out.view(-1)[77] += 0.1", "values: output 0: error ratio"),
    "one-element": (
        "torch.npu.synchronize(); ctypes.memset(out.data_ptr() + out.nbytes, 0, 4)",
        "bounds: l2norm: 4 bytes behind out were overwritten, up to 4 bytes away",
    ),
    "wide-4096": (
        "out.view(-1)[5] *= 1 + 2**-7 * (next(calls) % 2)",
        "determinism: run 2 differs from run 1 in 1 elements of output 0",
    ),
}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Return the report of one run."""
    folder = tmp_path_factory.mktemp("verify")
    faults = {width(case): code for case, (code, _) in FAULTS.items()}
    (folder / "faulty_kernel.py").write_text(faulty(BY, faults))
    planned = [job(RIGHT, BY), *(job(case, BY) for case in FAULTS), job(RIGHT, "reference")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(folder), prepend=":")
        patch.setattr(jobs, "plan", lambda *args: {"l2norm": planned})
        patch.setattr(runs._Run, "_ranks", lambda self: ranks("right"))
        options = verify.Options("npu-emulated", budget=3600, modules=("faulty_kernel",))
        return report.scrubbed(verify.run(options, folder / "report", lambda line: None))


@pytest.mark.parametrize("case", FAULTS)
def test_a_fault_is_reported_by_name(case, found):
    (one,) = (r for r in report.wrong(found) if r["case"] == case)
    assert one["name"] == f"l2norm by triton_ascend, {case} in bfloat16"
    assert FAULTS[case][1] in one["why"]


def test_what_is_right_is_right_and_has_no_times(found):
    others = [r for r in found["results"] if r["verdict"] != "wrong"]
    assert [(r["implementation"], r["verdict"]) for r in others[:-1]] == [
        (BY, "right"),
        ("reference", "right"),
    ]
    assert not any(r.get("times") for r in found["results"])
    checks = {name: check["verdict"] for name, check in others[0]["checks"].items()}
    here = ("bounds", "values", "determinism", "streams")
    assert checks == dict.fromkeys(here, "right") | {"graphs": "not here"}


def test_the_page_says_what_it_is_of(found):
    page = report.page(found)
    assert "3 wrong" in page and "npu-emulated" in page and "http" not in page
