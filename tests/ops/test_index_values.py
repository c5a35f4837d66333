"""Wrong index values, with which a kernel would access memory outside a tensor.

On the CPU each raises an error with the argument's name and changes nothing: eager and compiled, by
native kernels and by references.
"""

import dataclasses
import gc
from collections.abc import Callable

import pytest
import torch

import npu_ops
from npu_ops.core.operator import Operator

INT_MIN, INT_MAX = -(2**31), 2**31 - 1


@dataclasses.dataclass(frozen=True)
class Index:
    """An argument with index values.

    call: returns the arguments of a valid call.
    wrong: from the valid values, returns wrong ones by description.
    trains: whether the call has a gradient.
    """

    name: str
    function: Callable
    call: Callable
    wrong: Callable
    trains: bool = False

    def __str__(self):
        return f"{self.call.__name__}-{self.name}"


def wrong_starts(x):
    """Return wrong cu_seqlens. They may end before the last token, see test_lengths.py."""
    last = int(x[-1])
    return {
        "negative": replaced(x, 0, -1),
        "not 0 first": replaced(x, 0, 1),
        "decreasing": replaced(x, 1, last + 1 if len(x) < 3 else int(x[2]) + 1),
        "long": replaced(x, -1, last + 1),
        "huge": replaced(x, -1, INT_MAX),
        "huge in between": replaced(x, 1, INT_MAX),
        "INT_MIN": replaced(x, 1, INT_MIN),
        "INT_MIN first": replaced(x, 0, INT_MIN),
    }


def chunked_starts(x):
    """Return wrong cu_seqlens for two ranks, each with two of a sequence's four chunks."""
    return wrong_starts(x) | {"not in four": replaced(x, 1, 6)}


def between(low, high):
    """Return a function that gives wrong values for an argument with values from
    `low` to `high`."""
    values = {
        "too small": low - 1, "too large": high + 1, "huge": INT_MAX, "INT_MIN": INT_MIN,
    }  # fmt: skip

    def wrong(x):
        return {what: replaced(x, (0,) * x.dim(), value) for what, value in values.items()}

    return wrong


def replaced(x, place, value):
    x = x.clone()
    x[place] = value
    return x


def draw(*shape):
    return torch.randn(shape)


# Valid calls


def rope():
    return {
        "q": draw(1, 5, 4, 8), "k": draw(1, 5, 3, 8), "cos": draw(20, 8), "sin": draw(20, 8),
        "position_ids": torch.tensor([[3, 1, 4, 15, 9]]), "layout": "BSND",
    }  # fmt: skip


def packed_rope():
    return {
        "q": draw(10, 4, 8), "k": draw(10, 3, 8), "cos": draw(8, 8), "sin": draw(8, 8),
        "cu_seqlens": torch.tensor([0, 3, 10]),
    }  # fmt: skip


def freqs():
    return {
        "q": draw(8, 4, 8), "k": draw(8, 3, 8), "freqs": draw(9, 1, 1, 8), "layout": "TND",
        "cu_seqlens": torch.tensor([0, 3, 8]), "max_seqlen": 9,
    }  # fmt: skip


def freqs_of_a_rank():
    return freqs() | {
        "freqs": draw(16, 1, 1, 8), "cu_seqlens": torch.tensor([0, 4, 16]), "cp_size": 2,
        "cp_rank": 1, "max_seqlen": None,
    }  # fmt: skip


def cached():
    return {
        "positions": torch.tensor([[3, 1, 4, 15, 9], [2, 6, 5, 3, 5], [8, 9, 7, 9, 3]]),
        "q": draw(5, 4, 8), "k": draw(5, 3, 8), "cos_sin_cache": draw(20, 8),
        "mrope_section": [2, 1, 1], "section_layout": "chunked",
    }  # fmt: skip


def packed_attention():
    return {
        "q": draw(10, 4, 8), "k": draw(12, 2, 8), "v": draw(12, 2, 8), "layout": "TND",
        "cu_seqlens_q": torch.tensor([0, 3, 10]), "cu_seqlens_k": torch.tensor([0, 4, 12]),
        "is_causal": True,
    }  # fmt: skip


def packed_attention_by_blocks():
    return packed_attention() | {"softcap": 5.0}


def padded_attention():
    return {
        "q": draw(2, 5, 4, 8), "k": draw(2, 7, 2, 8), "v": draw(2, 7, 2, 8),
        "seqlens_k": torch.tensor([7, 3]),
    }  # fmt: skip


