"""gated_delta_rule_update with other beta and threshold of softplus has the gates of gdn_gate."""

import pytest
import torch
from support import forced, implementations

import npu_ops
from npu_ops.core.compare import assert_close
from npu_ops.ops.gated_delta_rule_update import op
from npu_ops.ops.gated_delta_rule_update.cases import TOLERANCES


def arguments(device):
    """Return six sequences of four tokens on a pool of nine slots."""
    draw = torch.Generator().manual_seed(0)
    shapes = {
        "qkv": (24, 80), "a": (24, 4), "b": (24, 4), "A_log": (4,), "dt_bias": (4,),
        "state": (9, 4, 12, 8),
    }  # fmt: skip
    drawn = {name: torch.randn(shape, generator=draw) for name, shape in shapes.items()}
    drawn |= {"state_indices": torch.tensor([7, 0, 2, 5, 8, 3])}
    return {name: x.to(device) for name, x in drawn.items()} | {"state_v_first": True}


@pytest.mark.parametrize("implementation, device", implementations(op.forward.table))
@pytest.mark.parametrize("beta, threshold", [(0.5, 20.0), (3.0, 0.0), (1.0, 2.0)])
def test_a_step_by_another_softplus(beta, threshold, implementation, device):
    inputs, bent = arguments(device), {"softplus_beta": beta, "softplus_threshold": threshold}
    before = inputs["state"].clone()
    with forced(implementation, "gated_delta_rule_update"):
        if implementation == "ascendc":
            says = f"softplus has beta {beta}, threshold {threshold}"
            with pytest.raises(RuntimeError, match=says):
                npu_ops.gated_delta_rule_update(**inputs, **bent)
            return
        o = npu_ops.gated_delta_rule_update(**inputs, **bent)
    q, k, v = inputs["qkv"].view(6, 4, -1).split((16, 16, 48), -1)
    gates = npu_ops.gdn_gate(*(inputs[n] for n in ("a", "A_log", "dt_bias", "b")), **bent)
    g, size = (x.view(6, 4, 4) for x in gates)
    expected, final = npu_ops.fused_recurrent_gated_delta_rule(
        q.unflatten(-1, (2, 8)), k.unflatten(-1, (2, 8)), v.unflatten(-1, (4, 12)), g, beta=size,
        use_qk_l2norm_in_kernel=True, initial_state=before[inputs["state_indices"]],
        output_final_state=True, state_v_first=True,
    )  # fmt: skip
    assert_close("o", o, expected.flatten(0, 1), TOLERANCES[torch.float32])
    after = inputs["state"][inputs["state_indices"]]
    assert_close("state", after, final, TOLERANCES[torch.float32])


@pytest.mark.parametrize("name, value", [("softplus_beta", 0.0), ("softplus_threshold", -1.0)])
def test_mistake(name, value):
    with pytest.raises(ValueError, match=f"^{name}: got {value}, needs "):
        npu_ops.gated_delta_rule_update(**arguments("cpu"), **{name: value})
