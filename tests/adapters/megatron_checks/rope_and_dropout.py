"""Check checkpointing, Megatron-Bridge, packed rope, and dropout under recomputation."""

from __future__ import annotations

import functools
import inspect
import sys
import types

from megatron_checks.release import BDA, BRIDGE, ROPE, calls_of, check
from megatron_checks.results import angles, apply, leaf, outcome, packed


@check("early")
def lists_of_tensors_pass_checkpointing():
    """Arguments and results may be lists of tensors, like Qwen3-VL's deepstack features."""
    import torch
    from megatron.core import tensor_parallel

    def block(x, features, nothing, scale):
        out = x * scale + sum(features)
        return out.square(), [out * 2, out * 3], nothing

    def run(how):
        x, *features = (leaf(4, 8, dtype=torch.float32, seed=seed) for seed in range(3))
        out, more, nothing = how(block, x, features, None, torch.tensor(2.0))
        assert nothing is None and type(more) is list and len(more) == 2
        (out.sum() + sum(more).sum()).backward()
        return [out.detach(), x.grad, *(feature.grad for feature in features)]

    expected = run(lambda function, *args: function(*args))
    actual = run(lambda function, *args: tensor_parallel.checkpoint(function, False, *args))
    assert all(a.equal(b) for a, b in zip(actual, expected, strict=True))
    x = leaf(3, dtype=torch.float32)
    # one result, not a tuple
    tensor_parallel.checkpoint(lambda x: x * 2, False, x).sum().backward()
    assert x.grad.equal(torch.full((3,), 2.0))


@check("early")
def bridge_calls_reach_npu_ops():
    import torch

    function = sys.modules[f"{BRIDGE}.attention"].apply_rotary_pos_emb_absolute
    name, config = "apply_rotary_pos_emb_freqs", types.SimpleNamespace(apply_rope_fusion=False)
    config.rotary_interleaved = config.apply_rotary_pos_emb_in_fp32 = False
    t, freqs = leaf(6, 2, 3, 24, dtype=torch.bfloat16), angles(6, 2, 1, 16)
    out, calls = calls_of(name, function, t, freqs, config)
    assert calls == 1 and out.dtype == torch.bfloat16
    assert calls_of(name, function, t[:, 0], freqs[:, :1], config, torch.zeros(2))[1] == 1
    assert calls_of(name, function, t, angles(6, 2, 3, 16), config)[1] == 0
    config.apply_rope_fusion = True
    try:
        function(t, freqs, config)
    except AssertionError:
        return
    raise RuntimeError("Bridge says that rope fusion is wrong here")


@check("early")
def bridge_is_not_passed_what_it_does_not_have():
    from megatron.bridge.models.qwen_vl.modelling_qwen3_vl import model, text_model

    assert text_model.Qwen3VLTextRotaryEmbedding().forward(1, 2, packed_seq_params=3) == 1
    assert text_model.Qwen3VLMoETextRotaryEmbedding().forward(1, 2, 3) == (1, 3)
    assert model.Qwen3VLModel().forward(1, loss_mask=2) == 1
    try:
        model.Qwen3VLModel().forward(1, labels=1, loss_mask=2)
    except TypeError as error:
        assert "loss_mask" in str(error)
    else:
        raise AssertionError("a mask of a loss was dropped")


@check("early")
def lengths_that_are_no_tensor_are_left_to_others():
    """MindSpeed passes an object with position ids, which its own function supports."""
    import torch
    from npu_ops_adapters.megatron import rope

    class Lengths:
        position_ids = None

    original = inspect.unwrap(sys.modules[ROPE]._apply_rotary_pos_emb_thd)
    seen = []

    def theirs(*args, **kwargs):
        seen.append((args, kwargs))
        return args[0]

    theirs.__signature__ = inspect.signature(original)
    patched = rope._replace_packed(theirs)
    t, freqs, lengths = leaf(6, 2, 16, dtype=torch.float32), angles(6, 1, 1, 16), Lengths()
    assert patched(t, lengths, freqs, mscale=1.5) is t
    assert seen == [((t, lengths, freqs), {"mscale": 1.5})]
    slot = rope._fill_packed(theirs)
    assert slot(t, lengths, freqs, interleaved=True) is t
    assert seen[1] == ((t, lengths, freqs), {"cp_size": 1, "cp_rank": 0, "interleaved": True})


