"""The gated delta rule token by token: decoding with a cache."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable

from npu_ops_adapters.calls import token_by_token
from npu_ops_adapters.patching import Patch
from npu_ops_adapters.transformers import models
from npu_ops_adapters.transformers.chunk_gated_delta_rule import checked

_NAMES = (
    *("query", "key", "value", "g", "beta", "initial_state", "output_final_state"),
    "use_qk_l2norm_in_kernel",
)


def patches() -> Iterable[Patch]:
    """`torch_recurrent_gated_delta_rule`, which calls fla's where that is installed."""
    yield from models.replaced(
        models.DELTA_NET,
        "torch_recurrent_gated_delta_rule",
        "fused_recurrent_gated_delta_rule",
        ours,
        (*_NAMES, "kwargs"),
        _NAMES,  # 4
    )


def ours(
    query, key, value, g, beta, initial_state=None, output_final_state=False,
    use_qk_l2norm_in_kernel=False, cu_seqlens=None, **unread,
) -> Callable:  # fmt: skip
    """Return the npu-ops call for this call of transformers. Other options are not read."""
    arguments = checked(query, key, value, g, beta, initial_state, cu_seqlens)
    return functools.partial(
        token_by_token, **arguments,
        output_final_state=output_final_state, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
    )  # fmt: skip
