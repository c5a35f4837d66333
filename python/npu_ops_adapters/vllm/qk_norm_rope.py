"""Attention of Qwen3-VL, Qwen3-Next and Qwen3.5 up to the rotation: split, norms of heads, rope.

vllm-ascend gathers the table's rows by position, converts them, adds 1 to the norms' weights if
needed, and then runs one kernel. For Qwen3-Next's text it runs all steps separately. npu-ops runs
one kernel, which looks up the rows itself.

Qwen3 without images is not patched, because vllm-ascend fuses these steps when it compiles a graph.
With NPU_OPS_CONSISTENT all such fusions are off, because the fused kernels round at other places
than training.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable

from npu_ops.core import env, log
from npu_ops_adapters.patching import Patch
from npu_ops_adapters.serving import check_device
from npu_ops_adapters.serving_rotary import norm_and_rotate
from npu_ops_adapters.vllm import functions

WORKER = "vllm_ascend.patch.worker"
_NORMS = {  # whether the norm multiplies by 1 + weight
    "RMSNorm": False, "AscendRMSNorm": False, "GemmaRMSNorm": True, "AscendGemmaRMSNorm": True,
}  # fmt: skip
_FUSIONS = ("fuse_norm_quant", "fuse_qknorm_rope", "fuse_allreduce_rms", "fuse_muls_add")


def patches() -> Iterable[Patch]:
    """Patch the methods of vLLM's attention that vllm-ascend has replaced."""
    for target, signatures in (
        ("patch_qwen3vl:Qwen3Attention", (("self", "positions", "hidden_states"),)),
        ("patch_qwen3vl:Qwen3MoeAttention", (("self", "positions", "hidden_states"),)),
        (
            "patch_qwen3_5:Qwen3NextAttention",
            (
                ("self", "positions", "output", "hidden_states"),
                ("self", "positions", "hidden_states", "output"),
            ),
        ),
    ):
        target = f"{WORKER}.{target}.forward"
        yield Patch(
            target=target,
            op="qk_norm_rope",
            make=functools.partial(_made, target),
            why="the table's rows are gathered and converted first, and weights are added to",
            signatures=signatures,
            versions=functions.VERSIONS,
            remove_when="vllm-ascend's kernel looks up angles by position",
        )
    if env.settings.consistent:
        yield Patch(
            target="vllm_ascend.compilation.graph_fusion_pass_manager:"
            "GraphFusionPassManager.configure",
            op="qk_norm_rope",
            make=_without_fusions,
            why="fused norms, rotations and sums have other roundings than training",
            signatures=(("self", "config"),),
            versions=functions.VERSIONS,
            remove_when="its fused kernels have training's roundings",
        )


def _without_fusions(configure: Callable) -> Callable:
    """Return vllm-ascend's `configure`, after which a compiled model keeps every operator.

    npugraph_ex, the vendor's compiler, is switched off, because it fuses by itself.
    """

    @functools.wraps(configure, assigned=(), updated=())
    def npu_ops_configure(self, config):
        ascend = sys.modules["vllm_ascend.ascend_config"].get_ascend_config()
        ascend.ascend_compilation_config.enable_npugraph_ex = False
        chosen = config.additional_config.setdefault("ascend_compilation_config", {})
        chosen.update(dict.fromkeys(_FUSIONS, False), enable_npugraph_ex=False)
        log.once("NPU_OPS_CONSISTENT: vllm-ascend compiles without fusions and npugraph_ex")
        return configure(self, config)

    return npu_ops_configure


def _made(target: str, original: Callable) -> Callable:
    """Make the replacement.

    Raises:
        ValueError: the method's source is unknown, so it may do more than attention.
    """
    if functions.fingerprint(original) not in FORMS:
        raise ValueError(f"its source is none of those of {functions.VERSIONS}")
    ours = functions.made(FORMS[functions.fingerprint(original)], target, original)

    @functools.wraps(original, assigned=(), updated=())
    def npu_ops_forward(self, *args, **kwargs):
        # Check without exceptions: this is traced, and a graph break is an error.
        if why_not(self):
            return original(self, *args, **kwargs)
        return ours(self, *args, **kwargs)

    return npu_ops_forward


def why_not(attention) -> str | None:
    """Return None, or why vllm-ascend's attention runs in this layer."""
    embedding, q_norm, k_norm = attention.rotary_emb, attention.q_norm, attention.k_norm
    kind = type(embedding).__name__
    gated = hasattr(attention, "attn_output_gate")
    if kind != "AscendMRotaryEmbedding" and not (kind == "AscendRotaryEmbedding" and gated):
        return f"{kind}: vllm-ascend fuses it, or it rotates in its own way"
    if getattr(embedding, "use_mtp", False):
        return "a draft model's positions may have to be gathered from other ranks"
    if type(q_norm).__name__ not in _NORMS or type(k_norm) is not type(q_norm):
        return f"{type(q_norm).__name__}: another norm"
    if getattr(q_norm, "bias_loaded", False) or getattr(k_norm, "bias_loaded", False):
        return "the norms have a bias"
    if q_norm.variance_epsilon != k_norm.variance_epsilon:
        return "the norms have two epsilons"
    return None


def prepared(self, positions, hidden_states, gated: bool = False):
    """Return q, k and v `[T, heads * D]`, and the gate or None."""
    check_device(hidden_states)
    qkv, _ = self.qkv_proj(hidden_states)
    zero_centered = _NORMS[type(self.q_norm).__name__]
    q, k, v, gate = norm_and_rotate(self, positions, qkv, zero_centered=zero_centered, gated=gated)
    return q, k, v, gate if gate is None else gate.flatten(1)


def ours(self, positions, hidden_states):
    """Run attention of Qwen3-VL."""
    q, k, v, _ = prepared(self, positions, hidden_states)
    return self.o_proj(self.attn(q, k, v))[0]


def ours_gated(self, positions, hidden_states, output=None):
    """Run attention of Qwen3-Next and Qwen3.5.

    Return the result, and write it to output if that is given.
    """
    q, k, v, gate = prepared(self, positions, hidden_states, bool(self.attn_output_gate))
    o = self.attn(q, k, v)
    if gate is not None:
        o = o * gate.sigmoid()
    out = self.o_proj(o)[0]
    if output is not None:
        output[:] = out
    return out


def ours_into(self, positions, output, hidden_states):
    """Run `ours_gated` with the order of arguments of 0.18.0 and 0.23.0; return nothing."""
    ours_gated(self, positions, hidden_states, output)


FORMS = {  # keys: functions.fingerprint of the method
    "3501a4e14b99": ours,  # 0.18.0, 0.23.0, main
    "e08eb2ad203d": ours_into,  # 0.18.0, 0.23.0
    "76d083daf813": ours_gated,  # main of August 2026
}
