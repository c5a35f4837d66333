"""Check which attention calls use npu-ops, and which are left to Megatron."""

from __future__ import annotations

import types

from megatron_checks.release import calls_of, check
from megatron_checks.results import core_attention, leaf


@check("early")
def attention_calls_reach_npu_ops():
    """npu-ops also runs calls that Megatron rejects: packed, with a bias, with narrower values."""
    import megatron_cpu
    import torch
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    layer = core_attention()
    assert not isinstance(layer, DotProductAttention) and layer.state_dict() == {}
    q, k, v = (leaf(24, 2, n, 16, dtype=torch.float32, seed=n) for n in (4, 2, 2))
    out, calls = calls_of("attention", layer, q, k, v, None)
    assert calls == 1 and out.shape == (24, 2, 64)
    starts = torch.tensor([0, 7, 24], dtype=torch.int32)
    packing = {"qkv_format": "thd", "cu_seqlens_q": starts, "cu_seqlens_kv": starts}
    packing |= {"max_seqlen_q": 17, "max_seqlen_kv": 17}
    q, k, v = (x[:, 0] for x in (q, k, v))
    packed, calls = calls_of(
        "attention", layer, q, k, v, None, packed_seq_params=PackedSeqParams(**packing)
    )
    assert calls == 1 and packed.shape == (24, 64)
    for part in (slice(0, 7), slice(7, 24)):
        alone = layer(*(x[part, None] for x in (q, k, v)), None)[:, 0]
        assert (packed[part] - alone).abs().max() < 1e-5
    padded = packing | {"cu_seqlens_q": starts - 1, "cu_seqlens_q_padded": starts}
    padded |= {"cu_seqlens_kv_padded": starts}
    assert layer(q, k, v, None, packed_seq_params=PackedSeqParams(**padded)).equal(packed)
    bias = leaf(1, 4, 24, 24, dtype=torch.float32)
    q, k, v = (x[:, None] for x in (q, k, v))
    assert not layer(q, k, v, None, attention_bias=bias).equal(layer(q, k, v, None))
    whole, narrow = layer(q, k, v, None), layer(q, k, v[..., :8], None)
    narrow, whole = narrow.unflatten(-1, (4, 8)), whole.unflatten(-1, (4, 16))[..., :8]
    assert (narrow - whole).abs().max() < 1e-6
    model = megatron_cpu.gpt("rope")
    assert calls_of("attention", megatron_cpu.step, model)[1] == 2


@check("early")
def attention_reads_masks_and_lengths_again():
    """Each layer reads masks and lengths again, as other code may have written to their memory."""
    import torch
    from megatron.core.packed_seq_params import PackedSeqParams
    from writes import WRITES

    layer = core_attention()
    q, k, v = (leaf(24, 1, n, 16, dtype=torch.float32, seed=n) for n in (4, 2, 2))
    causal = torch.ones(1, 1, 24, 24, dtype=torch.bool).triu(1)
    documents = causal.clone()
    documents[..., 9:, :9] = True
    for write in WRITES.values():
        mask = causal.clone()
        assert not layer(q, k, v, mask).equal(layer(q, k, v, documents))
        write(mask, documents)
        assert layer(q, k, v, mask).equal(layer(q, k, v, documents))
    q, k, v = (x[:, 0] for x in (q, k, v))

    def packed(starts):
        given = {"cu_seqlens_q": starts, "cu_seqlens_kv": starts, "max_seqlen_q": 24}
        packing = PackedSeqParams(qkv_format="thd", max_seqlen_kv=24, **given)
        out, calls = calls_of("attention", layer, q, k, v, None, packed_seq_params=packing)
        assert calls == 1
        return out

    other = torch.tensor([0, 2, 24], dtype=torch.int32)
    for write in WRITES.values():
        starts = torch.tensor([0, 11, 24], dtype=torch.int32)
        first = packed(starts)
        write(starts, other)
        assert packed(starts).equal(packed(other)) and not packed(starts).equal(first)
    torch.cpu.is_current_stream_capturing = lambda: True  # during capture no value can be read
    try:
        assert packed(other).equal(packed(starts))
        masked = layer(*(x[:, None] for x in (q, k, v)), causal)
    finally:
        del torch.cpu.is_current_stream_capturing
    assert (masked - layer(*(x[:, None] for x in (q, k, v)), causal)).abs().max() < 1e-5


