"""The decoding step against the reference, transformers and itself, and memory it
must not change."""

import functools

import pytest
import torch
from support import copies, every_implementation, forced, named, threads
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen3_5

import npu_ops
from npu_ops.core import env
from npu_ops.core.compare import Tolerance, assert_close
from npu_ops.ops.gated_delta_rule_update import op
from npu_ops.ops.gated_delta_rule_update.cases import TOLERANCES

OP = "gated_delta_rule_update"
IMPLEMENTATIONS = every_implementation(op.forward)
POOLS = pytest.mark.parametrize("pool", [torch.float32, torch.bfloat16], ids=named)
LAYOUTS = pytest.mark.parametrize("v_first", [True, False])
update = npu_ops.gated_delta_rule_update


def moved(inputs, change):
    """Return `inputs` with `change` applied to each tensor, also those in a tuple."""

    def one(value):
        if isinstance(value, tuple):
            return tuple(map(one, value))
        return change(value) if isinstance(value, torch.Tensor) else value

    return {name: one(value) for name, value in inputs.items()}


def run(implementation, device, inputs):
    """Return o, the pool and the intermediate states, on the CPU; `inputs` stay unchanged."""
    inputs = moved(inputs, lambda x: x.clone().to(device))
    with forced(implementation, OP):
        o = update(**inputs)
    results = o, inputs["state"], inputs.get("intermediate_states")
    return [None if x is None else x.cpu() for x in results]


def wide(inputs):
    return moved(inputs, lambda x: x.double() if x.is_floating_point() else x)


def arguments(tokens=6, sequences=6, v_first=True, pool=torch.float32, seed=0, **changes):
    """Return a call on a pool of 9 slots; its sequences use slots 7, 0, 2, 5, 8 and 3."""
    draw = torch.Generator().manual_seed(seed)
    normal = functools.partial(torch.randn, generator=draw)
    matrix = (12, 8) if v_first else (8, 12)
    return {
        "qkv": normal(tokens, 2 * 2 * 8 + 4 * 12) + 0.5,
        "a": normal(tokens, 4),
        "b": normal(tokens, 4),
        "A_log": normal(4),
        "dt_bias": normal(4),
        "state": normal(9, 4, *matrix).to(pool),
        "state_indices": torch.tensor([7, 0, 2, 5, 8, 3])[:sequences],
        "state_v_first": v_first,
    } | changes


def tokens_of(inputs, chosen):
    """Return the call for some of its tokens."""
    return inputs | {name: inputs[name][chosen] for name in ("qkv", "a", "b")}


def close(name, actual, expected, pool=torch.float32):
    assert_close(name, actual, expected, TOLERANCES[pool])


# Results, compared with the reference


@LAYOUTS
@IMPLEMENTATIONS
def test_against_transformers(v_first, implementation, device):
    """The call starts from the convolution's output; transformers' rule runs in fp32."""
    inputs = arguments(18, 6, v_first)
    q, k, v = inputs["qkv"].view(6, 3, -1).split((16, 16, 48), -1)
    g = -inputs["A_log"].exp() * torch.nn.functional.softplus(inputs["a"] + inputs["dt_bias"])
    state = inputs["state"][inputs["state_indices"]]
    expected, final = qwen3_5.torch_recurrent_gated_delta_rule.__wrapped__(
        q.unflatten(-1, (2, 8)), k.unflatten(-1, (2, 8)), v.unflatten(-1, (4, 12)),
        g=g.view(6, 3, 4), beta=inputs["b"].sigmoid().view(6, 3, 4), output_final_state=True,
        initial_state=state.transpose(-1, -2) if v_first else state, use_qk_l2norm_in_kernel=True,
    )  # fmt: skip
    o, pool, _ = run(implementation, device, inputs)
    close("o", o, expected.flatten(0, 1))
    close("state", pool[inputs["state_indices"]], final.transpose(-1, -2) if v_first else final)


