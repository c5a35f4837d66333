"""What must hold with one megatron-core release; run in a process of its own.

python -c "import megatron_checks; megatron_checks.run('early')"    with the release on PYTHONPATH

Prints a line of JSON for each check: its name, and null or what went wrong. `early`: the adapters
are registered before Megatron is imported, as `import torch` does. `late`: after all of it.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import importlib.util
import inspect
import itertools
import json
import pathlib
import sys
import traceback
import types

import counting

JIT = "megatron.core.jit"
BDA = "megatron.core.fusions.fused_bias_dropout"
ROPE = "megatron.core.models.common.embeddings.rope_utils"
GDN = "megatron.core.ssm.gated_delta_net"
TRANSFORMER = "megatron.core.transformer"
BRIDGE = "megatron.bridge.models.qwen_vl.modelling_qwen3_vl"  # a double of it
CHECKPOINT = "megatron.core.tensor_parallel.random"
TARGETS = {
    (f"{JIT}:jit_fuser", "jit_fuser"),
    (f"{BDA}:bias_dropout_add_fused_train", "bias_dropout_add"),
    (f"{BDA}:bias_dropout_add_fused_inference", "bias_dropout_add"),
    (f"{BDA}:bias_dropout_add_unfused", "bias_dropout_add"),
    (f"{ROPE}:_apply_rotary_pos_emb_bshd", "mrope"),
    (f"{ROPE}:_apply_rotary_pos_emb_bshd", "rope"),
    (f"{ROPE}:_apply_rotary_pos_emb_thd", "rope"),
    (f"{ROPE}:fused_apply_rotary_pos_emb", "rope"),
    (f"{ROPE}:fused_apply_rotary_pos_emb_thd", "rope"),
    (f"{CHECKPOINT}:checkpoint", "checkpoint"),
    (f"{BRIDGE}.rope:apply_rotary_pos_emb_absolute", "mrope"),
    (f"{BRIDGE}.text_model:Qwen3VLTextRotaryEmbedding.forward", "mrope"),
    (f"{BRIDGE}.model:Qwen3VLModel.forward", "mrope"),
    (f"{TRANSFORMER}.attention:Attention.__init__", "attention"),
    (f"{TRANSFORMER}.multi_latent_attention:MultiLatentAttention.__init__", "attention"),
}
CHECKS: dict[str, list] = {"early": [], "late": []}


def gdn():
    """The module that the layers of Gated Delta Net look names up in; None before 0.16."""
    return sys.modules.get(f"{GDN}.common", sys.modules.get(GDN))


def gdn_targets() -> set[tuple[str, str]]:
    if gdn() is None:
        return set()
    source = pathlib.Path(gdn().__file__).read_text()
    ops = {"HAVE_FLA": "gated_delta_net", "l2norm": "l2norm"}
    ops["chunk_gated_delta_rule"] = "chunk_gated_delta_rule"
    ops["causal_conv1d_fn" if "causal_conv1d_fn" in source else "causal_conv1d"] = "causal_conv1d"
    owner = "_GDNBase" if "class _GDNBase" in source else "GatedDeltaNet"
    ops[f"{owner}._apply_gated_norm"] = "rms_norm_gated"
    if "def _compute_g_and_beta" in source:
        ops[f"{owner}._compute_g_and_beta"] = "gdn_gate"
    return {(f"{gdn().__name__}:{name}", op) for name, op in ops.items()}


def targets() -> set[tuple[str, str]]:
    """Every (target, op) that is replaced in this release."""
    return TARGETS | gdn_targets()


def check(*modes):
    def register(function):
        for mode in modes:
            CHECKS[mode].append(function)
        return function

    return register


def names(mode: str, version: str) -> list[str]:
    """The checks of a release: Gated Delta Net is there from 0.16 on."""
    has_it = tuple(map(int, version.split("."))) >= (0, 16)
    return [f.__name__ for f in CHECKS[mode] if has_it or not is_of_gated_delta_net(f)]


def is_of_gated_delta_net(function) -> bool:
    return function.__name__.startswith("gated_delta_net")


# What this release has


def decorated_sites() -> tuple[dict[str, str], dict[str, str]]:
    """The functions that @jit_fuser decorates, from the source: {name: module}.

    First those of modules and classes, then those inside other functions.
    """
    import megatron.core

    root = pathlib.Path(megatron.core.__path__[0])
    fixed, local = {}, {}
    for path in sorted(root.rglob("*.py")):
        text = path.read_text()
        if "@jit_fuser" in text:
            module = ".".join(("megatron.core", *path.relative_to(root).with_suffix("").parts))
            for name, is_local in sites(ast.parse(text)):
                (local if is_local else fixed)[f"{module}.{name}"] = module
    return fixed, local


def sites(node, prefix="", is_local=False):
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, (ast.FunctionDef, ast.ClassDef)):
            yield from sites(child, prefix, is_local)
            continue
        name = f"{prefix}{child.name}"
        if any(ast.unparse(d).endswith("jit_fuser") for d in child.decorator_list):
            yield name, is_local
        inside = isinstance(child, ast.FunctionDef)
        yield from sites(child, f"{name}.<locals>." if inside else f"{name}.", is_local or inside)


def attribute(path: str, module: str):
    """The raw attribute at "module.Class.name"."""
    owner = sys.modules[module]
    for part in path.removeprefix(f"{module}.").split("."):
        value = vars(owner)[part]
        owner = value
    return value


def import_everything() -> None:
    """All that has a decorated function, and who imports what we replace by value."""
    fixed, local = decorated_sites()
    for module in {JIT, BDA, ROPE, *fixed.values(), *local.values()}:
        importlib.import_module(module)
    importlib.import_module("megatron.core.models.gpt.gpt_model")
    importlib.import_module(f"{TRANSFORMER}.multi_latent_attention")
    for name in ("attention", "model", "text_model"):
        importlib.import_module(f"{BRIDGE}.{name}")
    if importlib.util.find_spec(GDN):
        importlib.import_module(GDN)


def snapshot() -> dict:
    """Every attribute of every module of Megatron and of its classes, and the import hooks."""
    objects = {("sys", "meta_path"): tuple(sys.meta_path)}
    for name, module in sys.modules.items():
        if name.startswith("megatron") and isinstance(module, types.ModuleType):
            for key, value in vars(module).items():
                objects[name, key] = value
                if isinstance(value, type) and value.__module__ == name:
                    objects |= {(name, key, k): v for k, v in vars(value).items()}
    return objects


def changed(before: dict, after: dict) -> list:
    def same(a, b):
        return a is b or (isinstance(a, tuple) and a == b)

    return [key for key in before if key not in after or not same(before[key], after[key])]


def states(rows) -> dict:
    """Of what is replaced in Megatron; other frameworks are not imported here."""
    megatron = [row for row in rows if row.target.startswith("megatron.")]
    return {(row.target, row.op): row.sentence for row in megatron}


# Counting the calls that reach npu_ops

CALLS = dict.fromkeys(
    (
        *("bias_dropout_add", "apply_rotary_pos_emb_freqs"),
        *("chunk_gated_delta_rule", "l2norm", "causal_conv1d", "gdn_gate", "rms_norm_gated"),
        "attention",
    ),
    0,
)


def note_call(name: str) -> None:
    CALLS[name] += 1


def calls_of(name, function, *args, **kwargs):
    before = CALLS[name]
    result = function(*args, **kwargs)
    return result, CALLS[name] - before


# What is computed, with us and without

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
    """An output, and the gradients of the inputs that want one."""
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
    with torch.no_grad():  # Megatron looks at requires_grad, not at the grad mode
        x, bias = leaf(3, 16, dtype=full, grad=False), leaf(16, dtype=full)
        out = functions["fused inference"]((x, bias), leaf(3, 16, dtype=full, grad=False), 0.1)
        aliases = torch.tensor(out.data_ptr() == x.data_ptr())
        results["bda, a parameter as bias under no_grad"] = {"output": out, "aliases x": aliases}
    # What we leave to Megatron: other shapes, and memory that is not contiguous.
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
    """freqs [..., r] as Megatron makes them: each angle twice."""
    import torch

    draw = torch.Generator().manual_seed(seed)
    half = torch.rand(*shape[:-1], shape[-1] // 2, generator=draw) * 50
    return half.repeat_interleave(2, -1) if interleaved else torch.cat((half, half), -1)


def options() -> list[dict]:
    """Arguments of `_apply_rotary_pos_emb_*` that this version has, in combination."""
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
    strided = leaf(6, 2, 3, 72, dtype=torch.float32, grad=False)[..., 24:48]  # of a fused qkv
    out = module._apply_rotary_pos_emb_bshd(strided, angles(6, 1, 1, 16))
    results["rope, a slice of qkv"] = {"output": out}
    for config in configurations():
        key = f"rope through apply_rotary_pos_emb, mrope {config.mrope_section}"
        freqs = angles(6, 2 if config.mrope_section else 1, 1, 16)
        results[key] = outcome(apply(t, freqs, config), t)
        config.apply_rope_fusion = False  # before 0.16 the fused path drops mscale on the way
        results[f"{key}, mscale"] = outcome(apply(t, freqs, config, mscale=1.3), t)
    # What we leave to Megatron: angles for each head.
    out = module._apply_rotary_pos_emb_bshd(t, angles(6, 2, 3, 16))
    results["rope, angles for each head"] = outcome(out, t)
    return results


def configurations():
    """Stand-ins for a TransformerConfig; fused where our functions fill the slots."""
    fused = sys.modules[ROPE].fused_apply_rotary_pos_emb is not None
    for section in (None, [4, 2, 2]):
        yield types.SimpleNamespace(
            apply_rope_fusion=fused,
            mrope_section=section,
            rotary_interleaved=False,
            multi_latent_attention=False,
        )


class Group:
    """A context-parallel group."""

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


def packed(t, lengths, freqs, ranks, own, **options):
    """`_apply_rotary_pos_emb_thd`, in a context-parallel group."""
    from megatron.core import parallel_state

    function = sys.modules[ROPE]._apply_rotary_pos_emb_thd
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
    """A core attention as a layer builds it: ours where the adapter is registered."""
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
    """Without us as in deterministic mode: Megatron's own functions."""
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
    """With weights of the size of trained ones, and a state that lasts: all gradients count."""
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
    """What the program that builds layers without fla does to the module is undone."""
    module = gdn()
    before = {name: vars(module)[name] for name in ("HAVE_FLA", "l2norm") if name in vars(module)}
    try:
        yield
    finally:
        vars(module).pop("l2norm", None)
        vars(module).update(before)


