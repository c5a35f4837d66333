"""The gated delta rule of Gated Delta Net, token by token: short sequences and decoding."""

from __future__ import annotations

import torch

from npu_ops.core import check, library
from npu_ops.core.registry import explains
from npu_ops.ops.fused_recurrent_gated_delta_rule import op
from npu_ops.ops.fused_recurrent_gated_delta_rule.reference import compute_dtype

__all__ = ["fused_recurrent_gated_delta_rule"]

MAX_DIM = 256


def fused_recurrent_gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor | None = None,
    gk: torch.Tensor | None = None,
    gv: torch.Tensor | None = None,
    beta: torch.Tensor | None = None,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What each token reads from a state that decays, and that moves towards (k, v) by beta.

    For every value head, with a state S of K keys by V values, token by token:
    `S = exp(g) S`, `S = S + k (beta (v - S^T k))^T`, `o = S^T (scale q)`. Takes fla's call as it is
    and, unlike fla's, has a gradient. The state is fp32 all the way.

    Args:
        q, k: `[B, T, H, K]`, K up to 256. v: `[B, T, HV, V]`, V up to 256, in q's dtype. HV is a
            multiple of H: value head i reads with head `i // (HV // H)`.
        g, gk, gv: logarithms of the decay, of any float dtype: `[B, T, HV]` of the whole state,
            `[B, T, HV, K]` by key, `[B, T, HV, V]` by value. What is None does not decay.
        beta: `[B, T, HV]`, or `[B, T, HV, V]` by value; None is 1.
        scale: of q; None: `K ** -0.5`.
        initial_state: fp32 `[N, HV, K, V]` for N sequences; None is 0.
        output_final_state: whether to return the states after the last tokens.
        use_qk_l2norm_in_kernel: q and k are divided by `sqrt(sum(x^2) + 1e-6)` first, in fp32.
        use_gate_in_kernel: g is raw and becomes `-exp(A_log) softplus(g + dt_bias)`, in fp32.
        A_log, dt_bias: `[HV]`, for `use_gate_in_kernel` alone; dt_bias may be None.
        use_beta_sigmoid_in_kernel: beta is raw and becomes its sigmoid, in fp32.
        allow_neg_eigval: that sigmoid is doubled.
        state_v_first: states are `[N, HV, V, K]`.
        cu_seqlens: int32 or int64 `[N + 1]`, with B = 1: the starts of N sequences and their end,
            0 first, T last. A sequence may be empty; its state passes through. On a device the
            values are not checked: results are undefined for wrong ones, but no other memory is
            touched.

    Returns:
        o `[B, T, HV, V]` in v's dtype, and the final states in fp32, or None. Differentiable, once,
        in every floating argument.

    Raises:
        TypeError: a dtype, also of the state, which is never converted. ValueError: a shape, a
        device, flags that do not go together, lengths (on the CPU).

    Source: fla `fused_recurrent_gated_delta_rule`; Gated Delta Networks, arXiv:2412.06464.
    """
    args = _prepare(
        q, k, v, g, gk, gv, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel,
        use_gate_in_kernel, A_log, dt_bias, use_beta_sigmoid_in_kernel, allow_neg_eigval,
        state_v_first, cu_seqlens,
    )  # fmt: skip
    o, final_state = op.call(*args)
    return o, final_state if output_final_state else None


def _prepare(
    q, k, v, g=None, gk=None, gv=None, beta=None, scale=None, initial_state=None,
    output_final_state=False, use_qk_l2norm_in_kernel=False, use_gate_in_kernel=False, A_log=None,
    dt_bias=None, use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False, state_v_first=False,
    cu_seqlens=None,
):  # fmt: skip
    """Check the public arguments; return them as the operator takes them."""
    check_heads(q, k, v)
    tokens, (keys, values) = v.shape[:3], (q.shape[3], v.shape[3])
    check_flags(
        g, beta, A_log, dt_bias, use_gate_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval, v
    )
    for name, gate, shapes in (
        ("g", g, (tokens,)),
        ("gk", gk, ((*tokens, keys),)),
        ("gv", gv, ((*tokens, values),)),
        ("beta", beta, (tokens, (*tokens, values))),
    ):
        check_like(name, gate, v, *shapes)
    if cu_seqlens is not None:
        check_cu_seqlens(cu_seqlens, v)
    check_state(initial_state, v, keys, state_v_first, cu_seqlens)
    wide = compute_dtype(q)
    if use_qk_l2norm_in_kernel:
        q, k = (_l2norm(x.to(wide)) for x in (q, k))
    if use_gate_in_kernel:
        g = _gate(g, A_log, dt_bias, wide)
    if use_beta_sigmoid_in_kernel:
        beta = beta.to(wide).sigmoid() * (2 if allow_neg_eigval else 1)
    if beta is None:
        beta = v.new_ones(tokens, dtype=wide)
    beta = beta if beta.dim() == 4 else beta[..., None]
    scale = keys**-0.5 if scale is None else float(scale)
    settings = cu_seqlens, scale, bool(state_v_first), bool(output_final_state)
    return q, k, v, g, gk, gv, beta, initial_state, *settings


def check_heads(q, k, v) -> None:
    """Check q, k `[..., H, K]` and v `[..., HV, V]`."""
    for name, x in (("q", q), ("k", k), ("v", v)):
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


def check_like(name, x, like, *shapes) -> None:
    """Check a floating tensor that may be None: its device and that it has one of the shapes."""
    if x is None:
        return
    check.floating(name, x)
    check.same_device(name, x, "v", like)
    if tuple(x.shape) not in map(tuple, shapes):
        raise check.shape(name, x, " or ".join(str(list(shape)) for shape in shapes))


def check_cu_seqlens(cu_seqlens, v) -> None:
    """Check packed lengths; their values only where reading them waits for no device."""
    check.indices("cu_seqlens", cu_seqlens)
    check.same_device("cu_seqlens", cu_seqlens, "v", v)
    if cu_seqlens.dim() != 1 or cu_seqlens.numel() < 2:
        raise check.shape("cu_seqlens", cu_seqlens, "[sequences + 1]")
    if v.shape[0] != 1:
        raise ValueError(f"cu_seqlens: got one with batch {v.shape[0]}, needs batch 1")
    if cu_seqlens.device.type != "cpu" or not library.is_plain(cu_seqlens):
        return
    first, last, tokens = int(cu_seqlens[0]), int(cu_seqlens[-1]), v.shape[1]
    if first != 0 or last != tokens:
        raise ValueError(f"cu_seqlens: got {first} first and {last} last, needs 0 and {tokens}")
    if (cu_seqlens.diff() < 0).any():
        raise ValueError("cu_seqlens: got a negative length, needs starts that do not decrease")


def check_flags(
    g, beta, A_log, dt_bias, use_gate_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval, v
) -> None:
    """Check that the flags have what they need, and that nothing is given that none reads."""
    for name, x in (("g", g), ("A_log", A_log)):
        if use_gate_in_kernel and x is None:
            raise ValueError(f"{name}: got None, needs a tensor for use_gate_in_kernel=True")
    for name, x in (("A_log", A_log), ("dt_bias", dt_bias)):
        if x is not None and not use_gate_in_kernel:
            raise ValueError(f"{name}: got a tensor, needs use_gate_in_kernel=True")
        check_like(name, x, v, v.shape[2:3])
    if allow_neg_eigval and not use_beta_sigmoid_in_kernel:
        raise ValueError("allow_neg_eigval: got True, needs use_beta_sigmoid_in_kernel=True")
    if use_beta_sigmoid_in_kernel and beta is None:
        raise ValueError("beta: got None, needs logits for use_beta_sigmoid_in_kernel=True")


def check_state(state, v, keys, v_first, cu_seqlens) -> None:
    """Check initial states that may be None: one for each sequence, in fp32 (fp64 where v is)."""
    if state is None:
        return
    check.floating("initial_state", state)
    check.dtype("initial_state", state, compute_dtype(v))
    check.same_device("initial_state", state, "v", v)
    sequences = v.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    matrix = (v.shape[3], keys) if v_first else (keys, v.shape[3])
    needs = (sequences, v.shape[2], *matrix)
    if tuple(state.shape) != needs:
        raise check.shape("initial_state", state, f"{list(needs)} (state_v_first={v_first})")


def _l2norm(x):
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def _gate(g, A_log, dt_bias, wide):
    raw = g.to(wide) if dt_bias is None else g.to(wide) + dt_bias.to(wide)
    return -A_log.to(wide).exp() * torch.nn.functional.softplus(raw)


def _implementation_args(*args, **kwargs):
    *inputs, _ = _prepare(*args, **kwargs)
    return *inputs, inputs[2], inputs[7]


explains("fused_recurrent_gated_delta_rule", op.forward_table, _implementation_args)