@IMPLEMENTATIONS
def test_against_the_recurrent_operator(implementation, device):
    inputs = arguments(24, 6, True)
    q, k, v = inputs["qkv"].view(6, 4, -1).split((16, 16, 48), -1)
    expected, final = npu_ops.fused_recurrent_gated_delta_rule(
        q.unflatten(-1, (2, 8)), k.unflatten(-1, (2, 8)), v.unflatten(-1, (4, 12)),
        inputs["a"].view(6, 4, 4), beta=inputs["b"].view(6, 4, 4), A_log=inputs["A_log"],
        dt_bias=inputs["dt_bias"], initial_state=inputs["state"][inputs["state_indices"]],
        output_final_state=True, use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True,
        use_beta_sigmoid_in_kernel=True, state_v_first=True,
    )  # fmt: skip
    o, pool, _ = run(implementation, device, inputs)
    close("o", o, expected.flatten(0, 1))
    close("state", pool[inputs["state_indices"]], final)


@IMPLEMENTATIONS
@pytest.mark.parametrize("raw", [-100.0, -30.0, 0.0, 30.0, 1e4])
def test_extreme_gates(raw, implementation, device):
    inputs = arguments()
    inputs["a"] = torch.full_like(inputs["a"], raw)
    inputs["b"] = torch.full_like(inputs["b"], -raw)
    expected = run("reference", "cpu", wide(inputs))
    for a, e in zip(run(implementation, device, inputs)[:2], expected, strict=False):
        close(str(raw), a, e)


@IMPLEMENTATIONS
def test_a_row_of_zeros_normalizes_to_zeros(implementation, device):
    inputs = arguments(qkv=torch.zeros(6, 80))
    o, _, _ = run(implementation, device, inputs)
    assert not o.any()


# Memory that the function must not change


@POOLS
@LAYOUTS
@IMPLEMENTATIONS
def test_padding_and_other_slots_are_untouched(pool, v_first, implementation, device):
    """Other slots keep their bits, and padded sequences read 0, whatever their inputs hold."""
    inputs = arguments(12, 6, v_first, pool)
    inputs["state_indices"] = torch.tensor([7, -1, 2, -1, -1, 3], dtype=torch.int32)
    inputs["state"][[0, 1, 4, 5, 6, 8]] = float("nan")
    for name in ("qkv", "a", "b"):
        inputs[name].view(6, 2, -1)[[1, 3, 4]] = float("nan")
    o, state, _ = run(implementation, device, inputs)
    o = o.view(6, 2, 4, 12)
    assert not o[[1, 3, 4]].any() and o[[0, 2, 5]].isfinite().all()
    bits = {2: torch.int16, 4: torch.int32}[state.element_size()]
    rest = [0, 1, 4, 5, 6, 8]
    assert torch.equal(state[rest].view(bits), inputs["state"][rest].view(bits))
    assert not torch.equal(state[[7, 2, 3]], inputs["state"][[7, 2, 3]])
    assert state[[7, 2, 3]].isfinite().all()


@LAYOUTS
@IMPLEMENTATIONS
def test_a_broken_state_stays_with_its_sequence(v_first, implementation, device):
    """With 8 keys a kernel's tile has padding, in which another sequence's NaN must not stay."""
    inputs = arguments(v_first=v_first)
    right, *_ = run(implementation, device, inputs)
    inputs["state"][7] = torch.nan  # the first sequence's slot
    o, pool, _ = run(implementation, device, inputs)
    assert o[0].isnan().all() and torch.equal(o[1:], right[1:])
    assert pool[[0, 2, 5, 8, 3]].isfinite().all()


@IMPLEMENTATIONS
def test_without_update_the_pool_is_untouched(implementation, device):
    inputs = arguments(disable_state_update=True)
    o, state, _ = run(implementation, device, inputs)
    assert torch.equal(state, inputs["state"])
    assert torch.equal(o, run(implementation, device, arguments())[0])