def compare(prefix: str, unit: float = 1, rounding: float = 2**-6) -> None:
    """With us against without: fp32 to 1e-6 and gradients to 1e-5, bf16 within its rounding.

    Of the largest number that is expected, or of `unit` if that is larger.
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
            result = expected.get("output", wanted)  # its gradients pass through its dtype
            tolerance = tolerance_of(name, {wanted.dtype, result.dtype}, rounding)
            error = (got - wanted).abs().max().item() / max(unit, wanted.abs().max().item())
            assert error <= tolerance, f"{key}: {name} differs by {error:.2e}, over {tolerance}"
    assert compared > 2, compared


def tolerance_of(name: str, dtypes: set, rounding: float) -> float:
    import torch

    if torch.bfloat16 in dtypes:
        return rounding  # Megatron rounds each product and sum to 8 bits; ours only the result
    return 1e-5 if name.startswith("gradient") or "." in name else 1e-6


# The checks, in the order they run


@check("early")
def registered_as_torch_is_imported():
    import npu_ops_autoload

    assert isinstance(sys.meta_path[0], npu_ops_autoload._Finder), sys.meta_path
    assert "npu_ops_adapters" not in sys.modules and "npu_ops" not in sys.modules
    import_everything()
    assert "npu_ops_adapters" in sys.modules


@check("early")
def every_patch_is_applied():
    import npu_ops_adapters

    assert states(npu_ops_adapters.plan()) == dict.fromkeys(targets(), "applied")
    assert states(npu_ops_adapters.verify()) == dict.fromkeys(targets(), "applied")


@check("early")
def jit_fuser_compiles_nothing():
    """The names that our decorator saw are those in the source, and none is compiled."""
    from npu_ops_adapters.megatron import jit_fuser

    fixed, local = decorated_sites()
    assert len(fixed) > 20
    assert set(jit_fuser.uncompiled()) == set(fixed)
    for path, module in fixed.items():
        value = attribute(path, module)
        function = inspect.unwrap(getattr(value, "__func__", value))
        assert not hasattr(function, "_torchdynamo_orig_callable"), path
    for path, module in local.items():  # decorated when a layer is built
        function = types.FunctionType(compile("0", path, "eval"), {})
        assert sys.modules[module].jit_fuser(function) is function


@check("early")
def applied_twice_is_applied_once():
    import npu_ops_adapters

    before = snapshot()
    assert states(npu_ops_adapters.apply()) == dict.fromkeys(targets(), "applied")
    assert changed(before, snapshot()) == []


@check("early")
def rope_fusion_is_a_valid_configuration():
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = {"num_layers": 1, "hidden_size": 64, "num_attention_heads": 4}
    assert TransformerConfig(**config, apply_rope_fusion=True).apply_rope_fusion


@check("early")
def a_layer_takes_our_functions():
    """Megatron's build_module takes plain functions and classes only."""
    module = sys.modules[BDA]
    for function in (
        module.bias_dropout_add_fused_train,
        module.bias_dropout_add_fused_inference,
        module.bias_dropout_add_unfused,
        module.bias_dropout_add_unfused(True),
    ):
        assert isinstance(function, types.FunctionType)
        assert function.__name__.startswith("npu_ops_")


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
def gated_delta_net_calls_reach_npu_ops():
    """Forward and backward, in each of the three layers."""
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
        "l2norm": 3 if has_method else 6,  # queries and keys in one call from 0.18 on
        "gdn_gate": 3 if has_method else 0,
        "rms_norm_gated": 3,
    }
    for name, number in expected.items():
        assert CALLS[name] - before[name] == number, name
        for operator in (name, f"{name}_backward") if number else ():
            assert counter.calls[f"npu_ops.{operator}.default"] == number, operator


