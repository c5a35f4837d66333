"""Runs the checks of mindspeed_checks.py on MindSpeed's own sources, on the CPU.

    git clone --branch core_r0.16.0 https://gitcode.com/Ascend/MindSpeed
    python tests/adapters/upstream_mindspeed.py MindSpeed --megatron 0.16.1

`--megatron` is a release that tests/adapters/fetch_megatron.py downloaded, or a folder: a clone of
Megatron-LM for branches that need megatron.training. Modules that MindSpeed imports and a machine
without an NPU lacks (torch_npu, torchair, ...) are replaced by stand-ins with any attribute; no
file is changed. core_r0.18 imports MegatronAdaptor, which gives Megatron Transformer Engine's
names. Without `--adaptor`, a clone of it, both have stand-ins; Transformer Engine's are empty
classes. The exit status is 1 if a check fails.

`--train gpt`, or `gpt hybrid` if Megatron has Gated Delta Net, then trains small models with the
Megatron that MindSpeed patched, after `repatch`, without and with npu-ops. It runs on the emulated
NPU with its real torch_npu; see `npu-ops emulate --status`. Losses must agree, and npu-ops must
have been called.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import pathlib
import subprocess
import sys
import types
from unittest import mock

import counting
import fetch_megatron
import mindspeed_checks
import torch
import upstream_bridge
import upstream_megatron
from npu_ops_tools import demo_model
from processes import environment

from npu_ops.core import env

HERE = pathlib.Path(__file__).parent
STANDS_IN = ("torch_npu", "torchair", "acl", "hccl", "pydantic", "six", "tqdm")
OF_ADAPTOR = (
    "megatron_adaptor",
    "transformer_engine",
)  # modules of MegatronAdaptor; earlier branches of MindSpeed make them

OPERATORS = {
    "gpt": upstream_bridge.OPERATORS,
    "hybrid": (
        *("causal_conv1d", "chunk_gated_delta_rule", "l2norm", "rms_norm_gated"),
        *upstream_bridge.OPERATORS,
    ),
}


class Classes(types.ModuleType):
    """A module of classes from which Megatron's layers can derive; submodules are like it."""

    __version__, __path__, __file__ = "2.2.0", (), "transformer_engine"

    def __getattr__(self, name):
        if name == "ops":  # Megatron's annotations use transformer_engine.pytorch.ops from 0.17 on
            return importlib.import_module(f"{self.__name__}.ops")
        if not name.lstrip("_")[:1].isupper():
            raise AttributeError(name)
        setattr(self, name, type(name, (torch.nn.Module,), {}))
        return vars(self)[name]


class StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds modules with these names that are not installed; they have any attribute."""

    def __init__(self, names: tuple[str, ...]):
        self._names = names

    def find_spec(self, fullname, path=None, target=None):
        if fullname.partition(".")[0] in self._names:
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec):
        if spec.name.startswith("transformer_engine"):
            return Classes(spec.name)
        module = mock.MagicMock(name=spec.name)
        module.__path__, module.__spec__, module.__file__ = [], spec, spec.name
        return module

    def exec_module(self, module):
        return None


def stand_in() -> None:
    """Install stand-ins for modules that MindSpeed and Megatron import and this machine lacks."""
    upstream_megatron.without_python_312()
    source = pathlib.Path(importlib.util.find_spec("mindspeed").origin).read_text()
    on_adaptor = "import megatron_adaptor" in source
    # The stand-ins come last, so that installed packages are used.
    sys.meta_path.append(StandIns(STANDS_IN + (OF_ADAPTOR if on_adaptor else ())))
    if on_adaptor:
        importlib.import_module("transformer_engine.common.recipe")
    sys.argv[1:] = []  # MindSpeed parses these


def without_torchair() -> None:
    """Replace torch_npu's torchair, which MindSpeed imports: it needs a library of CANN."""
    importlib.import_module("torch_npu.dynamo")
    for module in [module for module in sys.modules if module.partition(".")[0] == "torchair"]:
        del sys.modules[module]
    sys.meta_path.insert(0, StandIns(("torchair",)))
    importlib.import_module("torchair")


