"""With NPU_OPS_CONSISTENT, MindSpeed's grouped experts are computed as Megatron's are.

MindSpeed's classes named after Transformer Engine's call torch_npu's grouped matmul, which
`npu_ops.consistent` replaces. Its older classes call an operator that MindSpeed compiles itself.
"""

from __future__ import annotations

from collections.abc import Iterable

from npu_ops.core import env
from npu_ops.ops.grouped_linear import grouped_linear
from npu_ops_adapters.megatron import experts
from npu_ops_adapters.mindspeed import VERSIONS
from npu_ops_adapters.patching import Patch

_HOME = "mindspeed.core.transformer.moe"


def patches() -> Iterable[Patch]:
    """Patch the experts' forward and their grouped matmul; nothing without NPU_OPS_CONSISTENT."""
    if not env.settings.consistent:
        return
    settings = {
        "op": "grouped_linear",
        "versions": VERSIONS,
        "remove_when": "MindSpeed supports only Transformer Engine's experts",
    }
    yield Patch(
        target=f"{_HOME}.moe_feature.gmm.experts:GmmExpertsImpl.forward",
        make=experts.computed,
        why="it multiplies by the weights before the second product",
        signatures=(experts.PARAMETERS,),
        **settings,
    )
    yield Patch(
        target=f"{_HOME}.grouped_gemm_util:Ops.gmm",
        make=lambda original: staticmethod(gmm),
        why="its bits depend on the number of tokens",
        signatures=(),  # not checked: it is a static method
        **settings,
    )


def gmm(a, b, batch_sizes, trans_b=False, gemm_fusion=False, original_weight=None):
    """Multiply each expert's rows of a by its matrix of b, in place of MindSpeed's function.

    a: `[T, K]`. b: `[E, K, N]`. batch_sizes: `[E]`, number of rows of each expert. original_weight
    is ignored.

    Returns:
        `[T, N]`.

    Raises:
        ValueError: trans_b or gemm_fusion is set.
    """
    for name, value in (("trans_b", trans_b), ("gemm_fusion", gemm_fusion)):
        if value:
            raise ValueError(f"{name}: got {value}, needs False with NPU_OPS_CONSISTENT")
    return grouped_linear(a, b.transpose(1, 2), batch_sizes.cumsum(0).to(a.device))
