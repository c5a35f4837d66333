"""Test Gated Delta Net of Megatron's main branch on similar modules, as main has no package."""

from __future__ import annotations

import sys
import types

import pytest
import torch
import torch.nn.functional as F
from npu_ops_adapters import patching
from npu_ops_adapters.megatron import (
    causal_conv1d_update,
    fused_recurrent_gated_delta_rule,
    gated_delta_net,
    gdn_gate,
)

import npu_ops

HOME = gated_delta_net.MODULE


class Base:
    def _compute_gates(self, A_log_local_cp, dt_bias_local_cp, batch, seq_len, *gate_feats):
        raise NotImplementedError

    def forward(self, x):
        return self._compute_gates(x)


class GatedDeltaNet(Base):
    def _compute_gates(self, A_log_local_cp, dt_bias_local_cp, batch, seq_len, *gate_feats):
        beta, alpha = gate_feats
        g = -A_log_local_cp.exp() * F.softplus(alpha.float() + dt_bias_local_cp)
        return g, {"beta": beta.sigmoid()}


class GatedDeltaNet2(Base):
    def _compute_gates(self, A_log_local_cp, dt_bias_local_cp, batch, seq_len, *gate_feats):
        return gate_feats[0], {}


class Renamed:
    def _gates_of_next_year(self, x):
        return x

    def forward(self, x):
        return self._gates_of_next_year(x)


class Inline:
    def forward(self, x):
        return F.softplus(x)


@pytest.fixture
def installed(monkeypatch):
    """Return a function that puts classes into modules of these names, undone after the test."""

    def install(common: list[type], gdn: list[type]):
        homes = {f"{HOME}.common": common, f"{HOME}.gdn": gdn, HOME: []}
        for name, classes in homes.items():
            module = types.ModuleType(name)
            for one in classes:
                copy = type(one.__name__, one.__bases__, dict(vars(one), __module__=name))
                setattr(module, one.__name__, copy)
            module.causal_conv1d_update = module.fused_recurrent_gated_delta_rule = None
            monkeypatch.setitem(sys.modules, name, module)
        return sys.modules[f"{HOME}.gdn"]

    yield install
    patching.revert()


def test_gates_of_another_name_are_ours(installed):
    gdn = installed([Base], [GatedDeltaNet, GatedDeltaNet2])
    rows = patching.apply(gdn_gate.patches())
    assert [(row.target, row.sentence) for row in rows] == [
        (f"{HOME}.gdn:GatedDeltaNet._compute_gates", "applied")
    ]
    A_log, dt_bias = torch.randn(4), torch.randn(4)
    beta, alpha = torch.randn(2, 5, 4), torch.randn(2, 5, 4)
    arguments = A_log, dt_bias, 2, 5, beta, alpha
    g, others = gdn.GatedDeltaNet()._compute_gates(*arguments)
    right, right_others = GatedDeltaNet()._compute_gates(*arguments)
    torch.testing.assert_close(g, right, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(others, right_others, atol=1e-6, rtol=1e-6)
    ours, _ = npu_ops.gdn_gate(alpha, A_log, dt_bias, beta)
    assert g.equal(ours)
    assert gdn.GatedDeltaNet2()._compute_gates(*arguments)[0] is beta


def test_gates_that_are_not_there_are_refused_by_name(installed):
    installed([Renamed], [])
    (row,) = patching.apply(gdn_gate.patches())
    assert row.sentence.startswith("refused: ") and "has no GatedDeltaNet" in row.sentence
    installed([Inline], [])
    assert not list(gdn_gate.patches()), "they are inline"


def test_nothing_is_said_before_all_modules_are_imported(installed, monkeypatch):
    installed([Base], [GatedDeltaNet])
    monkeypatch.delitem(sys.modules, f"{HOME}.gdn")
    assert not list(gdn_gate.patches())


def test_decoding_works_without_fla(installed):
    """One token at a time equals all at once, with the arguments that Megatron's layer passes."""
    gdn = installed([Base], [GatedDeltaNet])
    parts = causal_conv1d_update, fused_recurrent_gated_delta_rule
    rows = patching.apply(patch for part in parts for patch in part.patches())
    assert [row.sentence for row in rows] == ["applied"] * 2
    draw = torch.Generator().manual_seed(0)
    x, weight = torch.randn(2, 5, 8, generator=draw), torch.randn(8, 4, generator=draw)
    cache = torch.zeros(2, 8, 4)
    steps = [
        gdn.causal_conv1d_update(x=x[:, t : t + 1], cache=cache, weight=weight, activation="silu")
        for t in range(5)
    ]
    whole, state = npu_ops.causal_conv1d(x, weight, activation="silu", output_final_state=True)
    torch.testing.assert_close(torch.cat([y for y, _ in steps], 1), whole)
    torch.testing.assert_close(cache[..., 1:], state[..., 1:])

    q, k, v = (torch.randn(2, 5, heads, 8, generator=draw) for heads in (2, 2, 4))
    g, beta = torch.randn(2, 5, 4, generator=draw), torch.randn(2, 5, 4, generator=draw)
    settings = {
        "A_log": torch.zeros(4), "dt_bias": torch.ones(4), "output_final_state": True,
        "use_qk_l2norm_in_kernel": True, "use_gate_in_kernel": True,
        "use_beta_sigmoid_in_kernel": True,
    }  # fmt: skip
    state, outputs = torch.zeros(2, 4, 8, 8), []
    for t in range(5):
        token = {"q": q, "k": k, "v": v, "g": g, "beta": beta}
        token = {name: value[:, t : t + 1] for name, value in token.items()}
        o, state = gdn.fused_recurrent_gated_delta_rule(**token, **settings, initial_state=state)
        outputs.append(o)
    o, last = npu_ops.chunk_gated_delta_rule(q, k, v, g, beta, **settings)
    torch.testing.assert_close(torch.cat(outputs, 1), o, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(state, last, atol=1e-5, rtol=1e-5)
    patching.revert()
    assert gdn.causal_conv1d_update is None
