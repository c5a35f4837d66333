"""Functions with the kernels' signatures. They raise, because npu-ops must replace them."""

from sgl_kernel_npu import absent as __getattr__  # noqa: F401


def causal_conv1d_fn_npu(
    x, weight, bias=None, query_start_loc=None, cache_indices=None, has_initial_state=None,
    conv_states=None, activation="silu", pad_slot_id=-1, **kwargs,
):  # fmt: skip
    raise NotImplementedError("npu-ops takes its place")


def causal_conv1d_update_npu(
    x, conv_state, weight, bias=None, activation=None, cache_seqlens=None, conv_state_indices=None,
    num_accepted_tokens=None, intermediate_conv_window=None, pad_slot_id=-1, metadata=None,
    validate_data=False,
):  # fmt: skip
    raise NotImplementedError("npu-ops takes its place")
