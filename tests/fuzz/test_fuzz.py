"""Fuzzes the public functions, and tests that the fuzzer finds and reproduces injected faults."""

import inspect
import json
import os
import signal

import pytest
import torch

import npu_ops
from fuzz import run
from fuzz.child import Child
from fuzz.judge import judge
from fuzz.targets import TARGETS
from npu_ops.core import preferences
from npu_ops.ops.l2norm import op

NOT_CALLED_WITH_TENSORS = {
    "__version__", "build_info", "explain", "is_npu", "plan_attention", "AttentionPlan",
    "AttentionSpec", "unfinished_rows",
}  # fmt: skip


pytestmark = pytest.mark.xdist_group("fuzz")  # the tests share one child process
EXAMPLES = 80  # per function


@pytest.fixture(scope="module")
def child():
    child = Child()
    yield child
    child.stop()


def test_every_public_function_has_a_formula_of_the_same_arguments():
    assert TARGETS.keys() == set(npu_ops.__all__) - NOT_CALLED_WITH_TENSORS
    elsewhere = {"cu_seqlens_cpu", "seqlens_k_cpu", "chunk_indices", "carry_unfinished"}
    for name in TARGETS:
        public, own = (
            inspect.signature(of).parameters.keys()
            for of in (getattr(npu_ops, name), TARGETS[name].formula)
        )
        assert public - own <= elsewhere and own - public <= {"keep"}, name


@pytest.mark.parametrize("function", TARGETS)
def test_fuzz(function, child):
    """A failure prints the command that reproduces it. To search further: `npu-ops fuzz`."""
    search = run.Search(child, shrinking=10.0)
    found = search.of(function, EXAMPLES, None)
    assert not found, "\n".join(map(str, found))


# The fuzzer finds injected faults


def case(function="l2norm", **changes):
    return run.complete({"function": function, "settings": {"shape": [3]}} | changes)


def plus(amount):
    """Return an l2norm whose result is off by `amount`."""

    def call(x, eps=1e-6, output_dtype=None, *, dim=-1):
        return op.forward(x, eps, output_dtype or x.dtype) + amount

    return call


def remembers(x, eps=1e-6, output_dtype=None, *, dim=-1, known={}):  # noqa: B006
    """A wrong l2norm that caches its result by the input's address and version."""
    key = x.data_ptr(), x._version
    if key not in known:
        known.clear()
        known[key] = op.forward(x, eps, x.dtype)
    return known[key].clone()


def writes(x, eps=1e-6, output_dtype=None, *, dim=-1):
    out = op.forward(x, eps, x.dtype)
    x.detach().view(-1)[-1:].zero_()
    return out


def writes_beside(x, eps=1e-6, output_dtype=None, *, dim=-1):
    torch.as_strided(x.detach(), (1,), (1,), x.storage_offset() - 1).zero_()
    return op.forward(x, eps, x.dtype)


def in_default_dtype(x, eps=1e-6, output_dtype=None, *, dim=-1):
    return op.forward(x, eps, x.dtype) * torch.ones(1)


def without_gradient(x, eps=1e-6, output_dtype=None, *, dim=-1):
    return op.forward(x, eps, x.dtype).detach() + 0 * x


def raises(error):
    def call(x, eps=1e-6, output_dtype=None, *, dim=-1):
        raise error

    return call


BROKEN = {
    "off by 0.01": (plus(0.01), {}, "output 0: off by 0.01, 12 of 12"),
    "off by a few roundings": (plus(1e-5), {}, "output 0: off by 1e-05"),
    "NaN": (plus(float("nan")), {}, "output 0: NaN where the formula has numbers"),
    "stale": (remembers, {"rewrite": "numpy"}, "output 0: off by"),
    "writes its input": (writes, {}, "1 elements of or beside x were written"),
    "writes beside": (writes_beside, {"forms": ["inside"]}, "1 elements of or beside x"),
    "default device": (
        in_default_dtype, {"defaults": ["float32", "meta", "set"]}, "RuntimeError: ",
    ),
    "wrong gradient": (without_gradient, {"grad": True}, "gradient of x: off by"),
    "torch's error": (raises(RuntimeError("shapes differ")), {}, "RuntimeError: shapes differ"),
    "no argument": (raises(ValueError("bad")), {}, "ValueError that names no argument: bad"),
    "refused": (raises(ValueError("x: got 1, needs 2")), {}, "refused, though it has an answer"),
}  # fmt: skip