@check("early")
def packed_rope_does_not_wait_for_the_device():
    """Call it with meta tensors: reading one of their values would raise."""
    import torch

    t = torch.empty(24, 3, 24, device="meta")
    lengths = torch.empty(4, dtype=torch.int32, device="meta")
    for rows in (12, 24):
        freqs = torch.empty(rows, 1, 1, 16, device="meta")
        for ranks, own in ((1, 0), (2, 1)):
            out, calls = calls_of(
                "apply_rotary_pos_emb_freqs", packed, t[: 24 // ranks], lengths, freqs, ranks, own
            )
            assert calls == 1 and out.shape == (24 // ranks, 3, 24)


@check("early")
def lengths_that_end_before_the_tokens_do_are_as_in_megatron():
    """Up to Megatron-Core 0.19 `torch.split` raises; on main the remaining tokens are padding."""
    import torch

    ours = sys.modules[ROPE]._apply_rotary_pos_emb_thd
    theirs = inspect.unwrap(ours)
    assert theirs is not ours
    config = types.SimpleNamespace(
        apply_rope_fusion=True, rotary_interleaved=False, multi_latent_attention=False,
        mrope_section=None,
    )  # fmt: skip
    t, lengths = leaf(8, 2, 16, dtype=torch.float32), torch.tensor([0, 3, 6], dtype=torch.int32)
    for rows in (4, 6, 8):
        freqs = angles(rows, 1, 1, 16)
        results = [
            packing_outcome(functools.partial(packed, function=f), t, lengths, freqs, 1, 0)
            for f in (theirs, ours)
        ]
        results.append(packing_outcome(apply, t, freqs, config, cu_seqlens=lengths))
        assert results[1:] == results[:1] * 2, results


def packing_outcome(function, *args, **kwargs):
    try:
        return function(*args, **kwargs).tolist()
    except RuntimeError as error:
        return str(error)


@check("early")
def dropout_is_the_same_forward_and_backward():
    import torch

    function = sys.modules[BDA].get_bias_dropout_add(True, True)
    x = torch.ones(64, 4, 128, requires_grad=True)
    out = function((x, None), torch.zeros(64, 4, 128), 0.1)
    out.backward(torch.ones_like(out))
    kept = out != 0
    assert 0.88 < kept.float().mean() < 0.92
    assert torch.allclose(out[kept], torch.tensor(1 / 0.9), rtol=1e-4)
    assert x.grad.equal(out.detach())


@check("early")
def dropout_is_the_same_when_recomputed():
    import torch
    from megatron.core import tensor_parallel
    from torch.utils.checkpoint import checkpoint

    function = sys.modules[BDA].get_bias_dropout_add(True, True)

    def block(x, residual):
        return function((x * 2, None), residual, 0.1).square()

    def run(how):
        torch.manual_seed(3)
        x, residual = (leaf(8, 64, dtype=torch.float32, seed=seed) for seed in (0, 1))
        out = how(x, residual)
        torch.rand(7)  # advances the generator
        out.sum().backward()
        return outcome(out) | {"x": x.grad, "residual": residual.grad}

    expected = run(block)
    for how in (
        lambda *args: checkpoint(block, *args, use_reentrant=True),
        lambda *args: checkpoint(block, *args, use_reentrant=False),
        lambda *args: tensor_parallel.checkpoint(block, False, *args),
    ):
        actual = run(how)
        assert all(actual[name].equal(value) for name, value in expected.items())


@check("early")
def a_model_recomputes_its_dropout():
    import megatron_cpu

    steps = []
    for recompute in (
        {},
        {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    ):
        config = {"hidden_dropout": 0.1, "bias_dropout_fusion": True, **recompute}
        model, calls = calls_of("bias_dropout_add", megatron_cpu.gpt, "rope", **config)
        result, calls = calls_of("bias_dropout_add", megatron_cpu.step, model)
        assert calls == (8 if recompute else 4), calls
        steps.append(result)
    for name, value in steps[0].items():
        assert (value - steps[1][name]).abs().max() < 1e-6, name
