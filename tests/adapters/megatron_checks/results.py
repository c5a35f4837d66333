"""Compute results with npu-ops and without, and compare the two."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import sys
import types

from megatron_checks.release import BDA, BRIDGE, ROPE, gdn

RESULTS: dict[str, dict] = {}


def compute() -> dict:
    results = bias_dropout_add_results() | rope_results() | packed_rope_results()
    results |= attention_results() | bridge_results()
    return results | model_results() | gated_delta_net_results()


def leaf(*shape, dtype, grad=True, seed=0):
    import torch

    draw = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=draw).to(dtype).requires_grad_(grad)


def outcome(out, *inputs) -> dict:
    """Return an output, and the gradients of the inputs that require one."""
    import torch

    inputs = {f"gradient {i}": x for i, x in enumerate(inputs) if x is not None and x.requires_grad}
    grads = {}
    if inputs:
        upstream = leaf(*out.shape, dtype=out.dtype, grad=False, seed=9)
        grads = dict(zip(inputs, torch.autograd.grad(out, list(inputs.values()), upstream)))  # noqa: B905
    return {"output": out.detach()} | grads


def bias_dropout_add_results() -> dict:
    import torch

    module = sys.modules[BDA]
    functions = {
        "fused train": module.bias_dropout_add_fused_train,
        "fused inference": module.bias_dropout_add_fused_inference,
        "unfused train": module.bias_dropout_add_unfused(True),
        "unfused inference": module.bias_dropout_add_unfused(False),
        "getter": module.get_bias_dropout_add(False, True),
    }
    full, half = torch.float32, torch.bfloat16
    dtypes = [(full,) * 3, (half,) * 3, (half, half, full), (full, full, half), (half, full, half)]
    results = {}
    for (name, function), dtype, bias, grad in itertools.product(
        functions.items(), dtypes, (None, (16,), (3, 2, 16)), (True, False)
    ):
        x = leaf(3, 2, 16, dtype=dtype[0], grad=grad)
        bias = None if bias is None else leaf(*bias, dtype=dtype[1], grad=grad, seed=1)
        residual = leaf(3, 2, 16, dtype=dtype[2], grad=grad, seed=2)
        pair = (x, bias) if grad else [x, bias]  # warm-up code passes a list
        out = function(pair, residual, 0.0) if grad else function(pair, residual, prob=0.0)
        key = f"bda {name}, {dtype}, bias {bias is not None and list(bias.shape)}, grad {grad}"
        results[key] = outcome(out, x, bias, residual) | {
            "aliases x": torch.tensor(out.data_ptr() == x.data_ptr()),
            "x afterwards": x.detach(),
        }
    with torch.no_grad():  # Megatron checks requires_grad, not the grad mode
        x, bias = leaf(3, 16, dtype=full, grad=False), leaf(16, dtype=full)
        out = functions["fused inference"]((x, bias), leaf(3, 16, dtype=full, grad=False), 0.1)
        aliases = torch.tensor(out.data_ptr() == x.data_ptr())
        results["bda, a parameter as bias under no_grad"] = {"output": out, "aliases x": aliases}
    # Calls that are left to Megatron: other shapes, and tensors that are not contiguous.
    out = functions["fused train"](
        (leaf(3, 2, 16, dtype=full), None), leaf(1, 2, 16, dtype=full), 0.0
    )
    results["bda, a residual to broadcast"] = {"output": out.detach()}
    x = leaf(2, 3, 16, dtype=full, grad=False).transpose(0, 1)
    out = functions["fused inference"]((x, None), leaf(3, 2, 16, dtype=full, grad=False), 0.0)
    aliases = torch.tensor(out.data_ptr() == x.data_ptr())
    results["bda, x not contiguous"] = {"output": out, "aliases x": aliases}
    return results


def angles(*shape, interleaved=False, seed=5):
    """Return freqs [..., r] as Megatron makes them, with each angle twice."""
    import torch

    draw = torch.Generator().manual_seed(seed)
    half = torch.rand(*shape[:-1], shape[-1] // 2, generator=draw) * 50
    return half.repeat_interleave(2, -1) if interleaved else torch.cat((half, half), -1)


def options() -> list[dict]:
    """Return combinations of the arguments of `_apply_rotary_pos_emb_*` that this version has."""
    function = sys.modules[ROPE]._apply_rotary_pos_emb_bshd
    parameters = inspect.signature(function).parameters
    mla = "mla_rotary_interleaved"
    mla = mla if mla in parameters else "multi_latent_attention"
    found = [{}, {"rotary_interleaved": True}, {"mscale": 1.3}, {mla: True}]
    found += [{mla: True, "mscale": 0.7}, {mla: True, "rotary_interleaved": True}]
    if "inverse" in parameters:
        found += [{"inverse": True}, {"inverse": True, "rotary_interleaved": True}]
        removes = {mla: True, "mla_output_remove_interleaving": True}
        found += [removes, removes | {"inverse": True, "mscale": 1.3}]
    return found


def rope_results() -> dict:
    import torch

    module = sys.modules[ROPE]
    results = {}
    for option, batch, dim, dtype in itertools.product(
        options(), (1, 2), (16, 24), (torch.float32, torch.bfloat16)
    ):
        freqs = angles(6, batch, 1, 16, interleaved="rotary_interleaved" in option)
        t = leaf(6, 2, 3, dim, dtype=dtype)
        out = module._apply_rotary_pos_emb_bshd(t, freqs, **option)
        results[f"rope {option}, freqs batch {batch}, head {dim}, {dtype}"] = outcome(out, t)
    t = leaf(6, 2, 3, 24, dtype=torch.float32)
    positional = module._apply_rotary_pos_emb_bshd(t, angles(6, 1, 1, 16), False, True, 1.2)
    results["rope, positional arguments"] = outcome(positional, t)
    # a slice of a fused qkv
    strided = leaf(6, 2, 3, 72, dtype=torch.float32, grad=False)[..., 24:48]
    out = module._apply_rotary_pos_emb_bshd(strided, angles(6, 1, 1, 16))
    results["rope, a slice of qkv"] = {"output": out}
    for config in configurations():
        key = f"rope through apply_rotary_pos_emb, mrope {config.mrope_section}"
        freqs = angles(6, 2 if config.mrope_section else 1, 1, 16)
        results[key] = outcome(apply(t, freqs, config), t)
        config.apply_rope_fusion = False  # before 0.16 the fused path loses mscale
        results[f"{key}, mscale"] = outcome(apply(t, freqs, config, mscale=1.3), t)
    # Left to Megatron: angles for each head.
    out = module._apply_rotary_pos_emb_bshd(t, angles(6, 2, 3, 16))
    results["rope, angles for each head"] = outcome(out, t)
    return results


def configurations():
    """Yield stand-ins for a TransformerConfig, with rope fusion if Megatron has fused rope."""
    fused = sys.modules[ROPE].fused_apply_rotary_pos_emb is not None
    for section in (None, [4, 2, 2]):
        yield types.SimpleNamespace(
            apply_rope_fusion=fused,
            mrope_section=section,
            rotary_interleaved=False,
            multi_latent_attention=False,
        )


class Group:
    """A context-parallel group's size and rank."""

    def __init__(self, ranks, own):
        self.ranks, self.own = ranks, own

    def size(self):
        return self.ranks

    def rank(self):
        return self.own


