"""Replaces torch_npu's grouped matrix product, and its sums over the experts of a token.

vllm-ascend, SGLang, MindSpeed and verl call these operators of mixtures of experts.
`npu_ops.grouped_linear` computes the product.
The sum multiplies each expert's result by its routing weight, rounds it, and adds in order of
expert id, because frameworks list a token's experts in different orders. torch_npu still computes
products that are quantised or have a bias, and the gradients of weights.
"""

from __future__ import annotations

import torch

from npu_ops.consistent.products import with_rows
from npu_ops.core.library import call_torch_npu
from npu_ops.ops.grouped_linear import grouped_linear

# dtype -> its number in torch_npu's argument output_dtype
_DTYPES = {torch.float16: 5, torch.float32: 6, torch.bfloat16: 15}
_BY_ROWS = 0  # group_type: groups divide the rows of x
_ENDS, _COUNTS = 0, 1  # group_list_type: group_list has the end, or the length, of each group
# drop_pad_mode: order of the row indices of T tokens with K experts each: [K, T], or [T, K]
_BY_COLUMNS, _BY_TOKENS = 0, 2
_PLAIN = {"split_item", "output_dtype"}  # arguments that a plain product may have, see `_is_plain`


def weighted_sum(rows, place, weights=None) -> torch.Tensor:
    """Multiply each token's rows by its weights, round, and add them in order of expert id.

    rows: `[S, H]`, sorted by expert id.
    place: `[T, K]`, indices of each token's rows.
    weights: `[T, K]`, rounded to the dtype of rows; None: all are 1.

    Returns `[T, H]`.
    """
    order = order_of(place)
    found = rows[place.gather(-1, order)]
    if weights is not None:
        found = found * weights.gather(-1, order).to(rows.dtype)[..., None]
    return found.sum(1, dtype=rows.dtype)  # without dtype, autocast would return fp32


def order_of(numbers) -> torch.Tensor:
    """Return a stable argsort of the last dimension, int64.

    numbers: integers below 2**24, so that fp32 represents them exactly. They are sorted in fp32
    because an NPU sorts fp32 on its vector cores, but integers on its slower AI CPU.
    """
    return numbers.float().argsort(dim=-1, stable=True)


def npu_grouped_matmul(x, weight, *, group_list=None, group_type=None, group_list_type=0, **others):
    """Compute plain products with `grouped_linear`, and all others with torch_npu.

    A product is plain if its groups divide the rows of x and `_is_plain` returns True.
    """
    given = {"group_list": group_list, "group_type": group_type, "group_list_type": group_list_type}
    plain = group_type == _BY_ROWS and group_list_type in (_ENDS, _COUNTS)
    if not (plain and _is_plain(x, weight, group_list, others)):
        return call_torch_npu("npu_grouped_matmul", x, weight, **given, **others)
    ends = group_list.cumsum(0) if group_list_type == _COUNTS else group_list
    return [grouped_linear(x[0], _matrices(weight), ends)]


def npu_moe_token_unpermute(
    permuted_tokens, sorted_indices, probs=None, padded_mode=False, restore_shape=None
):
    """Return tokens in their original order: `weighted_sum` adds the rows of each token.

    Raises:
        ValueError: `padded_mode` is True.
    """
    if padded_mode:
        raise ValueError("padded_mode: got True, needs False with NPU_OPS_CONSISTENT")
    place = sorted_indices.long().view(-1, 1 if probs is None else probs.shape[1])
    return weighted_sum(permuted_tokens, place, probs)


def npu_moe_finalize_routing(
    expanded_permuted_rows, skip1, skip2, bias, scales, expanded_src_to_dst_row,
    export_for_source_row, drop_pad_mode=0, k=1,
):  # fmt: skip
    """Add the experts' results of each token with `weighted_sum`.

    torch_npu still computes calls with skip1, skip2 or bias, calls without scales, and calls with a
    drop_pad_mode other than 0 and 2.
    """
    alone = all(x is None for x in (skip1, skip2, bias))
    if not alone or scales is None or drop_pad_mode not in (_BY_COLUMNS, _BY_TOKENS):
        return call_torch_npu(
            "npu_moe_finalize_routing", expanded_permuted_rows, skip1, skip2, bias, scales,
            expanded_src_to_dst_row, export_for_source_row, drop_pad_mode, k,
        )  # fmt: skip
    tokens, chosen = scales.shape
    place = expanded_src_to_dst_row.long()
    by_token = drop_pad_mode == _BY_TOKENS
    place = place.view(tokens, chosen) if by_token else place.view(chosen, tokens).t()
    return weighted_sum(expanded_permuted_rows, place, scales)


def _is_plain(x, weight, group_list, others) -> bool:
    """Return whether a grouped product is plain: one x, one dtype, no scale, bias or activation."""
    if len(x) != 1 or group_list is None or x[0].dtype not in _DTYPES:
        return False
    dtype = x[0].dtype
    more = {name for name, value in others.items() if value not in (None, [], 0)} - _PLAIN
    narrow = others.get("output_dtype") in (None, dtype, _DTYPES[dtype])
    dims = {w.dim() for w in weight} == ({3} if len(weight) == 1 else {2})
    return not more and narrow and dims and all(w.dtype is dtype for w in weight)


def _matrices(weight) -> torch.Tensor:
    """Return torch_npu's weights, one `[G, K, N]` or G of `[K, N]`, as `[G, N, K]`.

    Raises:
        ValueError: a weight has a private format of the vendor.
    """
    matrices = [with_rows("weight", each).transpose(-2, -1) for each in weight]
    return matrices[0] if len(matrices) == 1 else torch.stack(matrices)


OPERATORS_OF_TORCH_NPU = {"npu_moe_token_unpermute": npu_moe_token_unpermute}
# Functions that pass some calls on to torch_npu.
SHARED_WITH_TORCH_NPU = {
    function.__name__: function for function in (npu_grouped_matmul, npu_moe_finalize_routing)
}