def paged_attention():
    return {
        "q": draw(2, 1, 4, 8), "k": draw(6, 16, 2, 8), "v": draw(6, 16, 2, 8),
        "block_table": torch.tensor([[2, 5], [1, -1]], dtype=torch.int32),
        "seqlens_k": torch.tensor([20, 7]),
    }  # fmt: skip


def paged_packed_attention():
    return paged_attention() | {
        "q": draw(5, 4, 8), "layout": "TND", "cu_seqlens_q": torch.tensor([0, 2, 5]),
    }  # fmt: skip


def causal_conv1d():
    return {
        "x": draw(1, 9, 8), "weight": draw(8, 4), "initial_state": draw(2, 8, 4),
        "output_final_state": True, "cu_seqlens": torch.tensor([0, 4, 9]),
    }  # fmt: skip


def causal_conv1d_qkv():
    return {
        "x": draw(1, 9, 48), "weight": draw(48, 4), "num_k_heads": 2, "num_v_heads": 2,
        "head_k_dim": 8, "head_v_dim": 8, "cu_seqlens": torch.tensor([0, 4, 9]),
    }  # fmt: skip


def causal_conv1d_update():
    return {
        "x": draw(2, 2, 8), "conv_state": draw(4, 8, 5), "weight": draw(8, 4),
        "conv_state_indices": torch.tensor([2, 1]), "num_accepted_tokens": torch.tensor([3, 1]),
        "intermediate_conv_window": draw(3, 2, 8, 3),
        "intermediate_state_indices": torch.tensor([2, 0]),
    }  # fmt: skip


def packed_causal_conv1d_update():
    return {
        "x": draw(9, 8), "conv_state": draw(4, 8, 3), "weight": draw(8, 4),
        "conv_state_indices": torch.tensor([2, 1, 0]),
        "query_start_loc": torch.tensor([0, 3, 3, 9], dtype=torch.int32),
    }  # fmt: skip


def chunk_gated_delta_rule():
    return {
        "q": draw(1, 20, 2, 16), "k": draw(1, 20, 2, 16), "v": draw(1, 20, 4, 16),
        "g": -draw(1, 20, 4).abs(), "beta": draw(1, 20, 4).sigmoid(),
        "initial_state": draw(2, 4, 16, 16), "output_final_state": True,
        "cu_seqlens": torch.tensor([0, 3, 20]), "chunk_size": 16,
    }  # fmt: skip


def chunk_kda():
    return chunk_gated_delta_rule() | {"g": -draw(1, 20, 4, 16).abs()}


def fused_recurrent_gated_delta_rule():
    inputs = chunk_gated_delta_rule()
    del inputs["chunk_size"]
    return inputs


def gated_delta_rule_update():
    return {
        "qkv": draw(4, 64), "a": draw(4, 4), "b": draw(4, 4), "A_log": draw(4), "dt_bias": draw(4),
        "state": draw(5, 4, 8, 8), "state_indices": torch.tensor([3, 1]), "state_v_first": True,
        "cu_seqlens": torch.tensor([0, 2, 4]), "num_accepted_tokens": torch.tensor([2, 0]),
        "intermediate_states": draw(3, 2, 4, 8, 8),
        "intermediate_state_indices": torch.tensor([2, 0]),
    }  # fmt: skip


def gated_delta_rule_update_by_token():
    inputs = gated_delta_rule_update()
    del inputs["intermediate_states"], inputs["intermediate_state_indices"]
    inputs["state_indices"] = torch.tensor([[3, 2], [1, -1]])
    return inputs | {"num_accepted_tokens": torch.tensor([2, 1])}


