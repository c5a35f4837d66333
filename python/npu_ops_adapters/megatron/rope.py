"""Replaces the functions of Megatron's unfused rope, and fills the slots of its fused rope.

A slot is a name that holds Transformer Engine's function, or None. Megatron looks up all these
names at each call. Calls that npu-ops does not support run the function that was there before.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch

import npu_ops
from npu_ops.core import check, library
from npu_ops_adapters.patching import Patch

MODULE = "megatron.core.models.common.embeddings.rope_utils"
VERSIONS = "Megatron-Core 0.12 to 0.19 and main"

_HEAD = ("t", "freqs", "rotary_interleaved")
SBND_SIGNATURES = (
    (*_HEAD, "multi_latent_attention", "mscale"),
    (*_HEAD, "mla_rotary_interleaved", "mscale", "multi_latent_attention"),
    (
        *(*_HEAD, "mla_rotary_interleaved", "mscale"),
        *("inverse", "mla_output_remove_interleaving", "multi_latent_attention"),
    ),
)
_PACKED_HEAD = ("t", "cu_seqlens", "freqs", "rotary_interleaved")
_PACKED_SIGNATURES = (
    (*_PACKED_HEAD, "multi_latent_attention", "mscale"),
    (*_PACKED_HEAD, "multi_latent_attention", "mscale", "cp_group"),
    (*_PACKED_HEAD, "mla_rotary_interleaved", "mscale", "cp_group", "multi_latent_attention"),
    (
        *(*_PACKED_HEAD, "mla_rotary_interleaved", "mscale", "inverse"),
        *("mla_output_remove_interleaving", "cp_group", "multi_latent_attention", "max_seqlen"),
    ),
)
_FUSED_SIGNATURES = (None, ("t", "freqs", "transpose_output_memory", "interleaved"))
_FUSED_PACKED = ("t", "cu_seqlens", "freqs", "cp_size", "cp_rank")
_FUSED_PACKED_SIGNATURES = (None, _FUSED_PACKED, (*_FUSED_PACKED, "interleaved"))


def patches() -> Iterable[Patch]:
    """Patch the two functions of the unfused path, then the two slots of the fused one."""
    unfused = "it launches six kernels per call, and computes cos and sin again in every layer"
    slot = "it is None without Transformer Engine, and apply_rope_fusion=True then raises an error"
    yield _patch("_apply_rotary_pos_emb_bshd", _replace_sbnd, unfused, SBND_SIGNATURES)
    yield _patch("_apply_rotary_pos_emb_thd", _replace_packed, unfused, _PACKED_SIGNATURES)
    yield _patch("fused_apply_rotary_pos_emb", _fill, slot, _FUSED_SIGNATURES, rebind=False)
    yield _patch(
        "fused_apply_rotary_pos_emb_thd", _fill_packed, slot, _FUSED_PACKED_SIGNATURES, rebind=False
    )


def _patch(name, make, why, signatures, rebind=True) -> Patch:
    return Patch(
        target=f"{MODULE}:{name}",
        op="rope",
        make=make,
        why=why,
        signatures=signatures,
        versions=VERSIONS,
        remove_when="Megatron-Core calls an operator here that has an NPU kernel",
        rebind=rebind,
    )


def replace_sbnd(original: Callable, has_batch: bool) -> Callable:
    """Return a replacement for `_apply_rotary_pos_emb_bshd`.

    Despite the name, its tensors are `[s, b, h, d]`.

    has_batch: accept multimodal freqs `[s, b, 1, r]`; otherwise `[s, 1, 1, r]`.
    """
    read, fall_through = _reader(original), tolerant(original)

    @functools.wraps(original, assigned=(), updated=())
    def npu_ops_rope(*args, **kwargs):
        call = read(args, kwargs)
        if call is None or not _is_ours(call, has_batch):
            return fall_through(*args, **kwargs)
        return _rotate(call, layout="SBND")

    return npu_ops_rope


def rotated(t, freqs, rotary_interleaved: bool):
    """Return t `[s, b, h, d]` rotated by freqs `[s, 1 or b, 1, r]`, or None if unsupported."""
    call = _Call(t, freqs, rotary_interleaved)
    ours = any(_is_ours(call, has_batch) for has_batch in (False, True))
    return _rotate(call, layout="SBND") if ours else None


def _replace_sbnd(original: Callable) -> Callable:
    return replace_sbnd(original, has_batch=False)


def _replace_packed(original: Callable) -> Callable:
    read, fall_through = _reader(original), tolerant(original)
    group_of = _context_parallel(original)
    knows_per_token = _knows_per_token()

    @functools.wraps(original, assigned=(), updated=())
    def npu_ops_packed_rope(*args, **kwargs):
        call = read(args, kwargs)
        group = group_of(call) if call and _is_ours_packed(call) else None
        if group is None or _ends_early(call, group[0]):
            return fall_through(*args, **kwargs)
        return _rotate_packed(call, *group, knows_per_token)

    return npu_ops_packed_rope


def _fill(original: Callable | None) -> Callable:
    def npu_ops_fused_rope(t, freqs, transpose_output_memory=False, interleaved=False):
        call = _Call(t, freqs, rotary_interleaved=interleaved)
        if _is_ours(call, has_batch=False):
            return _rotate(call, layout="SBND")
        if original is None:
            unfused = sys.modules[MODULE]._apply_rotary_pos_emb_bshd
            return unfused(t, freqs, rotary_interleaved=interleaved)
        return original(t, freqs, transpose_output_memory, interleaved)

    return npu_ops_fused_rope


def _fill_packed(original: Callable | None) -> Callable:
    knows_per_token = _knows_per_token()

    def npu_ops_fused_packed_rope(t, cu_seqlens, freqs, cp_size=1, cp_rank=0, interleaved=False):
        call = _Call(t, freqs, rotary_interleaved=interleaved, cu_seqlens=cu_seqlens)
        if _is_ours_packed(call) and not (original is None and _ends_early(call, cp_size)):
            # As in the unfused path, so that per-token (multimodal) freqs also work with fusion.
            return _rotate_packed(call, cp_size, cp_rank, knows_per_token)
        if original is None:
            return _unfused_packed(call, cp_size, cp_rank)
        # Megatron-Core before 0.17 has no argument `interleaved`.
        more = {"interleaved": True} if interleaved else {}
        return original(t, cu_seqlens, freqs, cp_size=cp_size, cp_rank=cp_rank, **more)

    return npu_ops_fused_packed_rope


class _Group(NamedTuple):
    """Stands for a process group: has the two methods that Megatron's packed function calls."""

    ranks: int
    own: int

    def size(self):
        return self.ranks

    def rank(self):
        return self.own