@LAYOUTS
@IMPLEMENTATIONS
def test_ragged_sequences(v_first, implementation, device):
    """Sequences equal those run alone. Empty ones change nothing; tokens past the last read 0."""
    starts = [0, 0, 4, 5, 5, 8, 8]
    inputs = arguments(11, 6, v_first, cu_seqlens=torch.tensor(starts, dtype=torch.int32))
    inputs["state_indices"][4] = -1
    o, state, _ = run(implementation, device, inputs)
    assert not o[5:].any()
    expected = inputs["state"].clone()
    for n in (1, 2):
        alone = tokens_of(inputs, slice(starts[n], starts[n + 1])) | {"cu_seqlens": None}
        alone["state_indices"] = inputs["state_indices"][n : n + 1]
        one = run("reference", "cpu", alone)
        close("o", o[starts[n] : starts[n + 1]], one[0])
        expected[alone["state_indices"]] = one[1][alone["state_indices"]]
    close("state", state, expected)
    assert torch.equal(state[[7, 5, 8, 3]], inputs["state"][[7, 5, 8, 3]])


@IMPLEMENTATIONS
def test_slots_that_lie_apart(implementation, device):
    """The pool may be a strided part of a larger allocation."""
    inputs = arguments()
    expected = run(implementation, device, inputs)
    memory = torch.full((9, 500), 7.0, device=device)
    apart = memory[:, 50 : 50 + 384].view(9, 4, 12, 8)
    apart.copy_(inputs["state"])
    with forced(implementation, OP):
        o = update(**moved(inputs, lambda x: x.to(device)) | {"state": apart})
    assert torch.equal(o.cpu(), expected[0]) and torch.equal(apart.cpu(), expected[1])
    assert (memory[:, :50] == 7).all() and (memory[:, 434:] == 7).all()


# Packed and separate inputs, contiguous and strided


@IMPLEMENTATIONS
def test_three_tensors_are_the_packed_one(implementation, device):
    inputs = arguments()
    expected = run(implementation, device, inputs)
    q, k, v = inputs["qkv"].split((16, 16, 48), 1)
    three = q.view(6, 2, 8), k.view(6, 2, 8), v.view(6, 4, 12)
    assert three[0].stride(0) == 80
    for qkv in (three, tuple(x.contiguous() for x in three)):
        actual = run(implementation, device, inputs | {"qkv": qkv})
        assert all(map(torch.equal, actual[:2], expected))
    with forced(implementation, OP):
        there = moved(inputs, lambda x: x.clone().to(device))
        ab = torch.cat([there["b"], there["a"]], 1)
        strided = {"a": ab[:, 4:], "b": ab[:, :4], "state_indices": there["state_indices"].int()}
        assert torch.equal(update(**there | strided).cpu(), expected[0])
        there |= {"state_indices": there["state_indices"][:2], "disable_state_update": True}
        one = {name: there[name][:1].expand_as(there[name]) for name in ("qkv", "a", "b")}
        dense = {name: x.contiguous() for name, x in one.items()}
        assert torch.equal(update(**there | one), update(**there | dense))


def test_nothing_is_copied():
    """A step allocates only its output."""
    inputs = arguments()
    update(**inputs)
    with copies() as seen:
        o = update(**inputs)
    assert seen.operators == [] and seen.allocated <= o.nbytes + 2048


# Speculative decoding


@POOLS
@LAYOUTS
@IMPLEMENTATIONS
def test_many_tokens_are_single_steps(pool, v_first, implementation, device):
    """The tolerance is 1e-6, but wider with a bf16 pool, which is rounded after each step."""
    inputs = arguments(24, 6, v_first, pool)
    o, state, _ = run(implementation, device, inputs)
    one_by_one, outputs = inputs["state"], []
    for step in range(4):
        single = tokens_of(inputs, slice(step, None, 4)) | {"state": one_by_one}
        read, one_by_one, _ = run(implementation, device, single)
        outputs.append(read)
    tolerance = Tolerance(1e-6, 1e-6) if pool == torch.float32 else Tolerance(1e-2, 2e-2)
    assert_close("o", o, torch.stack(outputs, 1).flatten(0, 1), tolerance)
    assert_close("state", state, one_by_one, tolerance)