@check("early")
def gated_delta_net_keeps_packed_sequences_apart():
    """From 0.18 on; before, Megatron refuses them."""
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


@check("early")
def attention_calls_reach_npu_ops():
    """And what Megatron's own does not take: packed sequences, a bias, values of another width."""
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
    """Whatever wrote to their memory: each layer reads them."""
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
    torch.cpu.is_current_stream_capturing = lambda: True  # nothing can be read
    try:
        assert packed(other).equal(packed(starts))
        masked = layer(*(x[:, None] for x in (q, k, v)), causal)
    finally:
        del torch.cpu.is_current_stream_capturing
    assert (masked - layer(*(x[:, None] for x in (q, k, v)), causal)).abs().max() < 1e-5


@check("early")
def attention_in_place_of_transformer_engines_goes_by_the_type_of_mask():
    """Unless MindSpeed's arguments say that masks are general: then one that is given counts."""
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
    assert compute(torch.ones(1, 6, dtype=torch.bool), kinds.causal).equal(causal)  # Bridge's
    general = compute(mask, kinds.causal, attention_mask_type="general")
    assert not general.equal(causal)
    assert general.equal(compute(mask, kinds.arbitrary))
    everything = compute(None, kinds.no_mask)
    assert compute(mask, kinds.no_mask).equal(everything) and not everything.equal(causal)
    padding = torch.zeros(1, 1, 1, 6, dtype=torch.bool)
    padding[..., 5:] = True
    both = compute(padding, kinds.padding_causal)
    assert both[:5].equal(causal[:5]) and not both[5:].equal(causal[5:])
    windowed = compute(None, kinds.causal, window_size=(2, 0))
    assert windowed[:3].equal(causal[:3]) and not windowed[3:].equal(causal[3:])


