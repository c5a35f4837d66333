"""Checks that SGLang's releases have each patch's target, with a signature the patch knows."""

from __future__ import annotations

import ast
import functools
import sys
import zipfile

import fetch_sglang
import pytest
import sglang_process
import torch
from npu_ops_adapters import sglang
from npu_ops_adapters.sglang import (
    chunk_gated_delta_rule,
    functions,
    gated_delta_net,
    gated_delta_rule_update,
    gdn_gate,
    split_gated_qkv,
    split_qkv_rmsnorm_rope,
)
from packaging.version import Version
from sglang_cpu import checks


class Release:
    """The Python files in a wheel."""

    def __init__(self, version: str):
        self._files = zipfile.ZipFile(fetch_sglang.wheel(version))

    @functools.cache  # noqa: B019
    def names(self, module: str) -> dict[str, ast.AST]:
        """Return what a module defines, imports or assigns, by name; the last definition counts."""
        path = module.replace(".", "/")
        known = set(self._files.namelist())
        (file,) = {f"{path}.py", f"{path}/__init__.py"} & known or {None}
        assert file, f"no module {module}"
        return self._of(ast.parse(self._files.read(file)))

    def _of(self, tree: ast.AST) -> dict[str, ast.AST]:
        names = {}
        for node in tree.body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                names[node.name] = node
            elif isinstance(node, ast.ImportFrom):
                names |= {
                    alias.asname or alias.name: (node.module, alias.name) for alias in node.names
                }
            elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                names[node.targets[0].id] = node.value
            elif isinstance(node, ast.If):
                # A conditional name is for another machine, so an unconditional one counts.
                inside = self._of(node) | (
                    self._of(ast.Module(node.orelse, [])) if node.orelse else {}
                )
                names = inside | names
        return names

    def find(self, module: str, attribute: str) -> ast.AST | None:
        """Return the definition, through imports and aliases; None if another package has it."""
        owner, _, method = attribute.partition(".")
        found = self.names(module).get(owner)
        assert found is not None, f"{module} has no {owner}"
        if isinstance(found, tuple):
            return self.find(found[0], found[1]) if found[0].startswith("sglang") else None
        if isinstance(found, ast.Name):
            return self.find(module, found.id)
        return self._of(found)[method] if isinstance(found, ast.ClassDef) and method else found


def parameters(function: ast.FunctionDef) -> tuple[str, ...]:
    a = function.args
    named = [*a.posonlyargs, *a.args, *([a.vararg] if a.vararg else []), *a.kwonlyargs]
    return tuple(arg.arg for arg in [*named, *([a.kwarg] if a.kwarg else [])])


@pytest.mark.parametrize("version", [*fetch_sglang.READ])
def test_each_patch_knows_the_signature_it_finds(version, monkeypatch):
    monkeypatch.setattr(functions, "version", lambda: Version(version))
    monkeypatch.setattr(torch, "npu", object(), raising=False)
    release, found = Release(version), 0
    for patch in sglang.patches():
        definition = release.find(patch.module, patch.attribute)
        if definition is None:  # in sgl-kernel-npu
            continue
        if patch.attribute == "QKV_BACKEND_IMPL.ascend_attn":
            assert "ascend_attn" in [key.value for key in definition.keys], patch.target
        else:
            assert parameters(definition) in patch.signatures, (
                patch.target,
                parameters(definition),
            )
        found += 1
    assert found >= 20


def test_a_version_without_plugins_by_the_import_hook(tmp_path):
    zipfile.ZipFile(fetch_sglang.wheel("0.5.9")).extractall(tmp_path)
    checked, _ = sglang_process.run("imported", first=[tmp_path])
    assert len(checked) == 3
    assert [f"{name}:\n{error}" for name, error in checked if error] == []


