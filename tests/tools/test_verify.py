"""`npu-ops verify`, and its report on faulty kernels."""

import contextlib
import json
import queue
import types
from unittest import mock

import pytest
import torch
from npu_ops_tools import verify
from npu_ops_tools.verify import checks, compare, guards, jobs, report, runs, worker
from npu_ops_tools.verify import ranks as two_ranks
from npu_ops_tools.where import ops
from test_cli import call, command
from torch.utils._python_dispatch import TorchDispatchMode
from verify_faults import faulty, job, ranks, width

from npu_ops.core import cases, hardware, preferences, rng
from npu_ops.core.registry import Table, launched_by

LIMIT = 12.0
pytestmark = pytest.mark.xdist_group("verify")  # tests share `with_faults`
FAULTS = {  # case of l2norm: (what the kernel does, what the report says)
    "odd-t1-d7-behind0": ("time.sleep(1000)", "hung: no answer in 12 s, during bounds: l2norm"),
    "one-head": ("os.abort()", "crashed: the process died of SIGABRT during bounds: l2norm"),
    "odd-t63-d60-behind5": ("out.view(-1)[77] += 0.1", "values: output 0: error ratio"),
    "odd-t65-d129-behind0": (
        "ctypes.memset(out.data_ptr() + out.nbytes, 0, 4)",
        "bounds: l2norm: 4 bytes behind out were overwritten, up to 4 bytes away",
    ),
    "odd-t131-d256-behind0": (
        "ctypes.memset(out.data_ptr() - 8, 0, 2)",
        "bounds: l2norm: 2 bytes before out were overwritten, up to 8 bytes away",
    ),
    "wide-2048": ("x[0, 0, 0] = 0", "of the memory of x outside the outputs were overwritten"),
    "wide-4096": (
        "out.view(-1)[5] *= 1 + 2**-7 * (next(calls) % 2)",
        "determinism: run 2 differs from run 1 in 1 elements of output 0",
    ),
    "one-element": ("raise RuntimeError('no such stream')", "RuntimeError: no such stream"),
}
RIGHT = "qwen3-next-dense-t64"  # a case without a fault


@pytest.fixture(scope="module")
def with_faults(tmp_path_factory):
    """Return the report of a run with every fault."""
    folder = tmp_path_factory.mktemp("verify")
    faults = {width(case): code for case, (code, _) in FAULTS.items()}
    (folder / "faulty.py").write_text(faulty("cpu", faults))
    planned = [job(case) for case in (*FAULTS, RIGHT)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(folder), prepend=":")
        patch.setattr(jobs, "plan", lambda *args: {"l2norm": planned})
        patch.setattr(runs._Run, "_ranks", lambda self: ranks("right"))
        options = verify.Options("cpu", limit=LIMIT, budget=3600, modules=("faulty",))
        return report.scrubbed(verify.run(options, folder / "report", lambda line: None))


@pytest.mark.parametrize("case", FAULTS)
def test_a_fault_is_reported_by_name(case, with_faults):
    (found,) = (r for r in report.wrong(with_faults) if r["case"] == case)
    assert found["name"] == f"l2norm by cpu, {case} in bfloat16"
    assert FAULTS[case][1] in found["why"]


def test_what_is_right_is_right_after_all_that(with_faults):
    others = [r for r in with_faults["results"] if r["verdict"] != "wrong"]
    assert [r.get("case", r["kind"]) for r in others] == [RIGHT, "ranks"]
    assert all(r["verdict"] == "right" for r in others)
    checks = {name: check["verdict"] for name, check in others[0]["checks"].items()}
    missing = {"streams": "not here", "graphs": "not here"}
    assert checks == dict.fromkeys(("bounds", "values", "determinism"), "right") | missing


