"""Calls beyond an op's cases: more valid ones, and ones with invalid index values.

A device raises no error: outputs of an affected sequence are NaN, its state is unchanged, and other
sequences are correct. Their expected results come from a valid call that skips the affected one.
"""

from __future__ import annotations

import dataclasses
import functools

import torch


@dataclasses.dataclass(frozen=True)
class Wrong:
    """A call with invalid values.

    given: its arguments.
    right: arguments of a valid call with the same effect on everything else.
    nan: rows of the first output that must be NaN.
    columns: columns of its state; the valid call's state has more.
    """

    name: str
    given: dict
    right: dict
    nan: list[int]
    columns: int | None = None

    def correct(self, expected: dict) -> None:
        """Change the valid call's results to those expected of this call."""
        expected["output 0"][self.nan] = torch.nan
        if self.columns:
            state = expected["conv_state after"]
            expected["conv_state after"] = state[..., : self.columns]


def _normal():
    return functools.partial(torch.randn, generator=torch.Generator().manual_seed(0))


def _integers(values: list) -> torch.Tensor:
    return torch.tensor(values)


def _call(name: str, common: dict, wrong: dict, right: dict, nan: list[int]) -> Wrong:
    given, skipped = ({k: _integers(v) for k, v in x.items()} for x in (wrong, right))
    return Wrong(name, common | given, common | skipped, nan)


# ---- ops with gradients ----


def _more_biases() -> dict[str, dict]:
    draw = _normal()
    of_all = {name: draw(63, 129) for name in ("x", "bias", "residual")}
    return {"a bias of x's shape, in fp32": of_all | {"p": 0.1, "training": True}}


def _more_heads() -> dict[str, dict]:
    draw = _normal()

    def call(tokens: int, heads: int, **weights) -> dict:
        given = {name: draw(tokens, 16) for name in ("cos", "sin")}
        given |= {name: draw(16) for name in ("q_weight", "k_weight")}
        width = 16 * (heads + 2 * 2)
        return given | weights | {"qkv": draw(tokens, width), "num_heads": heads, "num_kv_heads": 2}

    return {
        "weights of two dtypes": call(3, 2, k_weight=draw(16).bfloat16()),
        # One token of 16 heads: eight for each of two cores, the first eight all of q.
        "pieces of eight heads": call(1, 12),
    }


def _more_norms() -> dict[str, dict]:
    draw = _normal()
    x = {"x": draw(320, 64), "weight": draw(64), "z": draw(320, 64)}
    z = draw(160, 128).as_strided((160, 2, 64), (128, 32, 1))
    overlapping = {"x": draw(160, 2, 64), "weight": draw(64), "z": z}
    # Eight rows for each of 40 cores, so that buffers with one number per row have eight.
    return {"tiles of eight rows": x, "rows that overlap": overlapping}


# ---- causal_conv1d_update ----


def _more_convolutions() -> dict[str, dict]:
    draw = _normal()
    return {
        "one x for all": {
            "x": draw(1, 1, 8).expand(2, 3, 8), "conv_state": draw(2, 8, 3), "weight": draw(8, 4),
        },
        "a few of many columns": {
            "x": draw(2, 1, 8), "conv_state": draw(2, 8, 40), "weight": draw(8, 20)[:, 12:16],
        },
        "slots between each other's channels": {
            "x": draw(2, 1, 8), "conv_state": draw(8, 2, 3).transpose(0, 1), "weight": draw(8, 4),
        },
        "channels that fill no instruction": {
            "x": draw(2, 2, 15).bfloat16(), "conv_state": draw(2, 15, 3).bfloat16(),
            "weight": draw(15, 4),
        },
    }  # fmt: skip


def _longer_than_the_state() -> Wrong:
    """Return a call with six tokens and states of four columns, which have space for two tokens."""
    draw = _normal()
    state = draw(1, 8, 8)
    given = {
        "x": draw(6, 8), "conv_state": state[..., :4].contiguous(), "weight": draw(8, 4),
        "query_start_loc": _integers([0, 6]), "num_accepted_tokens": _integers([1]),
    }  # fmt: skip
    return Wrong("more tokens than columns", given, given | {"conv_state": state}, [], columns=4)


def _convolutions() -> list[Wrong]:
    draw = _normal()
    padded = {
        "x": draw(7, 2, 8), "conv_state": draw(9, 8, 5), "weight": draw(8, 4), "bias": draw(8),
        "activation": "silu", "intermediate_conv_window": draw(6, 2, 8, 3),
    }  # fmt: skip
    packed = {"x": draw(9, 8), "conv_state": draw(2, 8, 3), "weight": draw(8, 4)}
    return [
        # Slots past and before the pool, accepted counts that are zero or too large, windows past
        # the last.
        _call(
            "slots and counts", padded,
            {"conv_state_indices": [2, 0, 9, -2, 4, 5, 7],
             "num_accepted_tokens": [1, 3, 1, 1, 0, 4, 2],
             "intermediate_state_indices": [5, -1, 0, 1, 2, 3, 6]},
            {"conv_state_indices": [2, 0, -1, -1, -1, -1, 7],
             "num_accepted_tokens": [1, 3, 1, 1, 1, 1, 2],
             "intermediate_state_indices": [5, -1, 0, 1, 2, 3, -1]},
            [2, 3, 4, 5],
        ),
        _call("an end behind the tokens", packed, {"query_start_loc": [0, 3, 12]},
              {"query_start_loc": [0, 3, 9], "conv_state_indices": [-1, -1]}, list(range(9))),
        _call("a negative start", packed, {"query_start_loc": [-2, 3, 9]},
              {"query_start_loc": [0, 3, 9], "conv_state_indices": [-1, -1]}, list(range(9))),
        _longer_than_the_state(),
    ]  # fmt: skip


