"""Packed sequences: one policy for lengths, in every function and on every device.

`npu_ops/core/lengths.py` defines it. PACKED has a call of each function that takes lengths.
"""

import contextlib
import dataclasses
import inspect
import random
from collections.abc import Callable

import pytest
import torch
from support import forced, implementations, on_npu

import npu_ops
from npu_ops.core.registry import Table

NAN = float("nan")
TOKENS, LENGTHS = 9, (3, 4)  # the last two tokens belong to no sequence
NAMES = ("cu_seqlens", "cu_seqlens_q", "query_start_loc")


@dataclasses.dataclass(frozen=True)
class Packed:
    """A function that takes the lengths of packed sequences.

    op: the op whose table has its implementations.
    make: from a `torch.randn`, the number of tokens and the lengths, returns the arguments.
    tokens: arguments with one row per token, in the first dimension or after a batch of 1.
    keys: those of `tokens` that have lengths of their own.
    parameters: other arguments with a gradient.
    """

    op: str
    function: Callable
    make: Callable
    tokens: tuple[str, ...]
    keys: tuple[str, ...] = ()
    parameters: tuple[str, ...] = ()
    trains: bool = True

    def __str__(self):
        return self.make.__name__

    def call(self, tokens=TOKENS, lengths=LENGTHS):
        draw = torch.Generator().manual_seed(0)
        return self.make(lambda *shape: torch.randn(*shape, generator=draw), tokens, lengths)

    @property
    def axis(self):
        """Return the dimension of tokens in the arguments."""
        return int(self.call()[self.tokens[0]].shape[0] == 1)

    @property
    def name(self):
        """Return the name of the argument that holds the lengths."""
        return next(n for n in NAMES if n in inspect.signature(self.function).parameters)


def starts(lengths, dtype=torch.int32):
    return torch.tensor([0, *lengths]).cumsum(0).to(dtype)


def causal_conv1d(draw, t, n):
    return {
        "x": draw(1, t, 24), "weight": draw(24, 4), "bias": draw(24), "residual": draw(1, t, 24),
        "initial_state": draw(len(n), 24, 4), "activation": "silu", "cu_seqlens": starts(n),
    }  # fmt: skip


def wide_causal_conv1d(draw, t, n):
    return causal_conv1d(draw, t, n) | {"weight": draw(24, 6), "initial_state": None}


def causal_conv1d_of_a_pool(draw, t, n):
    call = causal_conv1d(draw, t, n) | {"initial_state": None, "residual": None}
    return call | {"conv_state": draw(len(n), 24, 3)}


def causal_conv1d_qkv(draw, t, n):
    return {
        "x": draw(1, t, 96), "weight": draw(96, 4), "bias": draw(96), "num_k_heads": 2,
        "num_v_heads": 2, "head_k_dim": 16, "head_v_dim": 16, "cu_seqlens": starts(n, torch.int64),
    }  # fmt: skip


def chunk_gated_delta_rule(draw, t, n):
    return {
        "q": draw(1, t, 2, 16) / 4, "k": draw(1, t, 2, 16) / 4, "v": draw(1, t, 4, 16),
        "g": -draw(1, t, 4).abs(), "beta": draw(1, t, 4).sigmoid(), "chunk_size": 16,
        "initial_state": draw(len(n), 4, 16, 16), "cu_seqlens": starts(n),
    }  # fmt: skip


def chunk_kda(draw, t, n):
    call = chunk_gated_delta_rule(draw, t, n)
    return call | {"g": -draw(1, t, 4, 16).abs()}


def raw_chunk_kda(draw, t, n):
    """Norms, gates and betas are computed inside the function, forward and backward."""
    return chunk_kda(draw, t, n) | {
        "use_qk_l2norm_in_kernel": True, "use_beta_sigmoid_in_kernel": True,
        "use_gate_in_kernel": True, "A_log": draw(4), "dt_bias": draw(64),
    }  # fmt: skip