def test_the_delta_rule_of_0_5_9_has_keys_first_in_its_states(monkeypatch):
    """Prefill, then decode, with the two functions that SGLang 0.5.9's backend calls."""
    monkeypatch.setattr(functions, "version", lambda: Version("0.5.9"))
    inputs, starts = checks.prefill((70, 9))
    pool, slots = checks.pool(), torch.tensor([3, -1])
    keys_first = pool.mT.contiguous()
    o, last, between = chunk_gated_delta_rule.ours(
        *inputs, initial_state=keys_first, initial_state_indices=slots, cu_seqlens=starts,
        use_qk_l2norm_in_kernel=True,
    )  # fmt: skip
    right, after = checks.token_by_token(inputs, pool[3], 0, 70)
    checks.close(o[:, :70], right, 2e-4)
    checks.close(keys_first[3].mT, after[0], 2e-4)
    assert last is None and keys_first[[0, 1, 2, 4, 5]].mT.equal(pool[[0, 1, 2, 4, 5]])
    # On NPUs the kernel gets only its sequences' states, and the backend writes the final ones.
    given = pool[[3, 0]].mT.contiguous()
    _, last, _ = chunk_gated_delta_rule.ours(
        *inputs, initial_state=given, cu_seqlens=starts, use_qk_l2norm_in_kernel=True
    )
    checks.close(last[0].mT, after[0], 2e-4)
    assert given.mT.equal(pool[[3, 0]])

    q, k, v = (x[:, :2] for x in inputs[:3])
    a, b = torch.randn(2, 4), torch.randn(2, 4)
    parameters = {"A_log": torch.randn(4), "dt_bias": torch.randn(4)}
    state = keys_first[3].mT.clone()
    o = gated_delta_rule_update.ours(
        a=a, softplus_beta=0.5, softplus_threshold=2.0, q=q, k=k, v=v, b=b, **parameters,
        initial_state_source=keys_first, initial_state_indices=slots,
        use_qk_l2norm_in_kernel=True, cu_seqlens=torch.tensor([0, 1, 2]),
    )  # fmt: skip
    g, beta = gdn_gate.ours(a=a, b=b, **parameters, beta=0.5, threshold=2.0)
    plus = torch.nn.functional.softplus(a + parameters["dt_bias"], 0.5, 2.0)
    checks.close(g[0], -parameters["A_log"].exp() * plus, 2e-6)
    right, after = checks.token_by_token((q, k, v, g, beta), state, 0, 1)
    checks.close(o[:, :1], right, 2e-4)
    checks.close(keys_first[3].mT, after[0], 2e-4)


@pytest.mark.parametrize(
    "version, npu, first", [
        ("0.5.9", False, False), ("0.5.9", True, False), ("0.5.10", False, True),
        ("0.5.18", True, False), ("0.5.23", True, True), ("0.5.20", True, None),
    ],
)  # fmt: skip
def test_the_order_of_a_state_is_known_or_refused(monkeypatch, version, npu, first):
    monkeypatch.setattr(functions, "version", lambda: Version(version))
    monkeypatch.setattr(functions, "on_npu", lambda: npu)
    if first is None:
        with pytest.raises(ValueError, match="npu-ops cannot tell that order"):
            gated_delta_net.state_v_first()
    else:
        assert gated_delta_net.state_v_first() == first


STATE = "p_h0 = (h0 + idx * HV * K * V + i_hv * K * V\n    + {}[:, None] * {} + {}[None, :])"


