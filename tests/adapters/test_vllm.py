"""npu-ops in vLLM on NPUs: vllm-ascend's own source beside ours, in a process: see vllm_cpu/."""

from __future__ import annotations

import ast
import hashlib
import json
import pathlib
import subprocess
import sys

import fetch_vllm
import pytest
from npu_ops_adapters import vllm
from npu_ops_adapters.vllm import gated_delta_net
from processes import environment
from vllm_cpu import checks, functions

pytestmark = pytest.mark.xdist_group("vllm")
HERE = pathlib.Path(__file__).parent
SETTINGS = {
    "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",  # so that vLLM's entry point alone loads the adapters
    "CUDA_VISIBLE_DEVICES": "",  # for which vLLM keeps a Triton that has no device yet
    "TRITON_INTERPRET": "1",
    "VLLM_PLUGINS": "npu_ops",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "OMP_NUM_THREADS": "1",
}
NAMES = [function.__name__ for function in (*checks.CHECKS, *functions.CHECKS)]


@pytest.fixture(scope="module")
def errors():
    """Of each check: what went wrong, or None."""
    done = subprocess.run(
        [sys.executable, "-m", "vllm_cpu.checks"],
        env=environment(fetch_vllm.tree(), HERE, HERE.parent, **SETTINGS),
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return dict(json.loads(line) for line in done.stdout.splitlines() if line.startswith('["'))


@pytest.mark.parametrize("name", NAMES)
def test_ours_beside_vllm_ascend_s(errors, name):
    assert errors[name] is None, f"{name}:\n{errors[name]}"


def definition(folder: pathlib.Path, target: str) -> tuple[ast.FunctionDef, str] | None:
    """The function that a patch replaces, and its source; None: this version has no such module."""
    module, _, attribute = target.partition(":")
    path = folder / f"{module.replace('.', '/')}.py"
    if not path.exists():
        return None
    source = path.read_text()
    found = ast.parse(source)
    for name in attribute.split("."):
        named = [node for node in found.body if getattr(node, "name", None) == name]
        if not named:
            return None
        (found,) = named
    return found, ast.get_source_segment(source, found)


def test_the_patches_know_the_source_of_0_23_0():
    """It is read: another vLLM runs it than the other tests have."""
    known = set()
    for patch in vllm.patches():
        found = definition(fetch_vllm.ascend(), patch.target)
        if found is None:
            continue
        function, source = found
        parameters = tuple(arg.arg for arg in function.args.args)
        assert parameters in patch.signatures, (patch.target, parameters)
        known.add(patch.op)
        if patch.op == "gated_delta_net":
            digest = hashlib.sha256("".join(source.split()).encode()).hexdigest()[:12]
            form = gated_delta_net.FORMS[digest]
            assert form == gated_delta_net.Form(v_first=True, sends=False)
    assert known == {
        *("causal_conv1d_update", "chunk_gated_delta_rule", "gated_delta_net"),
        *("gated_delta_rule_update", "gdn_gate", "l2norm", "rms_norm_gated"),
    }