@check("early")
def multi_latent_attention_trains():
    """Without Transformer Engine, which Megatron's own DotProductAttention does not."""
    import megatron_cpu

    try:
        model = megatron_cpu.multi_latent()
    except TypeError as error:  # in some releases the layer wants Transformer Engine itself
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
    mask = torch.zeros(1, 1, 4, 4, dtype=torch.int32)  # masked_fill wants bool
    try:
        layer(q, k, v, mask)
    except RuntimeError as error:
        assert "masked_fill" in str(error) or "bool" in str(error).lower(), error
    starts = torch.tensor([1, 4], dtype=torch.int32)  # MindSpeed's, without the leading zero
    packing = PackedSeqParams(qkv_format="thd", cu_seqlens_q=starts, cu_seqlens_kv=starts)
    try:
        layer(q[:, 0], k[:, 0], v[:, 0], None, packed_seq_params=packing)
    except AssertionError as error:
        assert "Packed sequence is not supported by DotProductAttention" in str(error)
    else:
        raise AssertionError("it was taken")
    config = types.SimpleNamespace(context_parallel_size=2)
    sentence = "context_parallel_size: got 2, needs 1: keys of other ranks are not here"
    assert attention.why_not(config) == sentence
    try:
        attention.npuify(DotProductAttention)(config, 1, None, "self")
    except ValueError as error:
        assert str(error) == sentence
    else:
        raise AssertionError("context parallelism was taken")


