"""Context parallelism: a sequence on several ranks gives the results of one rank."""

import pytest
import torch
from torch import distributed, multiprocessing

import npu_ops
from npu_ops.core import library, spans
from npu_ops.core.compare import Tolerance, assert_close
from npu_ops.ops.causal_conv1d import context_parallel

CLOSE = Tolerance(1e-5, 1e-5)
TOKENS = 75
PACKED = ([0, TOKENS], [0, 1, 1, 40, 43, 70], [0, 2, 30, 60, TOKENS], [0, 40, 58, 58])
DEALT = [0, 8, 8, 48, 72]
# By number of ranks: the first token of each rank, and the end. Some ranks have 2 tokens or none.
CUTS = {2: [0, 40, TOKENS], 4: [0, 2, TOKENS - 17, TOKENS - 17, TOKENS]}


def delta_rule(state_v_first, **inputs):
    settings = {"output_final_state": True, "chunk_size": 16, "state_v_first": state_v_first}
    settings["use_qk_l2norm_in_kernel"] = state_v_first
    return npu_ops.chunk_gated_delta_rule(**inputs, **settings)


def delta_rule_inputs(heads=1, value_heads=2, keys=16, values=24, batch=2):
    torch.manual_seed(0)
    return {
        "q": torch.nn.functional.normalize(torch.rand(batch, TOKENS, heads, keys), dim=-1),
        "k": torch.nn.functional.normalize(torch.rand(batch, TOKENS, heads, keys), dim=-1),
        "v": torch.randn(batch, TOKENS, value_heads, values),
        "g": -torch.rand(batch, TOKENS, value_heads) / 50,
        "beta": torch.rand(batch, TOKENS, value_heads),
    }


def convolution(activation, **inputs):
    return npu_ops.causal_conv1d(**inputs, activation=activation, output_final_state=True)


def convolution_inputs(width=4, channels=24, batch=2):
    torch.manual_seed(0)
    return {
        "x": torch.randn(batch, TOKENS, channels),
        "weight": torch.randn(channels, width),
        "bias": torch.randn(channels),
    }


CALLS = {
    "v first": (lambda **given: delta_rule(True, **given), delta_rule_inputs),
    "k first": (lambda **given: delta_rule(False, **given), delta_rule_inputs),
    "silu": (lambda **given: convolution("silu", **given), convolution_inputs),
    "no activation": (lambda **given: convolution(None, **given), convolution_inputs),
}


def contiguous(ranks):
    """Return the tokens of each rank: contiguous parts."""
    cuts = CUTS[ranks]
    return [torch.arange(*cut) for cut in zip(cuts, cuts[1:], strict=False)]


def zigzag(ranks, starts):
    """Return the tokens of each rank r: chunks r and 2 * ranks - 1 - r of each sequence."""
    found = [[] for _ in range(ranks)]
    for span in zip(starts, starts[1:], strict=False):
        chunks = torch.arange(*span).reshape(2 * ranks, -1)
        for rank, own in enumerate(found):
            own += [chunks[rank], chunks[-1 - rank]]
    return [torch.cat(own) for own in found]


def check_group(call, group, device="cpu"):
    """Outputs, the last rank's final state and all gradients equal those of one rank."""
    rank, ranks = distributed.get_rank(group), distributed.get_world_size(group)
    _check(call, group, device, contiguous(ranks)[rank], rank == ranks - 1)


def check_packed(call, group, device="cpu"):
    """Check packed sequences like check_group: within a rank, across ranks, and an empty one."""
    rank, ranks = distributed.get_rank(group), distributed.get_world_size(group)
    for starts in PACKED:
        ends = [rank for rank in range(ranks) if CUTS[ranks][rank] < starts[-1]]
        _check(call, group, device, contiguous(ranks)[rank], rank == ends[-1], starts)
    own = zigzag(ranks, DEALT)[rank]
    _check(call, group, device, own, rank == 0, DEALT, cp_layout="zigzag")


def _check(call, group, device, span, last, starts=None, **layout):
    """Compare this rank's part with the whole sequence on one rank.

    last: whether this rank has the final state of the last sequence.
    """
    function, make = CALLS[call]
    inputs, lengths = make(batch=2 if starts is None else 1), {}
    if starts is not None:
        lengths = {"cu_seqlens": torch.tensor(starts, device=device)}
    if layout:
        inputs = {name: _part(x, torch.arange(starts[-1])) for name, x in inputs.items()}
    whole = {name: x.to(device).requires_grad_() for name, x in inputs.items()}
    own = {name: _part(x, span).detach().clone().requires_grad_() for name, x in whole.items()}
    out, final = function(**whole, **lengths)
    weight = torch.randn(out.shape).to(device)
    ((out * weight).sum() + final[-1].square().sum()).backward()
    part, state = function(**own, **lengths, cp_group=group, **layout)
    ((part * weight[:, span]).sum() + last * state[-1].square().sum()).backward()
    assert_close("out", part, out[:, span], CLOSE)
    if last:
        assert_close("state", state[-1], final[-1], CLOSE)
    for name, x in own.items():
        grad = torch.zeros_like(whole[name])
        grad[(slice(None), span) if _has_tokens(x) else ...] = x.grad
        distributed.all_reduce(grad, group=group)  # as a trainer does for its parameters' gradients
        assert_close(name, grad, whole[name].grad, CLOSE)