def chunks_of_one_token(draw, t, n):
    return chunk_gated_delta_rule(draw, t, n) | {"chunk_size": 1}


def chunks_of_raw_inputs(draw, t, n):
    """Norms, gates and betas are computed inside the function, forward and backward."""
    return chunk_gated_delta_rule(draw, t, n) | {
        "use_qk_l2norm_in_kernel": True, "use_beta_sigmoid_in_kernel": True,
        "use_gate_in_kernel": True, "A_log": draw(4), "dt_bias": draw(4),
    }  # fmt: skip


def wide_chunks_of_raw_inputs(draw, t, n):
    call = chunks_of_raw_inputs(draw, t, n)
    q, k = (draw(1, t, 2, 192) for _ in "qk")
    return call | {"q": q, "k": k, "initial_state": draw(len(n), 4, 192, 16)}


def tokens_of_raw_inputs(draw, t, n):
    call = chunks_of_raw_inputs(draw, t, n)
    del call["chunk_size"]
    return call


def fused_recurrent_gated_delta_rule(draw, t, n):
    call = chunk_gated_delta_rule(draw, t, n)
    del call["chunk_size"]
    return call | {"gv": -draw(1, t, 4, 16).abs()}


def attention(draw, t, n):
    return {
        "q": draw(t, 2, 16), "k": draw(t, 1, 16), "v": draw(t, 1, 16), "layout": "TND",
        "is_causal": True, "cu_seqlens_q": starts(n), "return_lse": True,
    }  # fmt: skip


def attention_with_sinks(draw, t, n):
    return attention(draw, t, n) | {"sinks": draw(2)}


def attention_of_other_keys(draw, t, n):
    keys = [2 * length for length in n]
    count = 2 * t
    return {
        "q": draw(t, 2, 16), "k": draw(count, 1, 16), "v": draw(count, 1, 16), "layout": "TND",
        "cu_seqlens_q": starts(n), "cu_seqlens_k": starts(keys),
    }  # fmt: skip


def rope(draw, t, n):
    return {
        "q": draw(t, 2, 16), "k": draw(t, 1, 16), "cos": draw(8, 8), "sin": draw(8, 8),
        "rotary_dim": 8, "cu_seqlens": starts(n),
    }  # fmt: skip


def rope_by_freqs(draw, t, n):
    return {
        "q": draw(t, 2, 16), "k": draw(t, 1, 16), "freqs": draw(8, 1, 1, 8), "layout": "TND",
        "cu_seqlens": starts(n), "max_seqlen": 8,
    }  # fmt: skip


def causal_conv1d_update(draw, t, n):
    return {
        "x": draw(t, 24), "conv_state": draw(len(n), 24, 3), "weight": draw(24, 4),
        "query_start_loc": starts(n),
    }  # fmt: skip


def gated_delta_rule_update(draw, t, n):
    return {
        "qkv": draw(t, 4 * 16), "a": draw(t, 2), "b": draw(t, 2), "A_log": draw(2),
        "dt_bias": draw(2), "state": draw(len(n), 2, 16, 16), "state_v_first": True,
        "state_indices": torch.arange(len(n)), "cu_seqlens": starts(n),
    }  # fmt: skip


