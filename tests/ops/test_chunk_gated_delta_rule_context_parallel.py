"""The chunked gated delta rule with a sequence over several ranks: as on one."""

import pytest
import torch
from torch import distributed, multiprocessing

import npu_ops
from npu_ops.core.compare import Tolerance, assert_close

BY_TOKEN = ("q", "k", "v", "g", "beta")
CLOSE = Tolerance(1e-5, 1e-5)


def inputs(heads=1, value_heads=2, tokens=75, keys=16, values=24, batch=2):
    torch.manual_seed(0)
    return {
        "q": torch.nn.functional.normalize(torch.rand(batch, tokens, heads, keys), dim=-1),
        "k": torch.nn.functional.normalize(torch.rand(batch, tokens, heads, keys), dim=-1),
        "v": torch.randn(batch, tokens, value_heads, values),
        "g": -torch.rand(batch, tokens, value_heads) / 50,
        "beta": torch.rand(batch, tokens, value_heads),
    }


def spans(tokens, ranks):
    """Of unequal lengths, and the third of nothing."""
    cuts = [0, tokens // 3, tokens - 17, tokens - 17, tokens] if ranks == 4 else [0, 40, tokens]
    return [slice(*ends) for ends in zip(cuts, cuts[1:], strict=False)]


def check_group(group, state_v_first):
    """Outputs, the last rank's final state and all gradients are those of the whole."""
    rank, ranks = distributed.get_rank(group), distributed.get_world_size(group)
    settings = {"output_final_state": True, "chunk_size": 16, "state_v_first": state_v_first}
    whole = {name: x.requires_grad_() for name, x in inputs().items()}
    weight = torch.randn(whole["v"].shape)
    o, final = npu_ops.chunk_gated_delta_rule(**whole, **settings)
    ((o * weight).sum() + final.square().sum()).backward()
    span = spans(o.shape[1], ranks)[rank]
    own = {name: x.detach()[:, span].clone().requires_grad_() for name, x in whole.items()}
    read, state = npu_ops.chunk_gated_delta_rule(**own, **settings, cp_group=group)
    last = rank == ranks - 1
    ((read * weight[:, span]).sum() + last * state.square().sum()).backward()
    assert_close("o", read, o[:, span], CLOSE)
    if last:
        assert_close("state", state, final, CLOSE)
    for name, x in own.items():
        assert_close(name, x.grad, whole[name].grad[:, span], CLOSE)


def work(rank, meeting):
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", f"file://{meeting}", rank=rank, world_size=4)
    halves = [distributed.new_group([0, 1]), distributed.new_group([2, 3])]
    check_group(halves[rank // 2], state_v_first=True)
    check_group(distributed.group.WORLD, state_v_first=False)
    distributed.destroy_process_group()


def test_two_and_four_ranks_are_one(tmp_path):
    multiprocessing.spawn(work, (tmp_path / "meeting",), nprocs=4)


@pytest.mark.parametrize(
    "name, value",
    [("initial_state", torch.zeros(2, 2, 16, 24)), ("cu_seqlens", torch.tensor([0, 75]))],
)
def test_what_does_not_go_together(name, value):
    given = inputs(batch=2 if name == "initial_state" else 1) | {name: value}
    with pytest.raises(ValueError, match=f"^{name}: got one with cp_group, needs None"):
        npu_ops.chunk_gated_delta_rule(**given, cp_group=object())