def plain_sequence(inputs, steps):
    """Return the reference's o, and the states before and after each of `steps` tokens."""
    outputs, states = [], [inputs["state"][inputs["state_indices"]]]
    state = inputs["state"]
    for step in range(steps):
        single = tokens_of(inputs, slice(step, None, steps)) | {"state": state}
        read, state, _ = run("reference", "cpu", single)
        outputs.append(read)
        states.append(state[inputs["state_indices"]])
    return torch.stack(outputs, 1), torch.stack(states, 1)


ACCEPTED = torch.tensor([3, 0, 1, 2, 3, 1])


def second_draft(inputs, drafted=4, follow=2):
    """Return the indices of the `follow` tokens after each sequence's accepted ones.

    Each sequence has drafted + follow tokens, in order.
    """
    each = torch.arange(6)[:, None] * (drafted + follow)
    return (each + ACCEPTED[:, None] + torch.arange(follow)).flatten()


@POOLS
@LAYOUTS
@IMPLEMENTATIONS
def test_accepted_tokens_continue_the_sequence(pool, v_first, implementation, device):
    """SGLang drafts four tokens and accepts some; the next step continues from these alone."""
    inputs = arguments(36, 6, v_first, pool)
    expected, states = plain_sequence(inputs, 6)
    rows = torch.tensor([4, 2, 6, 0, 1, 3])
    kept = torch.full((7, 4, *inputs["state"].shape[1:]), float("nan"), dtype=pool)
    verify = inputs | {
        "intermediate_states": kept, "intermediate_state_indices": rows,
        "disable_state_update": True,
    }  # fmt: skip
    drafted = (torch.arange(6)[:, None] * 6 + torch.arange(4)).flatten()
    o, state, kept = run(implementation, device, tokens_of(verify, drafted))
    tolerance = TOLERANCES[pool] if pool == torch.float32 else Tolerance(1e-2, 2e-2)
    assert torch.equal(state, inputs["state"])
    assert_close("o", o.view(6, 4, 4, 12), expected[:, :4], tolerance)
    assert_close("kept", kept[rows], states[:, 1:5], tolerance)
    assert kept[5].isnan().all()
    second = tokens_of(verify, second_draft(inputs)) | {
        "intermediate_states": kept, "num_accepted_tokens": ACCEPTED, "disable_state_update": False,
    }  # fmt: skip
    o, state, again = run(implementation, device, second)
    wanted = torch.stack([expected[n, m : m + 2] for n, m in enumerate(ACCEPTED.tolist())])
    last = torch.stack([states[n, m + 1 : m + 3] for n, m in enumerate(ACCEPTED.tolist())])
    assert_close("o", o.view(6, 2, 4, 12), wanted, tolerance)
    assert_close("kept", again[rows, :2], last, tolerance)
    assert_close("state", state[inputs["state_indices"]], last[:, 1], tolerance)
    assert torch.equal(again[rows, 2:], kept[rows, 2:])


@LAYOUTS
@IMPLEMENTATIONS
def test_a_slot_for_each_token(v_first, implementation, device):
    """vLLM writes the state after token t to slot [n, t]; the next step starts from the
    slot of an accepted token."""
    inputs = arguments(36, 6, v_first)
    expected, states = plain_sequence(inputs, 6)
    slots = torch.randperm(30)[:24].view(6, 4)
    pool = torch.full((30, *inputs["state"].shape[1:]), float("nan"))
    pool[slots[:, 0]] = inputs["state"][inputs["state_indices"]]
    drafted = (torch.arange(6)[:, None] * 6 + torch.arange(4)).flatten()
    verify = inputs | {"state": pool, "state_indices": slots}
    o, pool, _ = run(implementation, device, tokens_of(verify, drafted))
    close("o", o.view(6, 4, 4, 12), expected[:, :4])
    close("state", pool[slots], states[:, 1:5])
    accepted = ACCEPTED.clamp(min=1)
    follow = (torch.arange(6)[:, None] * 6 + accepted[:, None] + torch.arange(2)).flatten()
    second = verify | {"state": pool, "num_accepted_tokens": accepted}
    o, after, _ = run(implementation, device, tokens_of(second, follow))
    for n, m in enumerate(accepted.tolist()):
        close("o", o.view(6, 2, 4, 12)[n], expected[n, m : m + 2])
        close("state", after[slots[n, :2]], states[n, m + 1 : m + 3])
    assert torch.equal(after[slots[:, 2:]], pool[slots[:, 2:]])