_CONV = ("weight", "bias", "initial_state")
_RULE = ("q", "k", "v", "g", "beta")
PACKED = [
    Packed("causal_conv1d", npu_ops.causal_conv1d, causal_conv1d, ("x", "residual"), (), _CONV),
    Packed(
        "causal_conv1d", npu_ops.causal_conv1d, wide_causal_conv1d, ("x", "residual"), (),
        _CONV[:2],
    ),
    Packed(
        "causal_conv1d", npu_ops.causal_conv1d, causal_conv1d_of_a_pool, ("x",), trains=False,
    ),
    Packed(
        "causal_conv1d_qkv", npu_ops.causal_conv1d_qkv, causal_conv1d_qkv, ("x",), (), _CONV[:2],
    ),
    Packed(
        "chunk_gated_delta_rule", npu_ops.chunk_gated_delta_rule, chunk_gated_delta_rule, _RULE,
        (), ("initial_state",),
    ),
    Packed(
        "chunk_gated_delta_rule", npu_ops.chunk_gated_delta_rule, chunks_of_one_token, _RULE, (),
        ("initial_state",),
    ),
    Packed(
        "chunk_gated_delta_rule", npu_ops.chunk_gated_delta_rule, chunks_of_raw_inputs, _RULE, (),
        ("initial_state", "A_log", "dt_bias"),
    ),
    Packed(
        "chunk_gated_delta_rule", npu_ops.chunk_gated_delta_rule, wide_chunks_of_raw_inputs, _RULE,
        (), ("initial_state", "A_log", "dt_bias"),
    ),
    Packed("chunk_kda", npu_ops.chunk_kda, chunk_kda, _RULE, (), ("initial_state",)),
    Packed(
        "chunk_kda", npu_ops.chunk_kda, raw_chunk_kda, _RULE, (),
        ("initial_state", "A_log", "dt_bias"),
    ),
    Packed(
        "fused_recurrent_gated_delta_rule", npu_ops.fused_recurrent_gated_delta_rule,
        tokens_of_raw_inputs, _RULE, (), ("initial_state", "A_log", "dt_bias"),
    ),
    Packed(
        "fused_recurrent_gated_delta_rule", npu_ops.fused_recurrent_gated_delta_rule,
        fused_recurrent_gated_delta_rule, (*_RULE, "gv"), (), ("initial_state",),
    ),
    Packed("attention", npu_ops.attention, attention, ("q", "k", "v")),
    Packed("attention", npu_ops.attention, attention_with_sinks, ("q", "k", "v"), (), ("sinks",)),
    Packed("attention", npu_ops.attention, attention_of_other_keys, ("q", "k", "v"), ("k", "v")),
    Packed("rope", npu_ops.apply_rotary_pos_emb, rope, ("q", "k")),
    Packed("rope", npu_ops.apply_rotary_pos_emb_freqs, rope_by_freqs, ("q", "k")),
    Packed(
        "causal_conv1d_update", npu_ops.causal_conv1d_update, causal_conv1d_update, ("x",),
        trains=False,
    ),
    Packed(
        "gated_delta_rule_update", npu_ops.gated_delta_rule_update, gated_delta_rule_update,
        ("qkv", "a", "b"), trains=False,
    ),
]  # fmt: skip


def test_every_function_with_lengths_is_here():
    public = [f for n in npu_ops.__all__ if inspect.isfunction(f := getattr(npu_ops, n))]
    assert {f for f in public if {*NAMES} & {*inspect.signature(f).parameters}} == {
        packed.function for packed in PACKED
    }


def by_implementation():
    for packed in PACKED:
        for chosen in implementations(Table.tables[packed.op]):
            if chosen.values[0] == "aclnn":  # takes lengths from the host only
                continue
            name = f"{packed}-{'-'.join(chosen.values)}"
            yield pytest.param(packed, *chosen.values, id=name, marks=chosen.marks)


every = pytest.mark.parametrize("packed, implementation, device", [*by_implementation()])


def behind(packed, name, x, lengths=LENGTHS):
    """Return a view of the rows past the last sequence."""
    end = sum(lengths) * (2 if name in packed.keys else 1)
    return x.narrow(packed.axis, end, x.shape[packed.axis] - end)


def evaluate(packed, call, device, grads=None):
    """Return outputs, gradients by name, and the outputs' gradients used.

    grads: the gradients of the outputs, or a function that makes them.
    """
    call = {
        n: x.clone().to(device) if isinstance(x, torch.Tensor) else x for n, x in call.items()
    }  # fmt: skip
    leaves = [n for n in (*packed.tokens, *packed.parameters) if packed.trains]
    leaves = [n for n in leaves if call[n] is not None]
    for n in leaves:
        call[n].requires_grad_()
    outputs = packed.function(**call)
    outputs = [x for x in (outputs if isinstance(outputs, tuple) else (outputs,)) if x is not None]
    if not leaves:
        return outputs, {}, []
    grads = grads(outputs) if callable(grads) else grads
    found = torch.autograd.grad(outputs, [call[n] for n in leaves], grads)
    return outputs, dict(zip(leaves, found, strict=True)), grads