def test_a_rank_with_another_table_is_reported_by_name(tmp_path):
    rows = [dict(zip(("op", "dtype", "width", "bits", "implementation"), row, strict=True))
            for row in [("l2norm", "float32", 8, 6, "reference")]]  # fmt: skip
    name = preferences.file_name(preferences.soc_of("cpu"))
    (tmp_path / name).write_text(json.dumps({"format": preferences.FORMAT, "rows": rows}))
    (tmp_path / "other_table.py").write_text(
        "import pathlib, sys\nfrom npu_ops.core import preferences\n"
        "own = pathlib.Path(__file__).parent if sys.argv[2] == '1' else None\n"
        "preferences.cache = lambda: own\n"
    )
    variables = {"PYTHONPATH": str(tmp_path)}
    found = two_ranks.run("cpu", ["other_table"], variables, limit=300)
    assert found["verdict"] == "wrong"
    assert "preferences: ranks" in found["why"] and "have different tables for cpu" in found["why"]


def test_the_page_has_all_of_it_and_loads_nothing(with_faults):
    page = report.page(with_faults)
    assert "8 wrong" in page
    assert all(case in page for case in FAULTS)
    assert "http" not in page and "src=" not in page
    # tables scroll on a phone
    assert page.count("<table") == page.count('<div class="wide"><table') > 1


def test_a_quick_run_by_the_command(tmp_path):
    """The command runs two ranks, times calls, writes both files, and names no host or user."""
    arguments = ("--device", "cpu", "--only", "l2norm", "--minutes", 60, "--output", tmp_path)
    said = command("verify", *arguments)
    assert "0 wrong" not in said and "right    two ranks" in said
    found = report.read(tmp_path / "verify.json")
    assert report.counts(found) == {"right": len(jobs.plan("cpu", False, ["l2norm"])["l2norm"]) + 1}
    times = [r["times"] for r in found["results"] if r.get("times")]
    assert times and all(t["forward"]["p20"] <= t["forward"]["p50"] for t in times)
    assert not (tmp_path / "verify.journal").exists()
    call("report", tmp_path / "verify.json", "--output", tmp_path / "again")
    assert (tmp_path / "again/verify.html").read_text() == (tmp_path / "verify.html").read_text()
    text = (tmp_path / "verify.json").read_text() + (tmp_path / "verify.html").read_text()
    assert report._scrubbed(text) == text


@pytest.mark.slow
def test_a_quick_run_on_the_emulated_npu(tmp_path):
    command("verify", "--device", "npu-emulated", "--quick", "--output", tmp_path)
    found = report.read(tmp_path / "verify.json")
    (last,) = (r for r in found["results"] if r["kind"] == "ranks")
    assert last["verdict"] == "right"
    reached = {r["op"] for r in found["results"] if r["verdict"] == "right" and r is not last}
    assert reached and not any(r.get("times") for r in found["results"])


# The plan of the checks


@pytest.mark.parametrize("device", jobs.DEVICES)
def test_a_plan_has_every_op_and_implementation(device):
    quick, full = jobs.plan(device, False, []), jobs.plan(device, True, [])
    assert quick.keys() == full.keys() == ops().keys()
    kind = jobs.torch_device(device)
    for op, members in quick.items():
        wanted = {i.name for i in Table.tables[op].implementations
                  if not i.devices or kind in i.devices}  # fmt: skip
        assert {one.implementation for one in members} == wanted
        assert any(one.kind == "time" for one in members) == (device != "npu-emulated")
        assert len({one.name for one in full[op]}) == len(full[op]) > len(members)


def test_what_is_not_there_is_refused():
    with pytest.raises(ValueError, match="device: got 'tpu'"):
        jobs.plan("tpu", False, [])
    with pytest.raises(ValueError, match="only: got l3norm"):
        jobs.plan("cpu", False, ["l3norm"])


# The journal of finished checks