@IMPLEMENTATIONS
def test_a_slot_of_minus_one_takes_no_state(implementation, device):
    inputs = arguments(4, 2)
    inputs["state_indices"] = torch.tensor([[7, -1], [-1, 3]])
    o, state, _ = run(implementation, device, inputs)
    whole = run(implementation, device, arguments(4, 2))
    assert torch.equal(o[:2], whole[0][:2]) and not o[2:].any()
    rest = [0, 1, 2, 3, 4, 5, 6, 8]
    assert torch.equal(state[rest], inputs["state"][rest])


@IMPLEMENTATIONS
def test_a_row_of_minus_one_keeps_nothing(implementation, device):
    inputs = arguments(12, 6)
    inputs["intermediate_states"] = torch.zeros(6, 2, 4, 12, 8)
    inputs["intermediate_state_indices"] = torch.tensor([0, -1, 2, 3, -1, -1])
    o, _, kept = run(implementation, device, inputs)
    assert torch.equal(o, run(implementation, device, arguments(12, 6))[0])
    assert not kept[[1, 4, 5]].any() and kept[[0, 2, 3]].any()


# Invalid values


def out_of_range():
    kept = torch.zeros(3, 2, 4, 12, 8)
    by_token = {"state_indices": torch.tensor([[7, 1], [0, 3], [2, 4]])}
    sglang = {"intermediate_states": kept}
    return {
        "a slot beyond the pool": {"state_indices": torch.tensor([7, 9, 2])},
        "a slot of -2": {"state_indices": torch.tensor([7, -2, 2])},
        "none accepted": by_token | {"num_accepted_tokens": torch.tensor([1, 0, 2])},
        "more accepted than slots": by_token | {"num_accepted_tokens": torch.tensor([1, 3, 2])},
        "fewer than none accepted": sglang | {"num_accepted_tokens": torch.tensor([1, -1, 2])},
        "more accepted than kept": sglang | {"num_accepted_tokens": torch.tensor([1, 3, 2])},
        "a row beyond the last": sglang | {"intermediate_state_indices": torch.tensor([0, 3, 2])},
        "a row of -2": sglang | {"intermediate_state_indices": torch.tensor([0, -2, 2])},
        "accepted, but no row": sglang
        | {
            "intermediate_state_indices": torch.tensor([0, -1, 2]),
            "num_accepted_tokens": torch.tensor([0, 1, 0]),
        },
    }


@pytest.mark.parametrize("what", out_of_range())
@IMPLEMENTATIONS
def test_out_of_range(what, implementation, device):
    """On the CPU bad values raise an error. On a device only their own sequence's o is NaN."""
    inputs = arguments(6, 3) | out_of_range()[what]
    if device == "cpu":
        before = moved(inputs, torch.clone)
        with pytest.raises(ValueError, match="^(state_indices|num_accepted|intermediate_state)"):
            run(implementation, device, inputs)
        assert all(
            torch.equal(inputs[n], before[n]) for n in inputs if isinstance(inputs[n], torch.Tensor)
        )
    else:
        o, state, kept = run(implementation, device, inputs)
        assert o[2:4].isnan().all() and o[[0, 1, 4, 5]].isfinite().all()
        assert torch.equal(state[[0, 3, 8]], inputs["state"][[0, 3, 8]])
        assert kept is None or not kept[1].any()