def tokens_of(packed, i):
    """Return the dimension of tokens in output i; attention's lse is `[heads, tokens]`."""
    return 1 if packed.function is npu_ops.attention and i == 1 else packed.axis


def rows_of(packed, i, x):
    """Return output i with its tokens first."""
    return x.movedim(tokens_of(packed, i), 0)


def gradients_of(packed):
    """Return a function that makes random gradients of outputs, NaN past the last sequence."""

    def grads(outputs):
        made = [torch.randn(x.shape, generator=torch.Generator().manual_seed(7)) for x in outputs]
        for i, grad in enumerate(made):
            rows_of(packed, i, grad)[sum(LENGTHS) :] = NAN
        return [grad.to(x) for grad, x in zip(made, outputs, strict=True)]

    return grads


def forced_all(packed, implementation):
    """Force one implementation for the forward, and for the backward if there is one."""
    names = [n for n in Table.tables if n in (packed.op, f"{packed.op}_backward")]
    return forced(implementation, *names)


@every
def test_rows_behind_the_last_sequence_are_0(packed, implementation, device):
    """Such rows are 0 whatever inputs and gradients hold there, and change no other result."""
    call = packed.call()
    for name in packed.tokens:
        behind(packed, name, call[name])[...] = NAN
    cut = packed.call()
    for name in packed.tokens:
        owned = cut[name].shape[packed.axis] - behind(packed, name, cut[name]).shape[packed.axis]
        cut[name] = cut[name].narrow(packed.axis, 0, owned)
    with forced_all(packed, implementation):
        outputs, found, grads = evaluate(packed, call, device, gradients_of(packed))
        few = [x.narrow(tokens_of(packed, i), 0, sum(LENGTHS)) for i, x in enumerate(grads)]
        expected, right, _ = evaluate(packed, cut, device, few)
    end = sum(LENGTHS)
    for i, (x, y) in enumerate(zip(outputs, expected, strict=True)):
        x, y = (rows_of(packed, i, each) for each in (x, y))
        assert (x[end:] == 0).all(), f"output {i}"
        torch.testing.assert_close(x[:end], y, rtol=2e-5, atol=2e-5)
    for name, x in found.items():
        if name in packed.tokens:
            assert (behind(packed, name, x) == 0).all(), f"gradient of {name}"
            x = x.narrow(packed.axis, 0, right[name].shape[packed.axis])
        torch.testing.assert_close(x, right[name], rtol=2e-5, atol=2e-5)


def with_host_lengths(packed):
    """Return `packed` in bf16 with lengths on the host too, as the vendor's operator needs.

    They return no lse, because the operator's backward takes no gradient of lse.
    """

    def make(draw, t, n):
        call = packed.make(draw, t, n)
        call |= {name: call[name].bfloat16() for name in "qkv"}
        lists = [call[name].tolist() for name in ("cu_seqlens_q", "cu_seqlens_k") if name in call]
        lengths = lists[0] if len(lists) == 1 else tuple(lists)
        return call | {"cu_seqlens_cpu": lengths, "return_lse": False}

    return dataclasses.replace(packed, make=make)


