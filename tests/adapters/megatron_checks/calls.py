"""Check that Megatron's calls reach npu_ops: in a layer's step, and in Gated Delta Net."""

from __future__ import annotations

import pathlib
import sys

from megatron_checks.release import BDA, CALLS, ROPE, SWIGLU, calls_of, check, gdn, gdn_targets
from megatron_checks.results import (
    angles,
    apply,
    configurations,
    gated_delta_net_layer,
    leaf,
)


@check("early")
def calls_reach_npu_ops():
    import torch

    module, rope = sys.modules[BDA], sys.modules[ROPE]
    x, residual = (leaf(3, 16, dtype=torch.float32, seed=seed) for seed in (0, 1))
    for function in (
        module.get_bias_dropout_add(True, True),
        module.get_bias_dropout_add(False, True),
        module.get_bias_dropout_add(True, False),
        module.get_bias_dropout_add(False, False),
    ):
        assert calls_of("bias_dropout_add", function, (x, None), residual, 0.1)[1] == 1
        assert calls_of("bias_dropout_add", function, (x, None), residual, 1.0)[1] == 0
        assert calls_of("bias_dropout_add", function, (x, None), residual[:1], 0.1)[1] == 0
    t = leaf(6, 2, 3, 24, dtype=torch.float32)
    name = "apply_rotary_pos_emb_freqs"
    for batch in (1, 2):
        freqs = angles(6, batch, 1, 16)
        assert calls_of(name, rope._apply_rotary_pos_emb_bshd, t, freqs)[1] == 1
    for config in configurations():
        assert config.apply_rope_fusion
        freqs = angles(6, 2 if config.mrope_section else 1, 1, 16)
        assert calls_of(name, apply, t, freqs, config)[1] == 1
        assert calls_of(name, apply, t, freqs, config, mscale=1.3)[1] == 1
    assert calls_of(name, rope._apply_rotary_pos_emb_bshd, t, angles(6, 2, 3, 16))[1] == 0


@check("early")
def swiglu_calls_reach_npu_ops():
    """Each of Megatron's SwiGLU functions gives the formula's results, forward and backward."""
    import torch
    from npu_ops_tools import demo_model

    module, dtype = sys.modules[SWIGLU], torch.float32
    x, bias, weights = (
        leaf(*shape, dtype=dtype, seed=i) for i, shape in enumerate([(6, 16), (16,), (6, 1)])
    )

    def formula(x, bias, weights=None):
        gate, up = (x if bias is None else x + bias).chunk(2, -1)
        return torch.nn.functional.silu(gate) * up * (1 if weights is None else weights)

    for function, given in (
        (module.bias_swiglu_impl, (x, None)),
        (module.bias_swiglu_impl, (x, bias)),
        (module.weighted_bias_swiglu_impl, (x, None, weights)),
    ):
        wrt = [tensor for tensor in given if tensor is not None]
        with demo_model.Counter() as counter:
            found = torch.autograd.grad(function(*given).square().sum(), wrt)
        again = len(given) == 3  # the gradient of the weights needs the result
        assert counter.calls["npu_ops.swiglu.default"] == 1 + again
        assert counter.calls["npu_ops.swiglu_backward.default"] == 1
        expected = formula(*given)
        expected = torch.autograd.grad(expected.square().sum(), wrt)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@check("early")
def swiglu_of_other_calls_is_megatrons():
    """Megatron computes float64 calls, and all with NPU_OPS_CONSISTENT, with the formula's bits."""
    import torch
    from npu_ops_tools import demo_model

    from npu_ops.core import env

    module = sys.modules[SWIGLU]
    wide, narrow = (leaf(6, 16, dtype=t) for t in (torch.float64, torch.bfloat16))
    for x, consistent in ((wide, ""), (narrow, "tokens")):
        with env.override(consistent=consistent), demo_model.Counter() as counter:
            out = module.bias_swiglu_impl(x, None)
            (found,) = torch.autograd.grad(out.square().sum(), x)
        gate, up = x.detach().chunk(2, -1)
        assert torch.equal(out, torch.nn.functional.silu(gate) * up)
        assert not [name for name in counter.calls if "swiglu" in name]
        assert found.dtype == x.dtype


@check("early")
def gated_delta_net_calls_reach_npu_ops():
    """All three layers of Gated Delta Net call npu-ops, forward and backward."""
    import megatron_cpu
    from npu_ops_tools import demo_model

    assert not demo_model.lacks_kernels()
    before, model = dict(CALLS), megatron_cpu.hybrid()
    with demo_model.Counter() as counter:
        megatron_cpu.step(model)
    has_method = any(op == "gdn_gate" for _, op in gdn_targets())
    expected = {
        "chunk_gated_delta_rule": 3,
        "causal_conv1d": 3,
        "l2norm": 3 if has_method else 6,  # from 0.18 on one call for q and k
        "gdn_gate": 3 if has_method else 0,
        "rms_norm_gated": 3,
    }
    for name, number in expected.items():
        assert CALLS[name] - before[name] == number, name
        for operator in (name, f"{name}_backward") if number else ():
            assert counter.calls[f"npu_ops.{operator}.default"] == number, operator


@check("early")
def gated_delta_net_keeps_packed_sequences_apart():
    """Check Megatron-Core 0.18 and newer; earlier releases reject packed sequences."""
    import torch
    from megatron.core.packed_seq_params import PackedSeqParams

    lengths = [7, 70, 3]
    starts = torch.tensor([0, 7, 77, 80], dtype=torch.int32)
    packing = PackedSeqParams(qkv_format="thd", cu_seqlens_q=starts, cu_seqlens_kv=starts)
    layer, hidden = gated_delta_net_layer(), leaf(80, 1, 64, dtype=torch.float32, grad=False)
    try:
        packed, _ = layer(hidden, None, packed_seq_params=packing)
    except NotImplementedError:
        assert "cu_seqlens" not in pathlib.Path(gdn().__file__).read_text()
        return
    alone = [layer(part, None)[0] for part in hidden.split(lengths)]
    assert (packed - torch.cat(alone)).abs().max() < 1e-5