@check("early")
def lists_of_tensors_pass_checkpointing():
    """As Qwen3-VL's deepstack features: a list among the arguments and among the results."""
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
    tensor_parallel.checkpoint(lambda x: x * 2, False, x).sum().backward()  # one result, no tuple
    assert x.grad.equal(torch.full((3,), 2.0))


def bridge_results() -> dict:
    """Qwen3-VL's attention: freqs [s, b, 1, d], packed ones [t, 1, 1, d], in fp32 or not."""
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
    """MindSpeed passes an object with position ids; its own function takes it."""
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
    """Reading a value of a meta tensor raises."""
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
        torch.rand(7)  # so that the generator has moved on
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


@check("early")
def other_code_over_ours_is_reported():
    import npu_ops_adapters

    module, name = sys.modules[BDA], "bias_dropout_add_unfused"
    ours, original = getattr(module, name), inspect.unwrap(getattr(module, name))
    importer = types.ModuleType("by_value")
    sys.modules["by_value"] = importer
    try:
        importer.kept = original
        module.bias_dropout_add_unfused = lambda training: None
        importer.kept_train = inspect.unwrap(module.bias_dropout_add_fused_train)
        found = states(npu_ops_adapters.verify())
        overwritten = found[f"{BDA}:{name}", "bias_dropout_add"]
        assert overwritten.startswith("overwritten by megatron_checks.other_code_over"), overwritten
        captured = found[f"{BDA}:bias_dropout_add_fused_train", "bias_dropout_add"]
        assert captured == "captured too early by by_value", captured
    finally:
        module.bias_dropout_add_unfused = ours
        del sys.modules["by_value"]
    assert states(npu_ops_adapters.verify()) == dict.fromkeys(targets(), "applied")


@check("early")
def with_us_computed():
    RESULTS["with"] = compute()


@check("early")
def reverted():
    """What was there is back, also where our functions were imported from us."""
    import npu_ops_adapters
    import torch

    ours = [held(target) for target, _ in TARGETS]
    originals = {target: inspect.unwrap(f) for (target, _), f in zip(TARGETS, ours, strict=True)}
    ours += [held(target) for target, _ in gdn_targets() if "HAVE_FLA" not in target]
    rows = npu_ops_adapters.revert()
    assert {row.sentence for row in rows} == {"reverted"} and len(rows) == len(targets())
    assert npu_ops_adapters.verify() == []
    holders = [key for key, value in snapshot().items() if any(value is f for f in ours)]
    assert holders == [], holders
    for target, original in originals.items():
        module, _, name = target.partition(":")
        current = held(target)
        if name == "jit_fuser":
            assert current is torch.compile
        elif name.startswith("fused_apply"):
            assert current is None
        else:
            assert current is original and current.__module__ == module, target
    for target, op in gdn_targets():
        value = held(target)
        is_method = op in ("gdn_gate", "rms_norm_gated")
        assert value.__module__ == gdn().__name__ if is_method else not value, target
    for name, module in sys.modules.items():
        if name.startswith("megatron.core."):
            assert getattr(module, "jit_fuser", torch.compile) is torch.compile, name
    assert not any(type(f).__module__ == "npu_ops_autoload" for f in sys.meta_path)