@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize(
    "packed", [with_host_lengths(each) for each in PACKED if each.op == "attention"], ids=str
)
def rows_behind_are_0_by_the_vendor(packed, trains, device):
    """The vendor's operator leaves rows behind the last sequence unwritten or with any values.

    npu-ops sets them to 0.
    """
    packed = dataclasses.replace(packed, trains=trains)
    call, owned = packed.call(), packed.call(sum(LENGTHS))
    for name in packed.tokens:
        behind(packed, name, call[name])[...] = NAN
        end = owned[name].shape[0]
        owned[name] = call[name][:end].clone()
    if "sinks" in call:
        owned["sinks"] = call["sinks"]
    with forced_all(packed, "aclnn"):
        outputs, found, grads = evaluate(packed, call, device, gradients_of(packed))
        few = [x.narrow(tokens_of(packed, i), 0, sum(LENGTHS)) for i, x in enumerate(grads)]
        expected, right, _ = evaluate(packed, owned, device, few)
    for i, (x, y) in enumerate(zip(outputs, expected, strict=True)):
        x, y = (rows_of(packed, i, each) for each in (x, y))
        assert (x[sum(LENGTHS) :] == 0).all(), f"output {i}"
        assert torch.equal(x[: sum(LENGTHS)], y)
    for name, x in found.items():
        if name in packed.tokens:
            assert (behind(packed, name, x) == 0).all(), f"gradient of {name}"
            x = x[: right[name].shape[0]]
        assert torch.equal(x, right[name]), name
    nobody = packed.call(TOKENS, (0, 0))
    with forced_all(packed, "aclnn"):
        outputs, found, _ = evaluate(packed, nobody, device, ones)
    assert all((x == 0).all() for x in [*outputs, *found.values()])


test_rows_behind_are_0_by_the_vendor = on_npu(rows_behind_are_0_by_the_vendor)


def wrong(right):
    last = int(right[-1])
    middle, first, end, all_of = right.clone(), right.clone(), right.clone(), right.clone()
    middle[1], first[0], end[-1], all_of[:] = last + 1, 1, TOKENS + 1, TOKENS + 3
    return {"descend": middle, "do not begin with 0": first, "end behind": end, "all": all_of}


@pytest.mark.parametrize("packed", PACKED, ids=str)
def test_wrong_lengths_are_refused_on_the_cpu(packed):
    call = packed.call()
    for what, value in wrong(call[packed.name]).items():
        with pytest.raises(ValueError, match=f"^{packed.name}: got "):
            packed.function(**call | {packed.name: value})
            pytest.fail(f"{what}: {value.tolist()} is taken", pytrace=False)


@every
def test_wrong_lengths_give_nan_on_a_device(packed, implementation, device):
    """On the CPU the call raises. On a device all outputs and gradients of tokens are NaN, except:

    - Elements that rope does not rotate are copied.
    - The gradient of a residual is 0.
    - Gradients of keys with lengths of their own are not checked.
    """
    call = packed.call()
    for what, value in wrong(call[packed.name]).items():
        changed = call | {packed.name: value}
        if device == "cpu":
            with pytest.raises(ValueError, match=f"^{packed.name}: got "):
                packed.function(**changed)
            continue
        with forced_all(packed, implementation):
            outputs, found, _ = evaluate(packed, changed, device, gradients_of(packed))
        none = {*packed.keys, "residual"}
        tokens = [x for n, x in found.items() if n in packed.tokens and n not in none]
        for x in [*outputs, *tokens]:
            assert (x[..., :8] if packed.op == "rope" else x).isnan().all(), what


RETURNING = [
    pytest.param(*parameter.values, id=parameter.id, marks=parameter.marks)
    for parameter in by_implementation()
    if "output_final_state" in inspect.signature(parameter.values[0].function).parameters
    and parameter.values[0].trains and parameter.values[2] != "cpu"
]  # fmt: skip
if RETURNING:  # on the CPU such calls raise, see above

    @pytest.mark.parametrize("packed, implementation, device", RETURNING)
    def test_states_of_wrong_lengths_are_nan(packed, implementation, device):
        """Final states are NaN, and so are the gradients of initial states."""
        call = packed.call() | {"output_final_state": True}
        for what, value in wrong(call[packed.name]).items():
            with forced_all(packed, implementation):
                outputs, found, _ = evaluate(packed, call | {packed.name: value}, device, ones)
            assert outputs[-1].isnan().all(), what
            assert found.get("initial_state", outputs[-1]).isnan().all(), what

    @pytest.mark.parametrize("packed, implementation, device", RETURNING)
    def test_states_of_wrong_lengths_without_tokens_are_nan(packed, implementation, device):
        call = packed.call(0, (0, 0)) | {"output_final_state": True}
        call[packed.name][1] = 3
        with forced_all(packed, implementation):
            outputs, found, _ = evaluate(packed, call, device, ones)
        assert outputs[-1].isnan().all()
        assert found.get("initial_state", outputs[-1]).isnan().all()