def test_a_journal_keeps_what_was_done(tmp_path):
    path, key = tmp_path / "journal", {"device": "cpu"}
    first = runs.Journal(path, key)
    first.begin("a")
    first.finish("a", {"verdict": "right"})
    first.begin("b")
    first.interrupt("b")
    first.begin("c")  # the machine stops here
    first.close(remove=False)
    path.write_text(path.read_text() + '{"what": "fin')
    again = runs.Journal(path, key)
    assert again.done.keys() == {"a", "c"}
    assert again.done["c"]["why"].startswith("interrupted: verify or the machine")
    assert runs.Journal(path, {"device": "npu"}).done == {}


def test_each_run_gets_further(tmp_path, monkeypatch):
    """Each run within a short time limit continues the last one and repeats nothing."""
    ran = []

    class Worker:
        environment = {"machine": {}}

        def __init__(self, *settings):
            self.start = self.stop = lambda: None

        def do(self, one, limit):
            ran.append(one.name)
            return {"verdict": "right", "why": "", "seconds": 0.0}

    planned = [job(case) for case in (RIGHT, "one-head", "wide-4096")]
    monkeypatch.setattr(jobs, "plan", lambda *args: {"l2norm": planned})
    monkeypatch.setattr(runs.worker, "Worker", Worker)
    monkeypatch.setattr(runs._Run, "_ranks", lambda self: ranks("right"))
    options = verify.Options("cpu", budget=1e-9)
    for reached in (1, 2, 3):
        found = verify.run(options, tmp_path, lambda line: None)
        assert report.counts(found).get("not reached", 0) == 3 - reached
    assert ran == [one.name for one in planned]
    assert not (tmp_path / "verify.journal").exists()


# Bounds


def test_guards_see_reads_too():
    """Memory beside each tensor is NaN, so reads past it show; results reach the caller."""
    found = []
    table = Table.tables["l2norm"]
    x = torch.randn(4, 1, 8, dtype=torch.float32)
    out, seen = torch.empty_like(x), []

    def launch(table, chosen, args):
        x, eps, out = args
        beside = x.as_strided((1,), (1,), x.storage_offset() + x.numel())
        seen.append(float(beside))
        out.copy_(x)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Table, "launch", launch)
        with guards.guarded(found, seen.append):
            table.run(x, 1e-6, out)
    assert seen[0] == "l2norm" and seen[1] != seen[1] and found == []
    assert torch.equal(out, x)


# Graphs


class Backend:
    """A CPU stand-in for a device with graphs. A replay computes again, unless `frozen`."""

    NPUGraph = types.SimpleNamespace
    Stream = mock.MagicMock
    stream = contextlib.nullcontext
    current_stream = synchronize = mock.MagicMock()

    def __init__(self, subject, frozen):
        self.subject, self.frozen = subject, frozen

    @contextlib.contextmanager
    def graph(self, graph):
        outcome, captured = checks.Subject.outcome, []

        def capture(inputs):
            captured[:] = [inputs, outcome(self.subject, inputs)]
            return captured[1]

        def replay():
            if not self.frozen:
                for out, again in zip(captured[1], outcome(self.subject, captured[0]), strict=True):
                    out.copy_(again)

        graph.replay, self.subject.outcome = replay, capture
        yield
        del self.subject.outcome


@pytest.mark.parametrize("frozen", [False, True])
def test_a_graph_must_compute_again(frozen, monkeypatch):
    subject = checks.Subject(job(RIGHT), torch.device("cpu"))
    monkeypatch.setattr(torch, "npu", Backend(subject, frozen), raising=False)
    monkeypatch.setattr(hardware, "npu_why_not", lambda: "there is none")
    on_cpu, subject.device = subject.device, types.SimpleNamespace(type="npu")
    subject.inputs = lambda seed=0: subject.case.inputs(torch.bfloat16, on_cpu, seed)
    found = checks.graphs(subject)
    assert found["verdict"] == ("wrong" if frozen else "right")
    assert ("when the graph is replayed with other inputs" in found["detail"]) == frozen