@check("early")
def without_us_computed():
    RESULTS["without"], calls = compute(), dict(CALLS)
    assert calls == CALLS


@check("early")
def bias_dropout_add_equals_megatrons():
    compare("bda")


@check("early")
def rope_equals_megatrons():
    compare("rope")


@check("early")
def packed_rope_equals_megatrons():
    compare("packed rope")


@check("early")
def attention_equals_megatrons():
    compare("attention")


@check("early")
def bridge_equals_megatrons():
    compare("bridge")


@check("early")
def a_spec_by_hand_has_our_attention():
    """Nothing is registered here; a spec is not changed, and says the same twice."""
    import megatron_cpu
    import npu_ops_adapters.megatron
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from npu_ops_tools import demo_model

    config = types.SimpleNamespace(normalization="LayerNorm")
    spec = demo_model.layers(config)
    ours = npu_ops_adapters.megatron.npuify(spec)
    attention = spec.submodules.self_attention.submodules.core_attention
    assert attention is DotProductAttention
    assert npu_ops_adapters.megatron.npuify(ours) is ours
    assert ours.submodules.mlp is spec.submodules.mlp
    expected = megatron_cpu.step(megatron_cpu.gpt("rope"))
    actual, calls = calls_of("attention", megatron_cpu.step, megatron_cpu.gpt("rope", spec=ours))
    assert calls == 2
    for name, value in expected.items():
        assert (value - actual[name]).abs().max() < 1e-5, name


@check("early")
def the_model_equals_megatrons():
    compare("model")


@check("early")
def gated_delta_net_equals_megatrons():
    compare("gated delta net, model")
    compare("gated delta net, layer", unit=0, rounding=2**-5)  # one op after the other


@check("early")
def gated_delta_net_is_not_half_replaced():
    """Without fla and with an op disabled: no layer is built, as without us."""
    import megatron_cpu
    import npu_ops_adapters

    from npu_ops.core import env

    with env.override(disable=frozenset({"l2norm"})):
        found = states(npu_ops_adapters.apply())
    assert found[f"{gdn().__name__}:HAVE_FLA", "gated_delta_net"] == (
        "refused: it cannot be made: ValueError: l2norm: got None, needs ours or fla's"
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
            "got (t, freqs, plan) of megatron_checks.changed_upstream"
        )
        assert found == dict.fromkeys(targets() - {target}, "applied")
        assert module._apply_rotary_pos_emb_thd is changed_upstream
        npu_ops_adapters.revert()
    finally:
        module._apply_rotary_pos_emb_thd = original


def changed_upstream(t, freqs, plan):
    return t


def held(target: str):
    module, _, path = target.partition(":")
    owner, name = sys.modules[module], path.rpartition(".")[2]
    for part in path.split(".")[:-1]:
        owner = vars(owner)[part]
    return vars(owner).get(name)


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


@check("late")
def nothing_is_registered():
    import_everything()
    assert not any(type(f).__module__ == "npu_ops_autoload" for f in sys.meta_path)


