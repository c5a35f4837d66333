"""Checks the public arguments and converts them to the operator's inputs."""

from __future__ import annotations

from npu_ops.core import check
from npu_ops.ops.mrope.sections import resolve_section
from npu_ops.ops.rope import arguments as rope


def by_table(call) -> tuple:
    """Convert a call of `qk_norm_rope` to the operator's inputs."""
    check_heads(call)
    cos, sin = call.cos, call.sin
    rope.check_tables(cos, sin, call.qkv, "qkv")
    packed = call.qkv.dim() == 2
    axes = () if call.mrope_section is None else (3,)
    if cos.dim() != len(axes) + call.qkv.dim() or cos.shape[: len(axes)] != axes:
        shape = "T, R]" if packed else "B, S, R]"
        raise check.shape("cos", cos, f"[3, {shape}" if axes else f"[{shape}")
    cos, sin = (table.unsqueeze(-3) if packed else table for table in (cos, sin))
    batch, length = (1, call.qkv.shape[0]) if packed else call.qkv.shape[:2]
    rope.check_table_size("cos", cos, -2, -3, batch, length, False)
    cos, sin = (table if axes else table[None] for table in (cos, sin))
    dim = call.q_weight.shape[0]
    rotary_dim = rope.resolve_rotary_dim(call.rotary_dim, cos.shape[-1], dim)
    return _inputs(call, cos, sin, None, rotary_dim)


def by_position(call) -> tuple:
    """Convert a call of `qk_norm_rope_cached` to the operator's inputs."""
    check_heads(call)
    cache, positions = call.cos_sin_cache, call.positions
    rope.check_table("cos_sin_cache", cache, call.qkv, "qkv")
    if cache.dim() != 2 or cache.shape[1] % 2:
        raise check.shape("cos_sin_cache", cache, "[max_position, R] with R even")
    rotary_dim, dim = cache.shape[1], call.q_weight.shape[0]
    if call.rotary_dim not in (None, rotary_dim) or not rotary_dim or rotary_dim > dim:
        raise ValueError(
            f"rotary_dim: got {call.rotary_dim}, needs the cache's width {rotary_dim}, at most the "
            f"head dimension {dim}"
        )
    tokens = tuple(call.qkv.shape[:-1])
    axes = 1 if call.mrope_section is None else 3
    shapes = (tokens,) if axes == 1 else (tokens, (3, *tokens))
    rope.check_positions("positions", positions, shapes, cache.shape[0], call.qkv, "qkv")
    if positions.dim() == len(tokens):  # the same for all axes
        positions = positions.expand(axes, *tokens)
    if len(tokens) == 1:
        positions = positions[:, None]
    cos, sin = cache[None, None].chunk(2, dim=-1)
    return _inputs(call, cos, sin, positions, rotary_dim)


def check_heads(call) -> None:
    """Check the projection and its weights."""
    qkv = call.qkv
    check.floating("qkv", qkv)
    if qkv.dim() not in (2, 3):
        raise check.shape("qkv", qkv, "[B, S, W] or [T, W]")
    for name in ("q_weight", "k_weight"):
        weight = getattr(call, name)
        check.floating(name, weight)
        check.same_device(name, weight, "qkv", qkv)
    if call.q_weight.dim() != 1 or not call.q_weight.numel():
        raise check.shape("q_weight", call.q_weight, "[D], the head dimension")
    if call.k_weight.shape != call.q_weight.shape:
        raise check.shape("k_weight", call.k_weight, f"q_weight's {list(call.q_weight.shape)}")
    for name in ("num_heads", "num_kv_heads"):
        number = getattr(call, name)
        if not isinstance(number, int) or isinstance(number, bool) or number < 1:
            raise ValueError(f"{name}: got {number!r}, needs an integer, 1 or more")
    check.epsilon("eps", call.eps)
    queries = call.num_heads * (2 if call.gated else 1)
    width = (queries + 2 * call.num_kv_heads) * call.q_weight.shape[0]
    if qkv.shape[-1] != width:
        gate = ", a gate for each query" if call.gated else ""
        of = f"{call.num_heads} query and {call.num_kv_heads} key heads{gate}"
        raise check.shape("qkv", qkv, f"a last dimension of {width} for {of}")


def _inputs(call, cos, sin, positions, rotary_dim: int) -> tuple:
    """Return the operator's inputs in order; `cos` and `sin` are `[A, Bc, rows, R or R / 2]`."""
    rope.check_pair_layout(call.pair_layout)
    section, section_layout = call.mrope_section, call.section_layout
    if section is not None:
        section = resolve_section(section, section_layout, rotary_dim // 2)
    elif section_layout is not None:
        raise ValueError(f"section_layout: got {section_layout!r}, needs an mrope_section with it")
    return (
        call.qkv, call.q_weight, call.k_weight, cos, sin, positions, call.num_heads,
        call.num_kv_heads, float(call.eps), bool(call.zero_centered), bool(call.gated),
        list(section or ()), section_layout or "chunked", call.pair_layout, rotary_dim,
        bool(call.copy_rest),
    )  # fmt: skip