@pytest.mark.parametrize(
    "source, first",
    [
        (STATE.format("o_k", "V", "o_v"), False),
        (STATE.format("o_v", "K", "o_k"), True),
        ("+ o_v[None, :] * K + o_k[:, None]", True),
        (STATE.format("o_k", "V", "o_v") + STATE.format("o_v", "K", "o_k"), None),
        ("p_v = v + (bos * HV + i_hv) * V + o_v", None),
    ],
)
@pytest.mark.parametrize("version", ["0.5.18", "0.5.20"])
def test_the_order_of_a_state_is_that_of_the_kernels(version, source, first, monkeypatch, tmp_path):
    """The adapter reads the order in the source of sgl-kernel-npu's decoding kernel."""
    folder = tmp_path / "sgl_kernel_npu" / "fla"
    folder.mkdir(parents=True)
    for package in (folder.parent, folder):
        (package / "__init__.py").touch()
    (folder / "fused_sigmoid_gating_recurrent.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("sgl_kernel_npu", "sgl_kernel_npu.fla"):
        monkeypatch.setitem(sys.modules, name, None)
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(functions, "version", lambda: Version(version))
    monkeypatch.setattr(functions, "on_npu", lambda: True)
    gated_delta_net._order_of_kernels.cache_clear()
    try:
        if first is None and version == "0.5.20":
            with pytest.raises(ValueError, match="npu-ops cannot tell that order"):
                gated_delta_net.state_v_first()
        else:
            assert gated_delta_net.state_v_first() == bool(first)
    finally:
        gated_delta_net._order_of_kernels.cache_clear()


# split_qkv_rmsnorm_rope: sgl-kernel-npu changed the order of its arguments


def call(width=32, rotated=None):
    rows = torch.randn(5, 6 * width, generator=torch.Generator().manual_seed(0))
    angles = torch.randn(5, 1, 1, (rotated or width) // 2).repeat(1, 1, 1, 2)
    sizes = {"q_hidden_size": 4 * width, "kv_hidden_size": width, "head_dim": width}
    weights = {"q_weight": torch.rand(width), "k_weight": torch.rand(width)}
    common = {"input": rows, "sin": angles.sin(), "cos": angles.cos(), "eps": 1e-6}
    return common | sizes | weights | {"q_bias": None, "k_bias": None}


@pytest.mark.parametrize(
    "known", [split_qkv_rmsnorm_rope.WEIGHTS_FIRST, split_qkv_rmsnorm_rope.SIZES_FIRST]
)
@pytest.mark.parametrize(
    "given", [split_qkv_rmsnorm_rope.WEIGHTS_FIRST, split_qkv_rmsnorm_rope.SIZES_FIRST]
)
def test_a_call_in_either_order_reaches_the_kernel_by_name(known, given):
    source = f"def kernel({', '.join(known)}): return locals()"
    space = {}
    exec(source, space)
    arguments = call()
    ours = split_qkv_rmsnorm_rope.replace(space["kernel"])
    assert ours(*(arguments[name] for name in given)) == arguments
    by_name = {name: arguments[name] for name in given[6:]}
    if given is split_qkv_rmsnorm_rope.SIZES_FIRST:  # SGLang's order
        assert ours(*(arguments[name] for name in given[:6]), **by_name) == arguments


@pytest.mark.parametrize("rotated", [96, 48, 24])
@pytest.mark.parametrize("pairs", [True, False])
def test_what_the_kernel_cannot_is_computed(pairs, rotated):
    """Compare with the definition in fp64: heads of 96 elements, of which the first are rotated."""
    arguments, half = call(96, rotated), rotated // 2
    ours = split_qkv_rmsnorm_rope.replace(lambda **_: pytest.fail("not for the kernel"))
    q, k, v = ours(**arguments, is_neox_style=pairs)
    rows = arguments["input"]
    assert v.equal(rows[:, 5 * 96 :])
    for out, x, name in ((q, rows[:, : 4 * 96], "q"), (k, rows[:, 4 * 96 : 5 * 96], "k")):
        x = x.double().unflatten(1, (-1, 96))
        x = x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * arguments[f"{name}_weight"]
        cos, sin = (arguments[table][:, 0, :, :half].double() for table in ("cos", "sin"))
        x, rest = x[..., :rotated], x[..., rotated:]
        a, b = (x[..., :half], x[..., half:]) if pairs else (x[..., ::2], x[..., 1::2])
        turned = a * cos - b * sin, b * cos + a * sin
        right = torch.cat(turned, -1) if pairs else torch.stack(turned, -1).flatten(-2)
        right = torch.cat((right, rest), -1)
        torch.testing.assert_close(out.double(), right.flatten(1), atol=1e-5, rtol=1e-5)


# split_gated_qkv: the function with a gate, and the function with mrope's three axes


def gated(width, rotated, gate=True):
    """Return a call with SGLang's names, and q, k, v and the gate in fp64, before rotation."""
    rows = torch.randn(5, (4 * (1 + gate) + 2) * width, generator=torch.Generator().manual_seed(0))
    weights = {"q_weight": torch.rand(width), "k_weight": torch.rand(width)}
    fused, k, v = rows.double().split([4 * (1 + gate) * width, width, width], dim=1)
    q, g = fused.view(5, 4, 1 + gate, width).unbind(2) if gate else (fused.view(5, 4, -1), None)
    heads = [
        x
        * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
        * (weights[f"{name}_weight"] + beside)
        for beside in [int(gate)]
        for name, x in (("q", q), ("k", k.view(5, 1, width)))
    ]
    return rows, weights, heads, v, g


def turned(x, cos, sin):
    """Rotate the first elements of heads `[T, N, D]` by cos and sin `[T, R / 2]`."""
    cos, sin = cos.double()[:, None], sin.double()[:, None]
    half = cos.shape[-1]
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), dim=-1).flatten(1)