def _unfused_packed(call, cp_size, cp_rank):
    unfused = sys.modules[MODULE]._apply_rotary_pos_emb_thd
    more = {}
    if "cp_group" in inspect.signature(unfused).parameters:  # 0.12 uses parallel_state instead
        more["cp_group"] = _Group(cp_size, cp_rank)
    interleaved = call.rotary_interleaved
    return unfused(call.t, call.cu_seqlens, call.freqs, rotary_interleaved=interleaved, **more)


class _Call(NamedTuple):
    """The arguments of the functions in all versions of Megatron together."""

    t: torch.Tensor = None
    freqs: torch.Tensor = None
    rotary_interleaved: bool = False
    mla_rotary_interleaved: bool = False
    mscale: float = 1.0
    inverse: bool = False
    mla_output_remove_interleaving: bool = False
    cu_seqlens: torch.Tensor = None
    cp_group: object = None
    max_seqlen: int | None = None


_ADDED = {*_Call._fields, "multi_latent_attention"}  # arguments of all versions


def _reader(original: Callable) -> Callable[[tuple, dict], _Call | None]:
    """Return a function that parses a call; it returns None to leave the call to the original.

    Positional arguments follow this version's order. Keywords of any version are accepted, because
    MindSpeed puts functions of earlier versions into later ones.
    """
    names = list(inspect.signature(original).parameters)
    renamed = {}
    if "mla_rotary_interleaved" not in names:  # up to 0.18: multi_latent_attention
        renamed = {"multi_latent_attention": "mla_rotary_interleaved"}
        names = [renamed.get(name, name) for name in names]
    packing = {"cu_seqlens", "cp_group", "max_seqlen"}
    known = set(_Call._fields) - (set() if "cu_seqlens" in names else packing)

    def read(args, kwargs):
        given = dict(zip(names, args, strict=False))
        given.update((renamed.get(name, name), value) for name, value in kwargs.items())
        if len(given) != len(args) + len(kwargs):  # invalid: the original reports it
            return None
        if (
            given.get("multi_latent_attention", True) is None
        ):  # deprecated; None: the caller did not set it
            del given["multi_latent_attention"]
        return _Call(**given) if given.keys() <= known else None

    return read


def tolerant(original: Callable) -> Callable:
    """Wrap a function of an earlier version: drop arguments that it lacks and does not need.

    - Arguments that are off: None, False or 0.
    - cp_group: the function finds the group itself.
    - max_seqlen: it is only an upper bound.
    """
    names = inspect.signature(original).parameters
    needless = ("cp_group", "max_seqlen")

    def call(*args, **kwargs):
        if "mla_rotary_interleaved" not in names and "mla_rotary_interleaved" in kwargs:
            kwargs["multi_latent_attention"] = kwargs.pop("mla_rotary_interleaved")
        kwargs = {
            name: value
            for name, value in kwargs.items()
            if name in names or name not in _ADDED or (value and name not in needless)
        }
        return original(*args, **kwargs)

    return call