@pytest.mark.parametrize("what", out_of_range())
def test_out_of_range_compiled(what):
    """A compiled call skips the public function's checks, so the operator checks again."""
    inputs = arguments(6, 3) | out_of_range()[what]
    before = inputs["state"].clone()
    compiled = torch.compile(lambda **k: update(**k), fullgraph=True, backend="eager")
    with pytest.raises(ValueError, match="needs (-?[0-9] to|a row for accepted tokens)"):
        compiled(**inputs)
    torch._dynamo.reset()
    assert torch.equal(inputs["state"], before)


def test_more_tokens_than_there_is_room_for():
    with pytest.raises(ValueError, match="state_indices: got room for 1 tokens, needs 2"):
        update(**arguments(12, 6) | {"state_indices": torch.arange(6)[:, None]})
    kept = torch.zeros(6, 1, 4, 12, 8)
    with pytest.raises(ValueError, match="intermediate_states: got room for 1 tokens, needs 2"):
        update(**arguments(12, 6), intermediate_states=kept)


def test_the_layout_has_no_default():
    inputs = arguments()
    del inputs["state_v_first"]
    with pytest.raises(TypeError, match="state_v_first"):
        update(**inputs)


def test_parameters_without_grad_mode():
    """A_log may be a Parameter, as in a served model."""
    inputs = arguments()
    inputs["A_log"] = torch.nn.Parameter(inputs["A_log"])
    with torch.no_grad():
        expected = update(**arguments())
        assert torch.equal(update(**inputs), expected)
    with torch.inference_mode():
        assert torch.equal(update(**arguments()), expected)


# As a torch operator


def operator_arguments(**changes):
    from npu_ops.ops.gated_delta_rule_update import _inputs

    return tuple(_inputs(**arguments(**changes)))


@pytest.mark.parametrize("kept", [True, False])
def test_opcheck(kept):
    given = {"intermediate_states": torch.zeros(6, 2, 4, 12, 8)} if kept else {}
    torch.library.opcheck(
        torch.ops.npu_ops.gated_delta_rule_update.default, operator_arguments(**given)
    )


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compile(backend):
    """Compiled to one graph, the call updates the given pool."""

    def function(state, inputs):
        return update(**inputs | {"state": state}) + state.sum()

    inputs = arguments()
    one, two = inputs.pop("state"), arguments()["state"]
    expected = function(one, inputs)
    actual = torch.compile(function, fullgraph=True, backend=backend)(two, inputs)
    torch._dynamo.reset()
    torch.testing.assert_close(actual, expected)
    assert torch.equal(one, two)


def test_fake_is_like_real():
    real = update(**arguments())
    mode = FakeTensorMode()
    with mode:
        fake = update(**moved(arguments(), mode.from_tensor))
    assert (fake.shape, fake.dtype, fake.stride()) == (real.shape, real.dtype, real.stride())


def test_the_pool_s_version_counts():
    inputs = arguments(intermediate_states=torch.zeros(6, 1, 4, 12, 8))
    before = inputs["state"]._version, inputs["intermediate_states"]._version
    update(**inputs)
    assert inputs["state"]._version > before[0]
    assert inputs["intermediate_states"]._version > before[1]


@IMPLEMENTATIONS
def test_the_same_on_any_number_of_threads(implementation, device):
    inputs = arguments(24, 6)
    first = run(implementation, device, inputs)
    with threads(2):
        assert all(map(torch.equal, run(implementation, device, inputs)[:2], first))


def test_strict_mode_runs_kernels():
    with env.override(strict=True):
        update(**moved(arguments(), lambda x: x.half() if x.shape == (6, 80) else x))


def test_explain():
    rows = npu_ops.explain(update, **arguments())
    assert [row.implementation for row in rows if row.why_not is None] == ["cpu"]