@pytest.mark.parametrize("width, rotated", [(96, 24), (64, 64)])
def test_a_gated_step_that_the_kernel_cannot_is_computed(width, rotated):
    rows, weights, heads, v, gate = gated(width, rotated)
    angles = torch.randn(5, rotated // 2)
    tables = [f(angles).repeat(1, 2)[:, None, None] for f in (torch.sin, torch.cos)]
    ours = split_gated_qkv.replace_step(lambda **_: pytest.fail("not for the kernel"))
    out = ours(rows, *tables, 4 * width, width, width, rotated, eps=1e-6, **weights)
    right = [turned(x, angles.cos(), angles.sin()) for x in heads] + [v, gate.flatten(1)]
    for x, y in zip(out, right, strict=True):
        torch.testing.assert_close(x.double(), y, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("gate", [True, False])
def test_three_axes_that_the_kernel_cannot_are_computed(gate):
    rows, weights, heads, v, g = gated(96, 24, gate)
    if gate:  # this function gets 1 + weight
        weights = {name: 1 + weight for name, weight in weights.items()}
    angles = torch.randn(3, 5, 12)
    ours = split_gated_qkv.replace_prefill(lambda **_: pytest.fail("not for the kernel"))
    out = ours(
        qkv=rows, **weights, cos_sin=torch.cat((angles.cos(), angles.sin()), -1), num_q_heads=4,
        num_kv_heads=1, head_size=96, eps=1e-6, mrope_section=[6, 3, 3], is_interleaved=True,
        rope_dim=24, has_gate=gate,
    )  # fmt: skip
    axis = torch.tensor([0, 1, 2] * 3 + [0] * 3)  # T, H, W for the first nine, then T
    own = angles[axis, :, torch.arange(12)].T
    right = [turned(x, own.cos(), own.sin()) for x in heads] + [v]
    for x, y in zip(out, right, strict=False):
        torch.testing.assert_close(x.double(), y, atol=1e-5, rtol=1e-5)
    assert out[3].numel() == (5 * 4 * 96 if gate else 0)
    assert not gate or out[3].double().equal(g.flatten(1))


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("section", [(2, 3, 3), (6, 3, 3), (3, 1, 1), (12, 10, 10), (4, 8, 0)])
def test_sections_that_do_not_fill_the_table_are_fitted(section, interleaved):
    """Compare with the masks in sgl-kernel-npu's own test, for whole, half and quarter heads."""
    for rotated in (96, 48, 24):
        rows, weights, heads, v, _ = gated(96, rotated, gate=False)
        half = rotated // 2
        angles, at = torch.randn(3, 5, half), torch.arange(half)
        t, h, _ = section
        if interleaved:
            is_h = (at % 3 == 1) & (at <= 3 * h)
            is_t = ~(is_h | ((at % 3 == 2) & (at <= 3 * section[2])))
        else:
            is_t, is_h = at < t, (at >= t) & (at < t + h)
        own = torch.where(is_t, angles[0], torch.where(is_h, angles[1], angles[2]))
        out = split_gated_qkv.prefill(
            rows, **weights, cos_sin=torch.cat((angles.cos(), angles.sin()), -1), num_q_heads=4,
            num_kv_heads=1, head_size=96, eps=1e-6, mrope_section=list(section),
            is_interleaved=interleaved, rope_dim=None if rotated == 96 else rotated,
        )  # fmt: skip
        right = [turned(x, own.cos(), own.sin()) for x in heads] + [v]
        for x, y in zip(out, right, strict=False):
            torch.testing.assert_close(x.double(), y, atol=1e-5, rtol=1e-5)


def test_what_the_gated_kernels_can_is_theirs():
    step = {name: torch.zeros(1, 1, 1, 16) for name in split_gated_qkv.STEP}
    step |= {"q_hidden_size": 256, "kv_hidden_size": 64, "head_dim": 64, "rope_dim": 16}
    assert split_gated_qkv.replace_step(lambda **call: call)(*step.values()) == step
    rest = {"head_size": 64, "mrope_section": [4, 2, 2], "rope_dim": 16}
    assert split_gated_qkv.replace_prefill(lambda **call: call)(**rest) == rest


def test_a_call_without_norms_does_not_reach_a_kernel_that_needs_them():
    """Llama has no norms; the sgl-kernel-npu of 2025 needs them."""

    def kernel(input, sin, cos, q_weight, k_weight, q_hidden_size, kv_hidden_size, head_dim, eps):
        pytest.fail("it has no norms")

    arguments = call()
    names = ("input", "sin", "cos", "q_hidden_size", "kv_hidden_size", "head_dim")
    q, k, v = split_qkv_rmsnorm_rope.replace(kernel)(*(arguments[name] for name in names))
    cos, sin = (arguments[name][:, 0, 0, :16] for name in ("cos", "sin"))
    heads = arguments["input"].double().unflatten(1, (6, 32))
    torch.testing.assert_close(q.double(), turned(heads[:, :4], cos, sin), atol=1e-5, rtol=1e-5)
    assert v.equal(arguments["input"][:, 5 * 32 :])