@pytest.mark.parametrize("what", BROKEN)
def test_it_finds(what, monkeypatch):
    broken, changes, verdict = BROKEN[what]
    assert judge(case(**changes)) is None
    monkeypatch.setattr(npu_ops, "l2norm", broken)
    assert (judge(case(**changes)) or "").startswith(verdict)


def test_it_finds_wrong_indices_that_are_accepted(monkeypatch):
    settings = {"shape": [], "lengths": [2, 3], "activation": "silu"}
    wrong = run.complete({
        "function": "causal_conv1d", "settings": settings, "malformed": [0, ["long"]],
    })  # fmt: skip
    assert judge(wrong) is None
    right = npu_ops.causal_conv1d
    monkeypatch.setattr(
        npu_ops, "causal_conv1d", lambda x, *a, cu_seqlens, **kw: right(x, *a, **kw)
    )
    assert judge(wrong) == "accepted, though cu_seqlens has no meaning"


def test_it_finds_a_last_bit_that_depends_on_other_sequences(monkeypatch):
    settings = {"shape": [], "lengths": [2, 3]}
    packed = run.complete({"function": "causal_conv1d", "settings": settings, "way": "alone"})
    assert judge(packed) is None
    right = npu_ops.causal_conv1d

    def depends(x, *args, cu_seqlens, **settings):
        y, state = right(x, *args, cu_seqlens=cu_seqlens, **settings)
        return (y if cu_seqlens is None else y * (1 + 2.0**-23)), state

    monkeypatch.setattr(npu_ops, "causal_conv1d", depends)
    assert judge(packed) == "output 0 of sequence 0 has other bits alone"


def test_it_finds_what_is_taken_for_a_table(monkeypatch):
    """The fault: preference files are read without checks."""
    seeds = [seed for seed in range(12) if judge(case(way="preferred", seed=seed)) is None]
    assert len(seeds) == 12
    unchecked = lambda path: json.loads(path.read_text()) if path.is_file() else {"rows": []}  # noqa: E731
    monkeypatch.setattr(preferences, "read", unchecked)
    found = [judge(case(way="preferred", seed=seed)) for seed in seeds]
    assert sum("file of preferences" in (verdict or "") for verdict in found) >= 2


def test_it_finds_ranks_that_are_ignored(monkeypatch):
    wrong = run.complete({
        "function": "causal_conv1d", "settings": {"ranks": "other"},
    })  # fmt: skip
    assert judge(wrong) is None
    right = npu_ops.causal_conv1d
    monkeypatch.setattr(
        npu_ops, "causal_conv1d", lambda x, *a, cp_group, cp_layout, **kw: right(x, *a, **kw)
    )
    assert judge(wrong) == "accepted, though cp_layout has no meaning"


def test_a_process_that_dies_is_a_verdict_and_the_next_case_has_another(child):
    assert child.judge(case()) is None
    os.kill(child.process.pid, signal.SIGKILL)
    assert child.judge(case()) == "the process died: SIGKILL"
    assert child.judge(case()) is None


def test_a_line_repeats_a_case():
    line = run.repeating(case(forms=["fused"], seed=3))
    assert line == (
        """npu-ops fuzz --repeat '{"function":"l2norm","settings":{"shape":[3]},"""
        """"seed":3,"forms":["fused"]}'"""
    )
    assert run.complete(run.short(case(seed=3))) == case(seed=3)


def test_torch_makes_no_dual_of_expanded_memory():
    """The reason why `judge` clones expanded inputs of transforms.

    If this test fails, the clones can go.

    torch gives a tangent the strides of its primal before it calls any function, and cannot write
    to expanded memory.
    """
    x = torch.randn(1, 4).expand(3, 4)
    tangent, called = torch.randn(3, 4), []
    with pytest.raises(RuntimeError, match="refers to a single memory location"):
        torch.func.jvp(called.append, (x,), (tangent,))
    with torch.autograd.forward_ad.dual_level():
        with pytest.raises(RuntimeError, match="refers to a single memory location"):
            torch.autograd.forward_ad.make_dual(x, tangent)
    assert not called