def check_nan_stays(call, group):
    """A NaN in one sequence reaches neither outputs nor gradients of another."""
    rank, ranks = distributed.get_rank(group), distributed.get_world_size(group)
    function, make = CALLS[call]
    starts = torch.tensor([0, 30, TOKENS])  # both sequences span ranks
    span = contiguous(ranks)[rank]
    inputs = {name: _part(x, span).clone() for name, x in make(batch=1).items()}
    for x in filter(_has_tokens, inputs.values()):
        x[:, span < 30] = torch.nan
    inputs = {name: x.requires_grad_() for name, x in inputs.items()}
    out, _ = function(**inputs, cu_seqlens=starts, cp_group=group)
    out[:, span >= 30].sum().backward()
    assert not out[:, span >= 30].isnan().any() and out[:, span < 30].isnan().all()
    for name, x in inputs.items():
        if _has_tokens(x):
            assert not x.grad[:, span >= 30].isnan().any(), name


def _has_tokens(x):
    return x.dim() > 2


def _part(x, span):
    return x[:, span] if _has_tokens(x) else x


def work(rank, meeting):
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", f"file://{meeting}", rank=rank, world_size=4)
    halves = [distributed.new_group([0, 1]), distributed.new_group([2, 3])]
    for call in CALLS:
        check_group(call, halves[rank // 2])
        check_group(call, distributed.group.WORLD)
        check_packed(call, halves[rank // 2])
        check_packed(call, distributed.group.WORLD)
        check_nan_stays(call, distributed.group.WORLD)
    distributed.destroy_process_group()


def test_two_and_four_ranks_are_one(tmp_path):
    multiprocessing.spawn(work, (tmp_path / "meeting",), nprocs=4)


@pytest.mark.parametrize("call", ["v first", "silu"])
def test_what_does_not_go_together(call):
    function, make = CALLS[call]
    given = make(batch=1)
    given["initial_state"] = (
        torch.zeros(1, 2, 24, 16) if call == "v first" else torch.zeros(1, 24, 4)
    )
    with pytest.raises(ValueError, match="^initial_state: got a value with cp_group, needs None"):
        function(**given, cp_group=object())
    del given["initial_state"]
    with pytest.raises(ValueError, match="^cp_layout: got 'ring', needs one of 'contiguous'"):
        function(**given, cp_group=object(), cp_layout="ring")
    with pytest.raises(ValueError, match="^cu_seqlens: got None with cp_layout='zigzag'"):
        function(**given, cp_group=object(), cp_layout="zigzag")
    with pytest.raises(ValueError, match="^cp_group: got None with cp_layout='zigzag'"):
        function(**given, cp_layout="zigzag")


@pytest.mark.parametrize("name", ["return_intermediate_states", "carry_unfinished"])
def test_states_between_chunks_are_those_of_one_rank(name):
    function, make = CALLS["v first"]
    with pytest.raises(ValueError, match=f"^cp_group: got a value with {name}, needs None"):
        function(**make(batch=1), cp_group=object(), **{name: True})


@pytest.fixture
def alone(tmp_path):
    """Yield a process group with one rank."""
    distributed.init_process_group("gloo", f"file://{tmp_path}/meeting", rank=0, world_size=1)
    yield distributed.group.WORLD
    distributed.destroy_process_group()


@pytest.mark.parametrize("call", ["v first", "silu"])
@pytest.mark.parametrize("layout", [None, "contiguous", "zigzag"])
def test_one_rank_has_the_whole(alone, call, layout):
    """Run one rank in this process, so that mutation tests cover it.

    The final state is returned only on request.
    """
    function = {"v first": npu_ops.chunk_gated_delta_rule, "silu": npu_ops.causal_conv1d}[call]
    given = CALLS[call][1](batch=1)
    lengths = {} if layout is None else {"cu_seqlens": torch.tensor([0, 8, 8, 48, 72])}
    group = {"cp_group": alone} | ({} if layout is None else {"cp_layout": layout})
    for wanted in (True, False):
        settings = lengths | {"output_final_state": wanted}
        expected, state = function(**given, **settings)
        actual, final = function(**given, **settings, **group)
        assert_close("out", actual, expected, CLOSE)
        if wanted:
            assert_close("state", final, state, CLOSE)
        else:
            assert final is None


def test_what_other_ranks_have_is_the_initial_state(monkeypatch):
    given, state = convolution_inputs(), torch.randn(2, 24, 4)
    expected = convolution("silu", **given, initial_state=state)
    monkeypatch.setattr(context_parallel, "initial_state", lambda x, width, group: state)
    actual = convolution("silu", **given, cp_group=object())
    assert all(map(torch.equal, actual, expected))


@pytest.mark.parametrize("call", ["v first", "silu"])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_wrong_lengths(alone, call, layout, monkeypatch):
    """On the CPU wrong cu_seqlens raise an error.

    On a device, each rank derives wrong lengths for its tokens from them, and its kernel returns
    NaN.
    """
    function, make = CALLS[call]
    wrong = {
        (1, 40): "got 1 first and 40 last, needs 0 and up to 75",
        (0, 40, 76): "got 0 first and 76 last, needs 0 and up to 75",
        (0, 40, 20): "got a negative length",
    }
    if layout == "zigzag":
        wrong |= {(0, 41, 74): "got a sequence of 41 tokens, needs a multiple of 2"}
    for starts, sentence in wrong.items():
        given = {"cu_seqlens": torch.tensor(starts), "cp_group": alone, "cp_layout": layout}
        with pytest.raises(ValueError, match=f"^cu_seqlens: {sentence}"):
            function(**make(batch=1), **given)
        with monkeypatch.context() as patched:
            patched.setattr(library, "readable", lambda x: False)
            parts = {
                "contiguous": lambda x: spans.contiguous(x, TOKENS, alone).starts,
                "zigzag": lambda x: spans.zigzag(x, TOKENS, alone),
            }[layout](torch.tensor(starts))
        right = parts[0] == 0 and parts[-1] <= TOKENS and (parts.diff() >= 0).all()
        assert not right, (starts, parts)
