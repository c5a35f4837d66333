"""Check that rejected and disabled ops are left to Megatron, and that the others are replaced."""

from __future__ import annotations

import sys

from megatron_checks.release import ROPE, calls_of, check, gdn, states, targets
from megatron_checks.results import angles, leaf


@check("early")
def gated_delta_net_is_not_half_replaced():
    """Without fla and with an op disabled, no layer can be built, as without npu-ops."""
    import megatron_cpu
    import npu_ops_adapters

    from npu_ops.core import env

    with env.override(disable=frozenset({"l2norm"})):
        found = states(npu_ops_adapters.apply())
    assert found[f"{gdn().__name__}:HAVE_FLA", "gated_delta_net"] == (
        "refused: npu-ops cannot create the replacement: ValueError: l2norm: got None, "
        "needs the function of npu-ops or fla"
    )
    try:
        megatron_cpu.hybrid(deterministic_mode=False)
    except ImportError as error:
        assert "FLA is not installed" in str(error)
    else:
        raise AssertionError("a layer was built without l2norm")
    npu_ops_adapters.revert()


@check("early")
def an_unknown_signature_is_refused():
    import npu_ops_adapters

    module, target = sys.modules[ROPE], (f"{ROPE}:_apply_rotary_pos_emb_thd", "rope")
    original = module._apply_rotary_pos_emb_thd
    module._apply_rotary_pos_emb_thd = changed_upstream
    try:
        found = states(npu_ops_adapters.apply())
        assert found.pop(target).startswith("refused: expected (t, cu_seqlens, freqs, "), found
        assert states(npu_ops_adapters.plan())[target].endswith(
            "got (t, freqs, plan) of megatron_checks.refusals.changed_upstream"
        )
        assert found == dict.fromkeys(targets() - {target}, "applied")
        assert module._apply_rotary_pos_emb_thd is changed_upstream
        npu_ops_adapters.revert()
    finally:
        module._apply_rotary_pos_emb_thd = original


def changed_upstream(t, freqs, plan):
    return t


@check("early")
def a_disabled_op_is_left_to_megatron():
    import npu_ops_adapters

    from npu_ops.core import env

    with env.override(disable=frozenset({"rope", "jit_fuser"})):
        found = states(npu_ops_adapters.apply())
    for (target, op), state in found.items():
        disabled = op in ("rope", "jit_fuser")
        assert state == ("disabled by NPU_OPS_DISABLE" if disabled else "applied"), (target, op)
    import torch

    t, rope = leaf(6, 2, 3, 24, dtype=torch.float32), sys.modules[ROPE]
    for batch in (1, 2):  # mrope is not disabled
        freqs = angles(6, batch, 1, 16)
        _, calls = calls_of("apply_rotary_pos_emb_freqs", rope._apply_rotary_pos_emb_bshd, t, freqs)
        assert calls == batch - 1
    npu_ops_adapters.revert()