# ---- gated_delta_rule_update ----


def _delta(tokens: int, slots: int, **more) -> dict:
    draw = _normal()
    return {
        "qkv": draw(tokens, 64), "a": draw(tokens, 4), "b": draw(tokens, 4), "A_log": draw(4),
        "dt_bias": draw(4), "state": draw(slots, 4, 8, 8), "state_v_first": True,
    } | more  # fmt: skip


def _more_delta_rules() -> dict[str, dict]:
    draw = _normal()
    apart = draw(1, 2, 8).expand(3, 2, 8), draw(3, 2, 8), draw(1, 4, 8).expand(3, 4, 8)
    no_keys = _delta(9, 3, state_indices=_integers([1]))
    no_keys["qkv"][7, :32] = 0  # the eighth token
    return {
        "q and v of one token for all": _delta(
            3, 2, qkv=apart, a=draw(1, 4).expand(3, 4), state_indices=_integers([1])
        ),
        "a query and keys of zeros": no_keys,
        "no norm": _delta(
            4, 3, qkv=draw(4, 128), state=draw(3, 4, 16, 16), state_indices=_integers([1, 2]),
            use_qk_l2norm_in_kernel=False,
        ),
        "many keys and values, keys first": _delta(
            1, 2, qkv=draw(1, 40 + 40 + 160), state=draw(2, 1, 40, 160), a=draw(1, 1), b=draw(1, 1),
            A_log=draw(1), dt_bias=draw(1), state_v_first=False, state_indices=_integers([1]),
        ),
    }  # fmt: skip


def _slots_of_tokens() -> list[Wrong]:
    """Return calls in which each token's state has its own slot."""
    return [
        # States from past and before the pool, accepted counts that are zero or too large. The last
        # state of the last sequence but one has no slot.
        _call(
            "slots and counts", _delta(18, 20),
            {"state_indices": [[7, 1], [20, 3], [-2, 4], [5, 6], [8, 9], [10, -1], [11, 12],
                               [13, 20], [14, 15]],
             "num_accepted_tokens": [1, 1, 1, 0, 3, 1, 2, 1, 3]},
            {"state_indices": [[7, 1], [-1, -1], [-1, -1], [-1, -1], [-1, -1], [10, -1], [11, 12],
                               [13, -1], [-1, -1]],
             "num_accepted_tokens": [1, 1, 1, 1, 1, 1, 2, 1, 1]},
            [2, 3, 4, 5, 6, 7, 8, 9, 15, 16, 17],
        ),
        _call("a place before the pool", _delta(4, 6),
              {"state_indices": [[4, -2], [1, 2]]}, {"state_indices": [[4, -1], [1, 2]]}, [1]),
        # The valid call skips three tokens as two sequences.
        _call("more tokens than slots", _delta(5, 6),
              {"state_indices": [[4, 3], [1, 2]], "cu_seqlens": [0, 3, 5]},
              {"state_indices": [[-1, -1], [-1, -1], [1, 2]], "cu_seqlens": [0, 2, 3, 5]},
              [0, 1, 2]),
    ]  # fmt: skip


def _kept_states() -> list[Wrong]:
    """Return calls that store the state after each token in a row of `intermediate_states`."""
    kept = _normal()(9, 2, 4, 8, 8)
    return [
        # A negative accepted count, one above the number of stored states, rows past the last and
        # before the first, and a sequence without initial state.
        _call(
            "rows and counts", _delta(16, 10, intermediate_states=kept),
            {"state_indices": [0, 1, 2, 3, 4, 5, 6, 7],
             "num_accepted_tokens": [0, -1, 3, 0, 0, 1, 0, 2],
             "intermediate_state_indices": [0, 1, 2, 9, -2, -1, -1, 8]},
            {"state_indices": [0, -1, -1, -1, -1, -1, 6, 7],
             "num_accepted_tokens": [0, 0, 0, 0, 0, 0, 0, 2],
             "intermediate_state_indices": [0, -1, -1, -1, -1, -1, -1, 8]},
            [2, 3, 4, 5, 6, 7, 8, 9, 10, 11],
        ),
        _call("more tokens than are kept", _delta(5, 6, intermediate_states=kept),
              {"state_indices": [4, 1], "intermediate_state_indices": [0, 3],
               "cu_seqlens": [0, 3, 5]},
              {"state_indices": [-1, -1, 1], "intermediate_state_indices": [-1, -1, 3],
               "cu_seqlens": [0, 2, 3, 5]},
              [0, 1, 2]),
    ]  # fmt: skip


def _starts() -> list[Wrong]:
    """Return calls with one wrong start: all tokens become NaN, and all states are unchanged."""
    wrong = {
        "a start that is not 0": [1, 2, 2, 9],
        "an end behind the tokens": [0, 2, 2, 12],
        "starts behind the tokens": [0, 2, 12, 13],
        "a start before the first": [0, -1, 3, 8],
    }
    return [
        _call(name, _delta(9, 6), {"state_indices": [4, 1, 2], "cu_seqlens": starts},
              {"state_indices": [-1, -1, -1], "cu_seqlens": [0, 2, 2, 9]}, list(range(9)))
        for name, starts in wrong.items()
    ]  # fmt: skip


MORE = {
    "bias_dropout_add": _more_biases(),
    "causal_conv1d_update": _more_convolutions(),
    "gated_delta_rule_update": _more_delta_rules(),
    "qk_norm_rope": _more_heads(),
    "rms_norm_gated": _more_norms(),
}
WRONG = {
    "causal_conv1d_update": _convolutions(),
    "gated_delta_rule_update": [*_slots_of_tokens(), *_kept_states(), *_starts()],
}