def apply(t, freqs, config, group=None, **kwargs):
    from megatron_cpu import call

    function = sys.modules[ROPE].apply_rotary_pos_emb
    return call(function, t, freqs, config, cp_group=group or Group(1, 0), **kwargs)


def packed_rope_results() -> dict:
    import torch

    lengths = torch.tensor([0, 8, 20, 24], dtype=torch.int32)
    results = {}
    for option, (ranks, own), rows, dtype in itertools.product(
        options(), ((1, 0), (2, 0), (2, 1)), (12, 24, 40), (torch.float32, torch.bfloat16)
    ):
        freqs = angles(rows, 1, 1, 16, interleaved="rotary_interleaved" in option)
        t = leaf(24 // ranks, 3, 24, dtype=dtype)
        out = packed(t, lengths, freqs, ranks, own, **option)
        key = f"packed rope {option}, cp {own}/{ranks}, {rows} rows, {dtype}"
        results[key] = outcome(out, t)
    t = leaf(24, 3, 24, dtype=torch.float32)
    function = sys.modules[ROPE]._apply_rotary_pos_emb_thd
    if "max_seqlen" in inspect.signature(function).parameters:
        for padding, rows in itertools.product((0, 3), (12, 24)):
            longer = leaf(24 + padding, 3, 24, dtype=torch.float32)
            out = packed(longer, lengths, angles(rows, 1, 1, 16), 1, 0, max_seqlen=12)
            results[f"packed rope, max_seqlen, {padding}, {rows} rows"] = outcome(out, longer)
    for config, rows in itertools.product(configurations(), (12, 24)):
        out = apply(t, angles(rows, 1, 1, 16), config, cu_seqlens=lengths)
        key = f"packed rope through apply_rotary_pos_emb, {rows} rows, mrope {config.mrope_section}"
        results[key] = outcome(out, t)
    return results


def packed(t, lengths, freqs, ranks, own, function=None, **options):
    """Call `_apply_rotary_pos_emb_thd`, or `function`, in a context-parallel group."""
    from megatron.core import parallel_state

    function = function or sys.modules[ROPE]._apply_rotary_pos_emb_thd
    if "cp_group" in inspect.signature(function).parameters:
        return function(t, lengths, freqs, cp_group=Group(ranks, own), **options)
    names = ("get_context_parallel_world_size", "get_context_parallel_rank")
    before = [getattr(parallel_state, name) for name in names]
    try:
        for name, value in zip(names, (ranks, own), strict=True):
            setattr(parallel_state, name, lambda value=value: value)
        return function(t, lengths, freqs, **options)
    finally:
        for name, value in zip(names, before, strict=True):
            setattr(parallel_state, name, value)


def core_attention(mask_type="causal", **config):
    """Return the core attention that a layer builds: ours if the adapter is registered."""
    import megatron_cpu
    from megatron.core.transformer import enums

    layer = megatron_cpu.gpt("rope", num_layers=1, **config).decoder.layers[0]
    built = layer.self_attention.core_attention
    built.attn_mask_type = enums.AttnMaskType[mask_type]
    if hasattr(built, "scale_mask_softmax"):
        built.scale_mask_softmax.attn_mask_type = built.attn_mask_type
    return built


def attention_results() -> dict:
    import megatron_cpu
    import torch

    results = {}
    causal = torch.ones(1, 1, 24, 24, dtype=torch.bool).triu(1)
    padding = torch.zeros(2, 1, 1, 24, dtype=torch.bool)
    padding[0, ..., 19:] = True
    documents = causal.clone()
    documents[..., 9:, :9] = True
    masks = {"none": None, "causal": causal, "documents": documents, "padding": padding}
    kinds = [("causal", "none"), ("causal", "causal"), ("causal", "documents")]
    kinds += [("padding", "padding"), ("padding", "none"), ("no_mask", "none")]
    for (kind, name), heads, dtype in itertools.product(
        kinds, (4, 2, 1), (torch.float32, torch.bfloat16)
    ):
        layer = core_attention(mask_type=kind, num_query_groups=heads)
        q = leaf(24, 2, 4, 16, dtype=dtype)
        k, v = (leaf(24, 2, heads, 16, dtype=dtype, seed=seed) for seed in (1, 2))
        out = layer(q, k, v, masks[name])
        results[f"attention, {kind}, mask {name}, {heads} groups, {dtype}"] = outcome(out, q, k, v)
    others = {
        "scaled by layer": core_attention(apply_query_key_layer_scaling=True),
        "one query": core_attention(),
    }
    if hasattr(megatron_cpu.transformer_config("rope"), "softmax_type"):  # from 0.15 on
        others["off by one"] = core_attention(softmax_type="off-by-one")
    for name, layer in others.items():
        q = leaf(1 if name == "one query" else 24, 2, 4, 16, dtype=torch.float32)
        k, v = (leaf(24, 2, 2, 16, dtype=torch.float32, seed=seed) for seed in (1, 2))
        results[f"attention, {name}"] = outcome(layer(q, k, v, None), q, k, v)
    return results


def model_results() -> dict:
    import megatron_cpu

    fused = sys.modules[ROPE].fused_apply_rotary_pos_emb is not None
    results = {}
    for position in ("rope", "mrope"):
        model = megatron_cpu.gpt(position, bias_dropout_fusion=True, apply_rope_fusion=fused)
        results[f"model with {position}"] = megatron_cpu.step(model)
    model = megatron_cpu.gpt("rope", apply_rope_fusion=False)
    results["model, nothing fused"] = megatron_cpu.step(model)
    return results


def gated_delta_net_results() -> dict:
    """Return the results; without npu-ops they come from Megatron's own functions."""
    import megatron_cpu
    import torch

    if gdn() is None:
        return {}
    results = {}
    with built_without_fla():
        results["gated delta net, model"] = megatron_cpu.step(megatron_cpu.hybrid(), length=80)
        for dtype in (torch.float32, torch.bfloat16):
            layer = gated_delta_net_layer(params_dtype=dtype)
            hidden = leaf(80, 2, 64, dtype=dtype)
            out, _ = layer(hidden, None)
            inputs = (hidden, *layer.parameters())
            results[f"gated delta net, layer, {dtype}"] = outcome(out, *inputs)
    return results


def gated_delta_net_layer(**config):
    """Return a layer with weights like trained ones and slow decays: every gradient matters."""
    import megatron_cpu
    import torch

    layer = megatron_cpu.hybrid(**config).decoder.layers[0].self_attention
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            parameter.normal_(std=parameter[0].numel() ** -0.5 if parameter.dim() > 1 else 0.5)
            parameter += {"A_log": -2, "out_norm.weight": 1}.get(name, 0)
    return layer


@contextlib.contextmanager
def built_without_fla():
    """Undo the changes that building layers without fla makes to the module."""
    module = gdn()
    before = {name: vars(module)[name] for name in ("HAVE_FLA", "l2norm") if name in vars(module)}
    try:
        yield
    finally:
        vars(module).pop("l2norm", None)
        vars(module).update(before)


def bridge_results() -> dict:
    """Return results of Qwen3-VL's attention.

    freqs are [s, b, 1, d], packed [t, 1, 1, d]; each with and without fp32.
    """
    import torch

    function = sys.modules[f"{BRIDGE}.attention"].apply_rotary_pos_emb_absolute
    results = {}
    for wide, batch, dtype in itertools.product(
        (False, True), (1, 2), (torch.float32, torch.bfloat16)
    ):
        config = types.SimpleNamespace(apply_rope_fusion=False, rotary_interleaved=False)
        config.apply_rotary_pos_emb_in_fp32 = wide
        t = leaf(6, 2, 3, 24, dtype=dtype)
        out = function(t, angles(6, batch, 1, 16), config)
        results[f"bridge, batch {batch}, fp32 {wide}, {dtype}"] = outcome(out, t)
        t = leaf(6, 3, 24, dtype=dtype)
        lengths = torch.tensor([0, 2, 6], dtype=torch.int32)
        out = function(t, angles(6, 1, 1, 16), config, lengths)
        results[f"bridge, packed, batch {batch}, fp32 {wide}, {dtype}"] = outcome(out, t)
    return results


def compare(prefix: str, unit: float = 1, rounding: float = 2**-6) -> None:
    """Compare results with npu-ops and without.

    fp32 must agree to 1e-6, gradients to 1e-5, and bf16 within its rounding. Errors are relative to
    the largest expected number, or to `unit` if that is larger.
    """
    import torch

    compared = 0
    for key, expected in RESULTS["without"].items():
        if not key.startswith(prefix):
            continue
        actual = RESULTS["with"][key]
        assert actual.keys() == expected.keys(), (key, actual.keys(), expected.keys())
        for name, wanted in expected.items():
            got = actual[name]
            assert got.dtype == wanted.dtype, f"{key}: {name} is {got.dtype}, not {wanted.dtype}"
            assert got.shape == wanted.shape, f"{key}: {name} is {got.shape}, not {wanted.shape}"
            if wanted.dtype == torch.bool:
                assert got.equal(wanted), f"{key}: {name} is {got}, not {wanted}"
                continue
            compared += 1
            # Gradients may be rounded to the output's dtype.
            result = expected.get("output", wanted)
            tolerance = tolerance_of(name, {wanted.dtype, result.dtype}, rounding)
            error = (got - wanted).abs().max().item() / max(unit, wanted.abs().max().item())
            assert error <= tolerance, f"{key}: {name} differs by {error:.2e}, over {tolerance}"
    assert compared > 2, compared


def tolerance_of(name: str, dtypes: set, rounding: float) -> float:
    import torch

    if torch.bfloat16 in dtypes:
        return rounding  # Megatron rounds each product and sum to 8 bits; we round only the result
    return 1e-5 if name.startswith("gradient") or "." in name else 1e-6