@check("late")
def jit_fuser_is_undone():
    """Every function that the source decorates is compiled before and plain after."""
    import npu_ops_adapters
    import torch
    from npu_ops_adapters.megatron import jit_fuser

    fixed, local = decorated_sites()
    compiled = {path: attribute(path, module) for path, module in fixed.items()}
    for path, value in compiled.items():
        assert hasattr(getattr(value, "__func__", value), "_torchdynamo_orig_callable"), path
    RESULTS["before"] = snapshot()

    found = states(npu_ops_adapters.apply())
    assert targets() < found.keys() and set(found.values()) == {"applied"}, found
    assert len(found) - len(targets()) == len(fixed)  # each a patch of its own
    assert set(jit_fuser.uncompiled()) == set(fixed)
    held = snapshot()
    for path, value in compiled.items():
        holders = [key for key, other in held.items() if other is value]
        assert holders == [], f"{path} is still compiled in {holders}"
    for path, module in (fixed | local).items():
        assert sys.modules[module].jit_fuser.__name__ == "npu_ops_leave_uncompiled", path
    assert torch.compile.__module__ == "torch"
    assert set(states(npu_ops_adapters.verify()).values()) == {"applied"}


@check("late")
def what_says_torch_compile_stays_compiled():
    """Some methods of the router are decorated with torch.compile itself, on purpose."""
    router = importlib.import_module("megatron.core.transformer.moe.router")
    source = pathlib.Path(router.__file__).read_text()
    compiled = [
        raw
        for value in vars(router).values()
        if isinstance(value, type) and value.__module__ == router.__name__
        for raw in vars(value).values()
        if hasattr(getattr(raw, "__func__", raw), "_torchdynamo_orig_callable")
    ]
    assert len(compiled) == source.count("    @torch.compile\n")


@check("late")
def importers_by_value_have_ours():
    """rotary_pos_embedding imports the functions of rope_utils; so may models elsewhere."""
    module = importlib.import_module("megatron.core.models.common.embeddings.rotary_pos_embedding")
    for name in ("_apply_rotary_pos_emb_bshd", "_apply_rotary_pos_emb_thd"):
        assert getattr(module, name) is getattr(sys.modules[ROPE], name)


@check("late")
def a_model_trains_uncompiled():
    import megatron_cpu
    import torch

    for position in ("rope", "mrope"):
        model = megatron_cpu.gpt(position, bias_dropout_fusion=True, apply_rope_fusion=True)
        result, calls = calls_of("bias_dropout_add", megatron_cpu.step, model)
        assert calls == 4 and torch.isfinite(result["loss"])
    assert not torch._dynamo.utils.counters["frames"]


@check("late")
def every_object_is_put_back():
    import npu_ops_adapters

    assert {row.sentence for row in npu_ops_adapters.revert()} == {"reverted"}
    assert changed(RESULTS["before"], snapshot()) == []


@check("late")
def it_can_be_applied_and_put_back_again():
    import npu_ops_adapters

    assert set(states(npu_ops_adapters.apply()).values()) == {"applied"}
    assert states(npu_ops_adapters.apply()) == states(npu_ops_adapters.plan())
    npu_ops_adapters.revert()
    assert changed(RESULTS["before"], snapshot()) == []


@check("late")
def modules_run_again_are_patched_again():
    import npu_ops_adapters

    npu_ops_adapters.apply()
    for name in (BDA, ROPE):
        importlib.reload(sys.modules[name])
        found = states(npu_ops_adapters.verify())
        assert targets() <= found.keys() and set(found.values()) == {"applied"}, found
    train = sys.modules[BDA].bias_dropout_add_fused_train
    assert inspect.unwrap(train).__globals__ is vars(sys.modules[BDA])
    assert train.__wrapped__ is inspect.unwrap(train)  # once
    npu_ops_adapters.revert()
    assert sys.modules[BDA].bias_dropout_add_unfused.__module__ == BDA


def run(mode: str) -> None:
    import torch

    torch.set_num_threads(1)
    started = False
    for function in CHECKS[mode]:
        if is_of_gated_delta_net(function) and gdn() is None:
            continue
        try:
            function()
            if not started:
                import megatron_cpu

                megatron_cpu.start()
                counting.on_calls(CALLS, note_call)
                started = True
            error = None
        except Exception:
            error = traceback.format_exc()
        print(json.dumps([function.__name__, error]), flush=True)
