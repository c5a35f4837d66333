"""Sequences that a server skips: no function reads what their rows hold, on any device.

Also the gate of gated_delta_rule_update where one of its factors overflows.
"""

import pytest
import torch
from support import floats, forced, implementations, on_device

import npu_ops
from npu_ops.core.registry import Table

NAN = float("nan")
RULE, CONV = "gated_delta_rule_update", "causal_conv1d_update"
of_rule, of_conv = (
    pytest.mark.parametrize("implementation, device", implementations(Table.tables[op]))
    for op in (RULE, CONV)
)


def draw(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape)))


def rule(**changes):
    """Return a call of three sequences with two tokens each; the second is skipped."""
    return {
        "qkv": draw(6, 2 * 2 * 8 + 4 * 12) + 0.5, "a": draw(6, 4), "b": draw(6, 4),
        "A_log": draw(4), "dt_bias": draw(4), "state": draw(9, 4, 12, 8),
        "state_indices": torch.tensor([7, -1, 2]), "state_v_first": True,
    } | changes  # fmt: skip


def conv(**changes):
    return {
        "x": draw(3, 2, 8), "conv_state": draw(5, 8, 5), "weight": draw(8, 4),
        "conv_state_indices": torch.tensor([4, -1, 0]),
    } | changes  # fmt: skip


def run(function, call, implementation, device):
    """Return the output and the written tensors, on the CPU."""
    call = on_device({n: x.clone() if isinstance(x, torch.Tensor) else x for n, x in call.items()},
                     device)  # fmt: skip
    with forced(implementation, function):
        out = getattr(npu_ops, function)(**call)
    written = ("state", "conv_state", "intermediate_conv_window")
    return [out.cpu(), *(call[name].cpu() for name in written if name in call)]


def rules():
    kept = {"intermediate_states": torch.zeros(3, 4, 4, 12, 8)}
    by_token = {"state_indices": torch.tensor([[7, 1], [-1, -1], [2, 4]])}
    lengths = {"cu_seqlens": torch.tensor([0, 1, 5, 6])}
    return {
        "accepted": kept | {"num_accepted_tokens": torch.tensor([0, 9, 0])},
        "accepted, below 0": kept | {"num_accepted_tokens": torch.tensor([0, -5, 0])},
        "row": kept | {"intermediate_state_indices": torch.tensor([0, 77, 2])},
        "row of another": kept | {"intermediate_state_indices": torch.tensor([0, 2, 2])},
        "none accepted": by_token | {"num_accepted_tokens": torch.tensor([1, 0, 2])},
        "too many accepted": by_token | {"num_accepted_tokens": torch.tensor([1, 9, 2])},
        "too many tokens": by_token | lengths,
    }  # fmt: skip


def convs():
    window = {"intermediate_conv_window": torch.zeros(3, 2, 8, 3)}
    lengths = {"x": draw(6, 8), "query_start_loc": torch.tensor([0, 1, 5, 6])}
    return {
        "accepted": {"num_accepted_tokens": torch.tensor([1, 9, 2])},
        "none accepted": {"num_accepted_tokens": torch.tensor([1, 0, 2])},
        "row": window | {"intermediate_state_indices": torch.tensor([0, 77, 2])},
        "row of another": window | {"intermediate_state_indices": torch.tensor([0, 2, 2])},
        "too many tokens": lengths | {"num_accepted_tokens": torch.tensor([1, 1, 2])},
    }  # fmt: skip


def check(function, call, tokens, implementation, device):
    """Fill the skipped sequence's rows with NaN. Its output is 0, and no other result changes.

    tokens: the skipped rows of each argument that has a row per token.
    """
    for name in tokens:
        call[name] = call[name].clone()
        rows = call[name].flatten(0, 1) if call[name].dim() == 3 else call[name]
        rows[tokens[name]] = NAN
    rows = next(iter(tokens.values()))
    out, *written = run(function, call, implementation, device)
    flat = out.flatten(0, 1) if out.dim() == 3 and function == CONV else out
    assert (flat[rows] == 0).all()
    right = {"num_accepted_tokens": 1, "intermediate_state_indices": 1}
    for name in right.keys() & call.keys():
        call[name] = call[name].clone()
        call[name][1] = right[name]
    expected, *after = run(function, call, implementation, device)
    assert torch.equal(out, expected) and all(map(torch.equal, written, after))


@pytest.mark.parametrize("what", rules())
@of_rule
def test_of_the_delta_rule(what, implementation, device):
    call = rule(**rules()[what])
    rows = slice(1, 5) if "cu_seqlens" in call else slice(2, 4)
    check(RULE, call, dict.fromkeys(("qkv", "a", "b"), rows), implementation, device)


@pytest.mark.parametrize("what", convs())
@of_conv
def test_of_the_convolution(what, implementation, device):
    call = conv(**convs()[what])
    rows = slice(1, 5) if "query_start_loc" in call else slice(2, 4)
    check(CONV, call, {"x": rows}, implementation, device)


@pytest.mark.parametrize("A_log, raw", [(89, -120), (89, -20), (95, -100), (170, -180)])
@of_rule
def test_a_gate_of_factors_beyond_floats(A_log, raw, implementation, device):
    """exp(A_log) overflows and softplus underflows, but their product is finite and exact."""
    call = rule(a=torch.full((6, 4), float(raw)), A_log=torch.full((4,), float(A_log)))
    call |= {"dt_bias": torch.zeros(4), "state_indices": torch.tensor([7, 1, 2])}
    expected = run(RULE, floats(call, torch.float64), "reference", "cpu")
    for x, right in zip(run(RULE, call, implementation, device), expected, strict=True):
        torch.testing.assert_close(x.double(), right, rtol=1e-4, atol=1e-5)