def ones(outputs):
    return [torch.ones_like(x) for x in outputs]


@every
def test_wrong_lengths_leave_a_pool_as_it_is(packed, implementation, device):
    call = packed.call()
    for name in {"conv_state", "state"} & {*call}:
        for what, value in wrong(call[packed.name]).items():
            given = {n: x.clone().to(device) if isinstance(x, torch.Tensor) else x
                     for n, x in (call | {packed.name: value}).items()}  # fmt: skip
            refused = pytest.raises(ValueError) if device == "cpu" else contextlib.nullcontext()
            with forced_all(packed, implementation), refused:
                packed.function(**given)
            assert torch.equal(given[name].cpu(), call[name]), what


@pytest.mark.parametrize("seed", range(3))
@every
def test_lengths_of_every_kind(packed, implementation, device, seed):
    """Each sequence, empty or long, equals the one run alone; tokens of no sequence give 0."""
    draw = random.Random(seed)
    lengths = [draw.choice([0, 0, 1, 2, 5, 8]) for _ in range(draw.randint(1, 6))]
    total = max(1, sum(lengths) + draw.choice([0, 1, 4]))
    call = packed.call(total, lengths)
    for name in packed.tokens:
        behind(packed, name, call[name], lengths)[...] = NAN
    with torch.no_grad(), forced_all(packed, implementation):
        outputs, *_ = evaluate(dataclasses.replace(packed, trains=False), call, device)
        begin = 0
        for n, length in enumerate(lengths):
            one = alone(packed, call, n, begin, length, lengths)
            if length:
                few, *_ = evaluate(dataclasses.replace(packed, trains=False), one, device)
                for i, (x, y) in enumerate(zip(outputs, few, strict=True)):
                    x = rows_of(packed, i, x)[begin : begin + length]
                    torch.testing.assert_close(x, rows_of(packed, i, y), rtol=2e-5, atol=2e-5)
            begin += length
    for i, x in enumerate(outputs):
        assert (rows_of(packed, i, x)[begin:] == 0).all()


def alone(packed, call, n, begin, length, lengths):
    """Return the call for sequence n alone."""
    one = dict(call)
    for name in packed.tokens:
        times = 2 if name in packed.keys else 1
        one[name] = call[name].narrow(packed.axis, begin * times, length * times)
    for name, x in call.items():
        if name in (*NAMES, "cu_seqlens_k") and x is not None:
            times = 2 if name == "cu_seqlens_k" else 1
            one[name] = torch.tensor([0, length * times], dtype=x.dtype)
        elif name in ("initial_state", "conv_state", "state") and x is not None:
            one[name] = x[n : n + 1]
        elif name == "state_indices":
            one[name] = torch.zeros(1, dtype=x.dtype)
    return one


# Rotary embedding: sequences longer than the table


@pytest.mark.parametrize("implementation, device", implementations(Table.tables["rope"]))
@pytest.mark.parametrize("function", [rope, rope_by_freqs])
def test_tokens_past_the_table_become_nan_on_a_device(function, implementation, device):
    (packed,) = (each for each in PACKED if each.make is function)
    call = packed.call(14, (2, 12))  # longer than the table of 8 rows
    if device == "cpu":
        with pytest.raises(ValueError, match="^cu_seqlens: got length 12, needs at most "):
            packed.function(**call)
        return
    with forced(implementation, "rope"):
        q, k = evaluate(dataclasses.replace(packed, trains=False), call, device)[0]
    for x in (q, k):
        assert x[10:, :, :8].isnan().all() and x[:10].isfinite().all()
