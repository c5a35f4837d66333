"""Calls and checks shared by the tests of the gated delta rules."""

import functools

import torch

from npu_ops.core.compare import Tolerance, assert_close

BY_TOKEN = ("q", "k", "v", "g", "beta")


def qkv(
    batch=1, tokens=9, heads=1, value_heads=2, keys=8, values=6, dtype=torch.float32,
    correlated=False, seed=0,
):  # fmt: skip
    """Return the arguments of a delta rule by name, with decay, beta and an initial state.

    Correlated keys have only positive elements, so that all keys are similar.
    """
    draw = torch.Generator().manual_seed(seed)
    normal = functools.partial(torch.randn, generator=draw)
    key = functools.partial(torch.rand if correlated else torch.randn, generator=draw)
    q, k = (torch.nn.functional.normalize(key(batch, tokens, heads, keys), dim=-1) for _ in "qk")
    return {
        "q": q.to(dtype),
        "k": k.to(dtype),
        "v": normal(batch, tokens, value_heads, values).to(dtype),
        "g": -normal(batch, tokens, value_heads).abs() / 4,
        "beta": normal(batch, tokens, value_heads).sigmoid(),
        "initial_state": normal(batch, value_heads, keys, values),
        "output_final_state": True,
    }


def hugging_face(function, q, k, v, g, beta, initial_state, **settings):
    """Call one of transformers' delta rules, with its L2 norm of q and k."""
    return function(
        q, k, v, g=g, beta=beta, initial_state=initial_state, output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )  # fmt: skip


def assert_flags_are_what_they_say(delta_rule, inputs, tolerance: Tolerance) -> None:
    """Check that the flags give the results of a caller who computes norms, gates and beta first.

    All flags are set at once; then once more without `dt_bias` and `allow_neg_eigval`.

    inputs: arguments of `delta_rule`; q is `[1, T, H, K]`, with two value heads.
    """
    tokens = inputs["q"].shape[1]
    A_log, dt_bias = torch.randn(2), torch.randn(2)
    raw, logits = torch.randn(1, tokens, 2), torch.randn(1, tokens, 2)
    q, k = (
        x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (inputs["q"], inputs["k"])
    )
    composed = {"q": q, "k": k, "beta": 2 * logits.sigmoid()}
    composed["g"] = -A_log.exp() * torch.nn.functional.softplus(raw + dt_bias)
    flags = {
        "use_qk_l2norm_in_kernel": True, "use_gate_in_kernel": True, "A_log": A_log,
        "dt_bias": dt_bias, "use_beta_sigmoid_in_kernel": True, "allow_neg_eigval": True,
        "g": raw, "beta": logits,
    }  # fmt: skip
    expected = delta_rule(**inputs | composed)
    for a, e in zip(delta_rule(**inputs | flags), expected, strict=True):
        assert_close("flags", a, e, tolerance)
    without = delta_rule(**inputs | flags | {"dt_bias": None, "allow_neg_eigval": False})
    composed["g"] = -A_log.exp() * torch.nn.functional.softplus(raw)
    composed["beta"] = logits.sigmoid()
    for a, e in zip(without, delta_rule(**inputs | composed), strict=True):
        assert_close("flags", a, e, tolerance)
