"""Find the functions of one release of megatron-core; count the calls that reach npu_ops."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import pathlib
import sys
import types

JIT = "megatron.core.jit"
BDA = "megatron.core.fusions.fused_bias_dropout"
SWIGLU = "megatron.core.fusions.fused_bias_swiglu"
ROPE = "megatron.core.models.common.embeddings.rope_utils"
GDN = "megatron.core.ssm.gated_delta_net"
TRANSFORMER = "megatron.core.transformer"
BRIDGE = "megatron.bridge.models.qwen_vl.modelling_qwen3_vl"  # the stand-in in doubles/
CHECKPOINT = "megatron.core.tensor_parallel.random"
TARGETS = {
    (f"{JIT}:jit_fuser", "jit_fuser"),
    (f"{BDA}:bias_dropout_add_fused_train", "bias_dropout_add"),
    (f"{BDA}:bias_dropout_add_fused_inference", "bias_dropout_add"),
    (f"{BDA}:bias_dropout_add_unfused", "bias_dropout_add"),
    (f"{SWIGLU}:swiglu", "swiglu"),
    (f"{SWIGLU}:swiglu_back", "swiglu"),
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
    """Return the module in which Gated Delta Net's layers look up names; None before 0.16."""
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
    elif gdn().__name__ == GDN:
        ops[f"{owner}.forward"] = "gdn_decay"
    return {(f"{gdn().__name__}:{name}", op) for name, op in ops.items()}


def targets() -> set[tuple[str, str]]:
    """Return every (target, op) that is replaced in this release."""
    return TARGETS | gdn_targets()


def check(*modes):
    def register(function):
        for mode in modes:
            CHECKS[mode].append(function)
        return function

    return register


def names(mode: str, version: str) -> list[str]:
    """Return the names of a release's checks; Gated Delta Net exists from 0.16 on."""
    has_it = tuple(map(int, version.split("."))) >= (0, 16)
    return [f.__name__ for f in CHECKS[mode] if has_it or not is_of_gated_delta_net(f)]


def is_of_gated_delta_net(function) -> bool:
    return function.__name__.startswith("gated_delta_net")


# Names that the release defines


def decorated_sites() -> tuple[dict[str, str], dict[str, str]]:
    """Return the functions that @jit_fuser decorates, from the source: {name: module}.

    The first dict has those of modules and classes, the second those inside other functions.
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
    """Return the raw attribute at "module.Class.name"."""
    owner = sys.modules[module]
    for part in path.removeprefix(f"{module}.").split("."):
        value = vars(owner)[part]
        owner = value
    return value


def import_everything() -> None:
    """Import every module with a decorated function, or with a name that we rebind."""
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
    """Return every attribute of every module and class of Megatron, and the import hooks."""
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
    """Return the states of the patches of Megatron; other frameworks are not imported here."""
    megatron = [row for row in rows if row.target.startswith("megatron.")]
    return {(row.target, row.op): row.sentence for row in megatron}


def held(target: str):
    module, _, path = target.partition(":")
    owner, name = sys.modules[module], path.rpartition(".")[2]
    for part in path.split(".")[:-1]:
        owner = vars(owner)[part]
    return vars(owner).get(name)


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