def run(order: str) -> None:
    upstream_megatron.without_triton()
    stand_in()
    torch.npu = mock.MagicMock(**{"is_available.return_value": False})
    for check in mindspeed_checks.OF_THE_DOUBLE:
        mindspeed_checks.CHECKS.remove(check)
    mindspeed_checks.run(order)


def train(name: str) -> None:
    """Train for three steps on an NPU; print the losses and the calls of npu-ops's operators."""
    without_torchair()
    stand_in()
    importlib.import_module("mindspeed.megatron_adaptor").repatch({"context_parallel_size": 1})
    if env.settings.disable:  # MindSpeed's delta rule takes only bf16, Megatron's also fp32
        demo_model.lacks_kernels = lambda: True
    calls = counting.count_calls(OPERATORS[name])
    demo_model.start("npu")
    model = demo_model.build(name, vocabulary=64, length=16, dropout=0.0).npu()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    draw = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 64, (2, 16), generator=draw).npu()
    positions = torch.randint(0, 16, (3, 2, 16), generator=draw).npu()
    mask = torch.ones(1, 1, 16, 16, dtype=torch.bool).triu(1).npu()
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(tokens, positions, mask, labels=tokens).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    print(json.dumps(["losses", losses, calls]), flush=True)


def trained(
    name: str, clone: pathlib.Path, megatron: pathlib.Path, disabled: str
) -> tuple[list, dict]:
    """Return the losses, and the operators' calls."""
    done = subprocess.run(
        [sys.executable, "-m", "npu_ops_emulator", "--", "python", __file__, "--run", name],
        env=environment(HERE, clone, megatron, NPU_OPS_DISABLE=disabled),
        capture_output=True,
        text=True,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith('["losses"')]
    if not lines:
        sys.exit(f"the process ended with {done.returncode}\n{done.stderr[-3000:]}")
    return tuple(json.loads(lines[0])[1:])


def same_training(name: str, clone: pathlib.Path, megatron: pathlib.Path) -> bool:
    theirs, none = trained(name, clone, megatron, "all")
    ours, calls = trained(name, clone, megatron, "")
    print(f"{name}: losses without npu-ops {theirs}, with it {ours}; calls {calls}")
    same = all(abs(a - b) < 1e-5 for a, b in zip(theirs, ours, strict=True))
    return same and not none and all(calls.get(operator) for operator in OPERATORS[name])


def report(clone: pathlib.Path, megatron: pathlib.Path, adaptor, order: str) -> dict:
    """Return the error of each check, None if it passed."""
    folders = [HERE, clone, megatron, *([adaptor] if adaptor else [])]
    early = "0" if order == "late" else "1"
    done = subprocess.run(
        [sys.executable, __file__, "--run", order],
        env=environment(*folders, TORCH_DEVICE_BACKEND_AUTOLOAD=early),
        capture_output=True,
        text=True,
    )
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('["')]
    if done.returncode:
        lines.append(("stopped", f"with {done.returncode}\n{done.stderr[-3000:]}"))
    return dict(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("clone", nargs="?", type=pathlib.Path, help="a clone of MindSpeed")
    parser.add_argument("--megatron", default="0.16.1", help="a release, or a folder")
    parser.add_argument("--adaptor", type=pathlib.Path, help="a clone of MegatronAdaptor")
    parser.add_argument("--train", nargs="+", choices=OPERATORS, default=[], help="on an NPU")
    parser.add_argument("--run", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        (train if options.run in OPERATORS else run)(options.run)
        return 0
    folder = pathlib.Path(options.megatron)
    folder = folder if folder.exists() else fetch_megatron.tree(options.megatron)
    failed = 0
    for order in mindspeed_checks.ORDERS:
        for name, error in report(options.clone, folder, options.adaptor, order).items():
            failed += error is not None
            print(f"{order:15} {name:60} {'passed' if error is None else 'FAILED'}")
            if error:
                print(error)
    failed += sum(not same_training(name, options.clone, folder) for name in options.train)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
