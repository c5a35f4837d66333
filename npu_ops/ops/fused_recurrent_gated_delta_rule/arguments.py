"""Shared by all gated delta rules: checks arguments, and defines the largest K and V.

gated_delta_rule_update uses only `MAX_DIM`. `call` is a NamedTuple of a public function's
arguments.
"""

from __future__ import annotations

from npu_ops.core import check, indices, library
from npu_ops.ops.fused_recurrent_gated_delta_rule.reference import compute_dtype

MAX_DIM = 256  # largest K and V


def check_call(call) -> None:
    """Check the arguments of `fused_recurrent_gated_delta_rule`."""
    check_common(call)
    tokens, keys, values = call.v.shape[:3], call.q.shape[3], call.v.shape[3]
    check_like("g", call.g, call.v, tokens)
    check_like("gk", call.gk, call.v, (*tokens, keys))
    check_like("gv", call.gv, call.v, (*tokens, values))
    check_like("beta", call.beta, call.v, tokens, (*tokens, values))


def check_common(call, more_rows=None, bias_by_key: bool = False) -> None:
    """Check the arguments that the three functions share, except the shapes of gates and beta.

    more_rows: None, or a function of K and V that returns the extra rows of a carried state.
    bias_by_key: whether dt_bias has an element for each key of a value head.
    """
    names = ("initial_state", "A_log", "dt_bias", "cu_seqlens", "cu_seqlens_cpu", "chunk_indices")
    check.optional_tensors(**{n: getattr(call, n, None) for n in names})
    _check_heads(call.q, call.k, call.v)
    _check_flags(call, bias_by_key)
    check.scale("scale", call.scale)
    if call.cu_seqlens is not None:
        shared = getattr(call, "cp_group", None) is not None
        _check_cu_seqlens(call.cu_seqlens, call.v, shared)
    if call.initial_state is not None:
        _check_state(call, more_rows(call.q.shape[3], call.v.shape[3]) if more_rows else 0)


def check_like(name, x, like, *shapes) -> None:
    """Check that an optional floating tensor is on v's device and has one of the shapes."""
    if x is None:
        return
    check.floating(name, x)
    check.same_device(name, x, "v", like)
    if tuple(x.shape) not in [tuple(shape) for shape in shapes]:
        raise check.shape(name, x, " or ".join(str(list(shape)) for shape in shapes))


def _check_heads(q, k, v) -> None:
    """Check q, k `[B, T, H, K]` and v `[B, T, HV, V]`."""
    check.floating("q", q)
    for name, x in (("k", k), ("v", v)):
        check.floating(name, x)
        check.same_dtype(name, x, "q", q)
        check.same_device(name, x, "q", q)
    for name, x in (("q", q), ("v", v)):
        if x.dim() != 4 or not (0 < x.shape[3] <= MAX_DIM and x.shape[2]):
            raise check.shape(name, x, f"[B, T, heads, 1 to {MAX_DIM}]")
    if k.shape != q.shape:
        raise check.shape("k", k, f"q's {list(q.shape)}")
    if v.shape[:2] != q.shape[:2] or v.shape[2] % q.shape[2]:
        batch, length, heads = q.shape[:3]
        raise check.shape("v", v, f"[{batch}, {length}, HV, V], HV a multiple of {heads}")


def _check_flags(call, bias_by_key: bool) -> None:
    """Check that each flag's tensors are given, and that no tensor is given without its flag."""
    unbounded = getattr(call, "lower_bound", None) is None
    for name, x in (("g", call.g), ("A_log", call.A_log)):
        if call.use_gate_in_kernel and x is None and (name == "g" or unbounded):
            raise ValueError(f"{name}: got None, needs a tensor for use_gate_in_kernel=True")
    keys = call.q.shape[3] if bias_by_key else 1
    for name, x, each in (("A_log", call.A_log, 1), ("dt_bias", call.dt_bias, keys)):
        if x is not None and not call.use_gate_in_kernel:
            raise ValueError(f"{name}: got a tensor, needs use_gate_in_kernel=True")
        check_like(name, x, call.v, (call.v.shape[2] * each,))
    if call.allow_neg_eigval and not call.use_beta_sigmoid_in_kernel:
        raise ValueError("allow_neg_eigval: got True, needs use_beta_sigmoid_in_kernel=True")
    if call.use_beta_sigmoid_in_kernel and call.beta is None:
        raise ValueError("beta: got None, needs logits for use_beta_sigmoid_in_kernel=True")


def _check_cu_seqlens(cu_seqlens, v, shared: bool) -> None:
    """Check cu_seqlens; do not check its values if reading them would wait for a device.

    shared: other ranks hold tokens of the sequences, so the total number is unknown here.
    """
    check.indices("cu_seqlens", cu_seqlens)
    check.same_device("cu_seqlens", cu_seqlens, "v", v)
    if cu_seqlens.dim() != 1 or cu_seqlens.numel() < 2:
        raise check.shape("cu_seqlens", cu_seqlens, "[sequences + 1]")
    if v.shape[0] != 1:
        raise ValueError(f"cu_seqlens: got a value with batch {v.shape[0]}, needs batch 1")
    if library.readable(cu_seqlens) and not shared:
        indices.check_starts("cu_seqlens", cu_seqlens, v.shape[1])


def _check_state(call, more_rows: int) -> None:
    """Check initial_state: one state per sequence, in fp32 (fp64 if v is)."""
    state, v, keys, starts = call.initial_state, call.v, call.q.shape[3], call.cu_seqlens
    check.dtype("initial_state", state, compute_dtype(v))
    check.same_device("initial_state", state, "v", v)
    sequences = v.shape[0] if starts is None else starts.shape[0] - 1
    matrix = (v.shape[3], keys) if call.state_v_first else (keys, v.shape[3])
    needs = (sequences, v.shape[2], matrix[0] + more_rows, matrix[1])
    if tuple(state.shape) != needs:
        needs = f"{list(needs)} (state_v_first={call.state_v_first})"
        raise check.shape("initial_state", state, needs)
