"""What the tests of the gated delta rules share."""

import torch

from npu_ops.core.compare import Tolerance, assert_close


def assert_flags_are_what_they_say(delta_rule, inputs, tolerance: Tolerance) -> None:
    """Each flag is what a caller would compute without it: norms, gates and beta.

    inputs: of `delta_rule`, q `[1, T, H, K]`, two value heads.
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