def test_what_drops_takes_nothing_from_the_host():
    """A capture refuses copies from the host, so dropout's seed must be made on the device."""

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    seen = []
    with checks.one_mask(), Seen():
        state = rng.new_state(torch.device("cpu"), None)
    assert seen == ["aten.arange.start_step"] and state.tolist() == [3, 5]


# Reports


@pytest.mark.parametrize("op", ops())
def test_an_implementation_runs_every_operator_of_its_op(op):
    """For each public function, forward and backward."""
    launch, chosen = Table.launch, {}

    def noted(table, implementation, arguments):
        chosen[table.op] = implementation.name
        launch(table, implementation, arguments)

    functions = {cases.function(op, case): case for case in jobs.representative(op)}
    for case in functions.values():
        named = jobs.Job("check", op, "reference", case.name, "float32", tokens=jobs.few(case))
        with launched_by(noted):
            checks.Subject(named, torch.device("cpu")).results()
    mine = {name: by for name, by in chosen.items() if Table.tables[name].folder == op}
    assert len(mine) >= len(functions) and set(mine.values()) == {"reference"}


def test_reports_have_no_names(monkeypatch, tmp_path):
    monkeypatch.setattr(report.socket, "gethostname", lambda: "node17")
    monkeypatch.setattr(report.getpass, "getuser", lambda: "wanda")
    home = "/".join(["", "home", "wanda"])
    text = f"node17 of wanda: {home}/x at 10.0.0.7, Wandas"
    assert report.scrubbed({"a": [text, 3, None]}) == {
        "a": ["<host> of <user>: ~/x at <address>, Wandas", 3, None]
    }


def test_what_is_no_report_is_refused(tmp_path):
    path = tmp_path / "a.json"
    for text in ("nothing", "[]"):
        path.write_text(text)
        with pytest.raises(ValueError, match="a.json: got"):
            report.read(path)


def timed(p20, p50, p80, verdict="right", name="a"):
    times = {"forward": {"p20": p20, "p50": p50, "p80": p80}}
    return {"name": name, "verdict": verdict, "times": times}


def made(*results, torch_="2.13"):
    environment = {"npu_ops": "1", "machine": {}, "packages": {"torch": torch_}}
    return {"format": 1, "device": "cpu", "environment": environment, "results": list(results)}


def test_what_was_not_reached_is_said(with_faults):
    late = {"verdict": "not reached", "why": "", "seconds": 0.0, "kind": "check", "op": "rope"}
    late |= {"implementation": "cpu", "name": "rope by cpu", "case": "x", "dtype": "float32"}
    found = with_faults | {"results": [*with_faults["results"], late]}
    assert report.unknown(found) == ["rope by cpu"]
    assert "1 of 11 were not reached" in report.page(found)


def test_compare(tmp_path):
    before = made(timed(9, 10, 11), timed(1, 1, 1, "wrong", "b"), timed(1, 2, 9, name="c"))
    after = made(
        timed(19, 20, 21), timed(1, 1, 1, "right", "b"), timed(2, 3, 4, "wrong", "c"), torch_="2.14"
    )
    found = compare.compare(before, after)
    assert found["environment"] == {"torch": ("2.13", "2.14")}
    assert (found["newly wrong"], found["newly right"]) == (["c"], ["b"])
    assert found["times"]["a"] == {"ratio": 2.0, "apart": True}
    assert not found["times"]["c"]["apart"]
    paths = [tmp_path / "a.json", tmp_path / "b.json"]
    for path, one in zip(paths, (before, after), strict=True):
        path.write_text(json.dumps(one))
    said = call("verify", "--compare", *paths, code=1)
    assert "slower: a: 2.00 times the old time" in said and "newly wrong: c" in said
    call("verify", "--compare", paths[0], paths[0])


def test_what_torch_npu_prints_as_it_is_imported_is_no_answer():
    said = queue.SimpleQueue()
    worker._read(["Warning: ASCEND_HOME_PATH environment variable is not set.\n", "{}\n"], said)
    assert [said.get(), said.get()] == ["{}\n", None] and said.empty()
