"""A sequence over several ranks: as on one."""

import pytest
import torch
from torch import distributed, multiprocessing

import npu_ops
from npu_ops.core.compare import Tolerance, assert_close

CLOSE = Tolerance(1e-5, 1e-5)
TOKENS = 75
CUTS = {2: [0, 40, TOKENS], 4: [0, 2, TOKENS - 17, TOKENS - 17, TOKENS]}  # of 2 tokens, of none


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


def check_group(call, group, device="cpu"):
    """Outputs, the last rank's final state and all gradients are those of the whole."""
    function, make = CALLS[call]
    rank, ranks = distributed.get_rank(group), distributed.get_world_size(group)
    span, last = slice(*CUTS[ranks][rank : rank + 2]), rank == ranks - 1
    whole = {name: x.to(device).requires_grad_() for name, x in make().items()}
    own = {name: _part(x, span).detach().clone().requires_grad_() for name, x in whole.items()}
    out, final = function(**whole)
    weight = torch.randn(out.shape).to(device)
    ((out * weight).sum() + final.square().sum()).backward()
    part, state = function(**own, cp_group=group)
    ((part * weight[:, span]).sum() + last * state.square().sum()).backward()
    assert_close("out", part, out[:, span], CLOSE)
    if last:
        assert_close("state", state, final, CLOSE)
    for name, x in own.items():
        if not _has_tokens(x):
            distributed.all_reduce(x.grad, group=group)  # as a trainer does for its parameters
        assert_close(name, x.grad, _part(whole[name].grad, span), CLOSE)


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
    distributed.destroy_process_group()


def test_two_and_four_ranks_are_one(tmp_path):
    multiprocessing.spawn(work, (tmp_path / "meeting",), nprocs=4)


@pytest.mark.parametrize("call", ["v first", "silu"])
@pytest.mark.parametrize("name", ["initial_state", "cu_seqlens"])
def test_what_does_not_go_together(call, name):
    function, make = CALLS[call]
    given = make(batch=1)
    state = torch.zeros(1, 2, 24, 16) if call == "v first" else torch.zeros(1, 24, 4)
    given[name] = {"initial_state": state, "cu_seqlens": torch.tensor([0, TOKENS])}[name]
    with pytest.raises(ValueError, match=f"^{name}: got one with cp_group, needs None"):
        function(**given, cp_group=object())
