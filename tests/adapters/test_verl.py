"""Test verl's own Ulysses on two ranks, and verl's NPU patches together with npu-ops."""

import ast
import importlib
import json
import subprocess
import sys
from collections.abc import Iterator

import fetch_verl
import npu_ops_adapters
import pytest
from processes import HERE, environment


@pytest.mark.slow
def test_two_ranks_equal_one(tmp_path):
    path = environment(HERE, *fetch_verl.path(), OMP_NUM_THREADS="1")
    command = [sys.executable, str(HERE / "verl_ranks.py"), str(tmp_path / "store")]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    ranks = [subprocess.Popen([*command, str(rank)], env=path, **pipes) for rank in range(2)]
    for done in ranks:
        out, err = done.communicate(timeout=500)
        assert done.returncode == 0, err[-3000:]
        report = json.loads(out.splitlines()[-1])
        for name, errors in report["errors"].items():
            assert len(errors) in (2, 4, 11) and max(errors.values()) < 2e-5, (name, errors)
        refused = report["refused"]
        assert all("verl's Ulysses" in sentence for sentence in refused.values()), refused
        assert refused["no text positions"].startswith("position_ids: got None in a causal layer")
        assert refused["positions of three axes"].startswith("position_ids: got shape [3, 1, 16]")


def set_by(text: str) -> Iterator[str]:
    """Yield "module:attribute" for each assignment to an imported module in a file's functions."""
    for function in ast.walk(ast.parse(text)):
        if not isinstance(function, ast.FunctionDef):
            continue
        modules = {}
        for node in ast.walk(function):
            if isinstance(node, ast.ImportFrom):
                modules |= {name.name: f"{node.module}.{name.name}" for name in node.names}
            elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Attribute):
                name, _, attribute = ast.unparse(node.targets[0]).partition(".")
                if name in modules:
                    yield f"{modules[name]}:{attribute}"


def test_its_npu_patches_leave_ours_in_force():
    """Checks the counts in docs/replacing-patches.md, and trains Qwen3 with both
    kinds of patches."""
    file = fetch_verl.path()[0] / "verl/models/transformers/npu_patch.py"
    text, images = ("qwen2", "qwen3", "qwen3_next"), ("qwen2_5_vl", "qwen3_vl", "qwen3_5")
    for model in (*text, *images, "qwen3_5_moe"):
        importlib.import_module(f"transformers.models.{model}.modeling_{model}")
    ours = {patch.target for patch in npu_ops_adapters.patches()}
    found = set(set_by(file.read_text()))
    both = sorted(target.rpartition(".")[2] for target in found & ours)
    assert [name.endswith("apply_rotary_pos_emb") for name in both].count(True) == 7
    assert len(found) == 27 + 1 and len(both) == 23, both  # one norm has two names, by version

    command = [sys.executable, "-m", "npu_ops_emulator", "--", sys.executable]
    done = subprocess.run(
        [*command, str(HERE / "verl_npu_patches.py")], capture_output=True, text=True,
        env=environment(HERE, *fetch_verl.path()),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(done.stdout.splitlines()[-1])
    replaced = {where: said for where, said in report["states"].items() if "modeling_" in where}
    assert len(replaced) > 19 and set(replaced.values()) == {"applied"}, replaced
    assert report["mlp"] == "npu_ops_function"  # verl joins the gate and up first
    assert report["npu"] == pytest.approx(report["cpu"], rel=1e-5)