def _is_ours(call: _Call, has_batch: bool) -> bool:
    t, freqs = call.t, call.freqs
    return (
        _has_tables(call)
        and t.dim() == 4
        and freqs.shape[0] == t.shape[0]
        and freqs.shape[1] in (1, t.shape[1])
        and (freqs.shape[1] > 1) == has_batch
    )


def _is_ours_packed(call: _Call) -> bool:
    t, cu_seqlens = call.t, call.cu_seqlens
    return (
        isinstance(cu_seqlens, torch.Tensor)  # MindSpeed passes an object to reset masks
        and cu_seqlens.dtype in (torch.int32, torch.int64)
        and cu_seqlens.dim() == 1
        and cu_seqlens.numel() > 1
        and _has_tables(call)
        and cu_seqlens.device == t.device
        and t.dim() == 3
        and call.freqs.shape[1] == 1
    )


def _ends_early(call: _Call, cp_size: int) -> bool:
    """Return whether the last sequence ends before or after the last token.

    Without max_seqlen Megatron's own function reads the lengths; up to 0.19 it raises in this case.
    On a device and in a trace npu-ops does not read the lengths. There tokens after the last
    sequence count as padding.
    """
    if call.max_seqlen is not None or not library.readable(call.cu_seqlens):
        return False
    return int(call.cu_seqlens[-1]) != call.t.shape[0] * cp_size


def _has_tables(call: _Call) -> bool:
    t, freqs = call.t, call.freqs
    return (
        isinstance(t, torch.Tensor)
        and isinstance(freqs, torch.Tensor)
        and isinstance(call.mscale, (int, float))
        and t.dtype in check.FLOATS
        and freqs.dtype in check.FLOATS
        and freqs.device == t.device
        and freqs.dim() == 4
        and freqs.shape[2] == 1
        and 0 < freqs.shape[3] <= t.shape[-1]
        and freqs.shape[3] % 2 == 0
        and not (freqs.requires_grad and torch.is_grad_enabled())
    )


def _rotate(call: _Call, **packing) -> torch.Tensor:
    """Rotate with `npu_ops.apply_rotary_pos_emb_freqs`.

    With mla_rotary_interleaved, elements 2j and 2j + 1 of t form a pair. The result has the first
    elements of all pairs, then the second ones. With mla_output_remove_interleaving, it has the
    order of t.
    """
    t, width = call.t, call.freqs.shape[-1]
    if call.mla_rotary_interleaved:
        t = torch.cat((t[..., 0:width:2], t[..., 1:width:2], t[..., width:]), dim=-1)
    out, _ = npu_ops.apply_rotary_pos_emb_freqs(
        t,
        None,
        call.freqs,
        pair_layout="interleaved" if call.rotary_interleaved else "half",
        mscale=call.mscale,
        inverse=bool(call.inverse),
        **packing,
    )
    if call.mla_rotary_interleaved and call.mla_output_remove_interleaving:
        halves = out[..., :width].unflatten(-1, (2, width // 2))
        out = torch.cat((halves.transpose(-1, -2).flatten(-2), out[..., width:]), dim=-1)
    return out


def _rotate_packed(call: _Call, cp_size: int, cp_rank: int, knows_per_token: bool):
    """Rotate without reading cu_seqlens, so nothing waits for the device."""
    max_seqlen = call.max_seqlen
    if not knows_per_token:
        # With this limit, rows of freqs always belong to positions, never to packed tokens.
        max_seqlen = call.freqs.shape[0]
    return _rotate(
        call,
        layout="TND",
        cu_seqlens=call.cu_seqlens,
        max_seqlen=max_seqlen,
        cp_size=cp_size,
        cp_rank=cp_rank,
    )


def _knows_per_token() -> bool:
    """Return whether this version accepts freqs with a row per packed token (from 0.15 on)."""
    slicing = sys.modules[MODULE]._get_thd_freqs_on_this_cp_rank
    return "offset" in inspect.signature(slicing).parameters


def _context_parallel(original: Callable) -> Callable[[_Call], tuple[int, int] | None]:
    """Return a function that finds the context-parallel group's size and rank in this version."""
    if "cp_group" in inspect.signature(original).parameters:
        return lambda call: (
            None if call.cp_group is None else (call.cp_group.size(), call.cp_group.rank())
        )
    state = sys.modules["megatron.core.parallel_state"]
    return lambda call: (
        state.get_context_parallel_world_size() or 1,  # 0 before groups exist
        state.get_context_parallel_rank(),
    )