_UPDATE, _CONV = npu_ops.gated_delta_rule_update, npu_ops.causal_conv1d_update
INDICES = [
    Index("position_ids", npu_ops.apply_rotary_pos_emb, rope, between(0, 19)),
    Index("cu_seqlens", npu_ops.apply_rotary_pos_emb, packed_rope, wrong_starts, True),
    Index("cu_seqlens", npu_ops.apply_rotary_pos_emb_freqs, freqs, wrong_starts, True),
    Index("cu_seqlens", npu_ops.apply_rotary_pos_emb_freqs, freqs_of_a_rank, chunked_starts, True),
    Index("positions", npu_ops.apply_multimodal_rotary_pos_emb_cached, cached, between(0, 19)),
    *(
        Index(name, npu_ops.attention, call, wrong_starts, True)
        for call in (packed_attention, packed_attention_by_blocks)
        for name in ("cu_seqlens_q", "cu_seqlens_k")
    ),
    Index("seqlens_k", npu_ops.attention, padded_attention, between(0, 7), True),
    Index("seqlens_k", npu_ops.attention, paged_attention, between(0, 32)),
    Index("block_table", npu_ops.attention, paged_attention, between(0, 5)),
    Index("block_table", npu_ops.attention, paged_packed_attention, between(0, 5)),
    Index("cu_seqlens_q", npu_ops.attention, paged_packed_attention, wrong_starts),
    Index("cu_seqlens", npu_ops.causal_conv1d, causal_conv1d, wrong_starts, True),
    Index("cu_seqlens", npu_ops.causal_conv1d_qkv, causal_conv1d_qkv, wrong_starts, True),
    Index("conv_state_indices", _CONV, causal_conv1d_update, between(-1, 3)),
    Index("num_accepted_tokens", _CONV, causal_conv1d_update, between(1, 3)),
    Index("intermediate_state_indices", _CONV, causal_conv1d_update, between(-1, 2)),
    Index("query_start_loc", _CONV, packed_causal_conv1d_update, wrong_starts),
    Index("cu_seqlens", npu_ops.chunk_gated_delta_rule, chunk_gated_delta_rule, wrong_starts, True),
    Index("cu_seqlens", npu_ops.chunk_kda, chunk_kda, wrong_starts, True),
    Index(
        "cu_seqlens",
        npu_ops.fused_recurrent_gated_delta_rule,
        fused_recurrent_gated_delta_rule,
        wrong_starts,
        True,
    ),
    Index("state_indices", _UPDATE, gated_delta_rule_update, between(-1, 4)),
    Index("cu_seqlens", _UPDATE, gated_delta_rule_update, wrong_starts),
    Index("num_accepted_tokens", _UPDATE, gated_delta_rule_update, between(0, 2)),
    Index("intermediate_state_indices", _UPDATE, gated_delta_rule_update, between(0, 2)),
    Index("state_indices", _UPDATE, gated_delta_rule_update_by_token, between(-1, 4)),
    Index("num_accepted_tokens", _UPDATE, gated_delta_rule_update_by_token, between(1, 2)),
]


CALLS = dict.fromkeys(x.call for x in INDICES)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["kernels", "reference"])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("call", CALLS, ids=lambda f: f.__name__)
def test_wrong_index_values_raise(call, compiled, dtype):
    inputs, of_call = in_dtype(call(), dtype), [index for index in INDICES if index.call is call]
    function = of_call[0].function
    if compiled:
        torch.compiler.reset()
        function = torch.compile(function, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        function(**inputs)  # must pass
        for index in of_call:
            for what, value in index.wrong(inputs[index.name]).items():
                assert_refused(function, inputs, index.name, value, what)


def in_dtype(inputs, dtype):
    """Convert the floating tensors. No kernel takes fp64, so the reference runs such calls."""
    return {
        name: x.to(dtype) if isinstance(x, torch.Tensor) and x.is_floating_point() else x
        for name, x in inputs.items()
    }


def assert_refused(function, inputs, name, value, what):
    before = {n: x.clone() for n, x in inputs.items() if isinstance(x, torch.Tensor)}
    with pytest.raises(ValueError) as error:
        function(**inputs | {name: value})
        pytest.fail(f"{name}, {what}: {value.tolist()} is taken", pytrace=False)
    named = "positions" if name == "position_ids" else name  # its name in the operator
    assert name in str(error.value) or named in str(error.value), (what, error.value)
    assert all(torch.equal(inputs[n], x) for n, x in before.items()), what


# More names of arguments with index values: those that only operators use.
OPERATORS_NAMES = {"positions", "indices", "accepted", "starts", "window_indices"}


OPERATORS = [x for x in gc.get_objects() if isinstance(x, Operator)]


def test_every_operator_checks_the_index_values_that_it_follows():
    names = OPERATORS_NAMES | {index.name for index in INDICES}
    following = []
    for operator in OPERATORS:
        if names & {argument.name for argument in operator.inputs}:
            following.append(operator.name)
            assert operator._check_indices, f"{operator.name}: give the Operator check_indices"
    assert len(following) >= 13, following