@check("early")
def attention_in_place_of_transformer_engines_goes_by_the_type_of_mask():
    """With mask type causal or no_mask a given mask is ignored.

    With MindSpeed's attention_mask_type "general", a causal layer applies it too.
    """
    import megatron_cpu
    import torch
    from megatron.core.transformer import enums
    from npu_ops_adapters.megatron import attention

    engine = type("TEDotProductAttention", (torch.nn.Module,), {})
    mask = torch.ones(1, 1, 6, 6, dtype=torch.bool).triu(1)
    mask[..., 4:, :4] = True  # two documents
    q, k, v = (leaf(6, 1, n, 16, dtype=torch.float32, seed=n) for n in (4, 2, 2))
    kinds = enums.AttnMaskType

    def compute(given, kind, built=kinds.causal, **settings):
        config = megatron_cpu.transformer_config("rope")
        vars(config).update(settings)
        layer = attention._module(engine)(config, 1, built, "self")
        return layer(q, k, v, given, attn_mask_type=kind)

    causal = compute(None, kinds.causal)
    assert compute(mask, kinds.causal).equal(causal)
    # a padding mask, as Bridge passes it
    assert compute(torch.ones(1, 6, dtype=torch.bool), kinds.causal).equal(causal)
    general = compute(mask, kinds.causal, attention_mask_type="general")
    assert not general.equal(causal)
    assert general.equal(compute(mask, kinds.arbitrary))
    everything = compute(None, kinds.no_mask)
    assert compute(mask, kinds.no_mask).equal(everything) and not everything.equal(causal)
    padding = torch.zeros(1, 1, 1, 6, dtype=torch.bool)
    padding[..., 5:] = True
    both = compute(padding, kinds.padding_causal)
    assert both[:5].allclose(causal[:5], atol=1e-6) and not both[5:].equal(causal[5:])
    windowed = compute(None, kinds.causal, window_size=(2, 0))
    assert windowed[:3].allclose(causal[:3], atol=1e-6) and not windowed[3:].equal(causal[3:])


@check("early")
def a_row_that_sees_no_key_is_0_and_in_megatron_the_mean_of_all_values():
    """docs/frameworks.md documents this difference. All other rows are the same."""
    import megatron_cpu
    import torch
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.enums import AttnMaskType

    config = megatron_cpu.transformer_config("rope")
    kind = AttnMaskType.arbitrary
    theirs = DotProductAttention(config, 1, kind, "self")
    heads = config.num_query_groups or config.num_attention_heads
    q, k, v = (leaf(6, 1, n, 16, dtype=torch.float32, seed=n) for n in (4, heads, heads))
    mask = torch.zeros(1, 1, 6, 6, dtype=torch.bool)
    mask[..., 4, :] = True
    ours = core_attention()(q, k, v, mask, attn_mask_type=kind)
    own = theirs(q, k, v, mask)
    mean = v.mean(0).repeat_interleave(4 // heads, 1).flatten()
    assert ours[4].abs().max() == 0 and (own[4, 0] - mean).abs().max() < 1e-6
    others = [0, 1, 2, 3, 5]
    assert (ours[others] - own[others]).abs().max() < 1e-6


@check("early")
def multi_latent_attention_trains():
    """The adapter needs no Transformer Engine. Megatron's DotProductAttention cannot train MLA."""
    import megatron_cpu

    try:
        model = megatron_cpu.multi_latent()
    except TypeError as error:  # in some releases the layer needs Transformer Engine
        assert "isinstance() arg 2 must be a type" in str(error), error
        return
    step, calls = calls_of("attention", megatron_cpu.step, model)
    assert calls == 2 and step["loss"].isfinite()
    assert all(gradient is not None and gradient.abs().max() > 0 for gradient in step.values())


@check("early")
def attention_drops_weights_and_recomputes_them():
    import megatron_cpu

    steps = []
    for recompute in ({}, {"recompute_granularity": "selective"}):
        model = megatron_cpu.gpt("rope", attention_dropout=0.2, **recompute)
        steps.append(megatron_cpu.step(model))
    plain = megatron_cpu.step(megatron_cpu.gpt("rope"))
    assert (plain["loss"] - steps[0]["loss"]).abs() > 1e-5
    for name, value in steps[0].items():
        assert (value - steps[1][name]).abs().max() < 1e-6, name
    model.eval()
    assert (plain["loss"] - megatron_cpu.step(model)["loss"]).abs() < 1e-6


@check("early")
def attention_of_what_it_does_not_do_is_megatrons():
    import torch
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from npu_ops_adapters.megatron import attention

    layer = core_attention()
    q, k, v = (leaf(4, 1, n, 16, dtype=torch.float32, seed=n) for n in (4, 2, 2))
    mask = torch.zeros(1, 1, 4, 4, dtype=torch.int32)  # masked_fill needs bool
    try:
        layer(q, k, v, mask)
    except RuntimeError as error:
        assert "masked_fill" in str(error) or "bool" in str(error).lower(), error
    starts = torch.tensor([1, 4], dtype=torch.int32)  # MindSpeed's form, without the leading zero
    packing = PackedSeqParams(qkv_format="thd", cu_seqlens_q=starts, cu_seqlens_kv=starts)
    try:
        layer(q[:, 0], k[:, 0], v[:, 0], None, packed_seq_params=packing)
    except AssertionError as error:
        assert "Packed sequence is not supported by DotProductAttention" in str(error)
    else:
        raise AssertionError("it was taken")
    config = types.SimpleNamespace(context_parallel_size=2, window_size=(8, 0))
    sentence = "context_parallel_size: got 2 with window_size, needs 1"
    assert attention.why_not(config) == sentence
    try:
        attention.npuify(DotProductAttention)(config, 1, None, "self")
    except ValueError as error:
        assert str(error) == sentence
    else:
        raise AssertionError("windows were taken under context parallelism")
