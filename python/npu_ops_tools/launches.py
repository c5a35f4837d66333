"""Counts the kernels that a model of transformers launches on the emulated NPU, by layer.

A launch is an operator of PyTorch that makes or writes a tensor, or a Triton kernel. Views and
allocations do not count. A matrix product, or an operator of torch_npu, counts as one launch.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from npu_ops.core.registry import Table, launched_by

LAYERS = ("DecoderLayer", "VisionBlock")  # endings of the layers' class names
# Prefixes of the names of operators that launch no kernel.
FREE = (
    *(
        "alias",
        "as_strided",
        "detach",
        "empty",
        "is_",
        "item",
        "lift",
        "new_empty",
        "record_stream",
    ),
    *("resize_", "set_", "size", "split", "stride", "sym_", "unbind", "view", "_local_scalar"),
    *("_reshape_alias", "_unsafe_view"),
)


@dataclasses.dataclass(frozen=True)
class Step:
    """Launch counts of one step of a model: in total, by layer name, and by operator."""

    name: str
    total: int
    layers: dict[str, int]
    operators: dict[str, int]


class Counter(TorchDispatchMode):
    """Counts launches on a device. For npu-ops' operators, it counts what they launch."""

    def __init__(self, device: str = "npu"):
        super().__init__()
        self.device = device
        self.found = collections.Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        name = function.name().partition("::")[2]
        ours = function.namespace == "npu_ops"
        if not ours and not function.is_view and not name.startswith(FREE):
            results = result if isinstance(result, tuple | list) else (result,)
            self.found[name] += any(map(self._is_made, results))
        return result

    def _is_made(self, x) -> bool:
        return isinstance(x, torch.Tensor) and x.device.type == self.device and x.numel() > 0

    def operators(self) -> collections.Counter:
        """Return the counts by name, including Triton kernels."""
        return +self.found + collections.Counter(_of_triton())


def steps(model: torch.nn.Module, inputs: dict, token: int = 3) -> Iterator[Step]:
    """Yield launch counts of a training step's forward and backward, of a prefill, and of a
    decoding step.

    Args:
        model: on an NPU. inputs: of its `forward`. token: the token to decode in every sequence.
    """
    kept = {}

    def forward():
        kept["loss"] = model(**inputs, use_cache=False).logits.float().mean()

    def prefill():
        kept["cache"] = model(**inputs, use_cache=True).past_key_values

    def decode():
        ids = inputs["input_ids"][:, :1].clone().fill_(token)
        model(input_ids=ids, past_key_values=kept["cache"], use_cache=True)

    model.train()
    yield count("training, forward", model, forward)
    yield count("training, backward", model, lambda: kept["loss"].backward())
    model.eval()
    for name, step in (("prefill", prefill), ("decoding", decode)):
        with torch.no_grad():
            yield count(name, model, step)


def count(name: str, model: torch.nn.Module, run: Callable[[], None]) -> Step:
    """Return the launches of `run()`."""
    from npu_ops_emulator import triton_driver

    triton_driver.reset_statistics()
    counter, layers = Counter(), {}
    with contextlib.ExitStack() as hooks, seen_in_our_operators(counter), counter:
        for layer, module in model.named_modules():
            if type(module).__name__.endswith(LAYERS):
                _watch(layer, module, counter, layers, hooks)
        run()
    operators = counter.operators()
    return Step(name, operators.total(), layers, dict(operators.most_common()))


def _watch(name: str, module, counter: Counter, layers: dict, hooks) -> None:
    """Add hooks to `module` that store the launches of its last call in `layers[name]`."""
    before = []

    def begin(module, args):
        before.append(counter.operators().total())

    def end(module, args, result):
        layers[name] = counter.operators().total() - before.pop()

    for hook in (module.register_forward_pre_hook(begin), module.register_forward_hook(end)):
        hooks.callback(hook.remove)


@contextlib.contextmanager
def seen_in_our_operators(counter: Counter) -> Iterator[None]:
    """Count inside npu-ops' operators too: torch disables a dispatch mode while they run."""
    launch = Table.launch

    def seen(table, implementation, arguments):
        with counter:
            return launch(table, implementation, arguments)

    with launched_by(seen):
        yield


def _of_triton() -> dict[str, int]:
    from npu_ops_emulator import triton_driver

    return {name: kernel.launches for name, kernel in triton_driver.statistics().items()}


def build(folder: str) -> torch.nn.Module:
    """Build a small model of transformers with random weights, up to the first layer of each kind.

    It has a small vocabulary, few experts, and one vision layer if the model has a vision tower.
    The sizes of a layer do not change its launches.

    Raises:
        OSError, ValueError: transformers finds no configuration, or no model for it.
    """
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder)
    text = config.get_text_config()
    kinds = getattr(text, "layer_types", None) or [""]
    text.num_hidden_layers = max(map(kinds.index, kinds)) + 1
    small = {"vocab_size": 1024, "num_experts": 8, "layer_types": kinds[: text.num_hidden_layers]}
    small |= {"pad_token_id": None}
    for name, value in small.items():
        if getattr(text, name, None):
            setattr(text, name, min(value, getattr(text, name)) if name[0] in "vn" else value)
    if hasattr(config, "vision_config"):
        config.vision_config.depth = 1
        return transformers.AutoModelForImageTextToText.from_config(config)
    return transformers.AutoModelForCausalLM.from_config(config)


def of_folder(folder: str, tokens: int) -> list[Step]:
    """Count all steps of a model with one sequence of `tokens` tokens. Runs on the emulated NPU."""
    model = build(folder).bfloat16().to("npu")
    ids = torch.randint(59, (1, tokens), generator=torch.Generator().manual_seed(0))
    return list(steps(model, {"input_ids": ids.to("npu")}))


def both(folder: str, tokens: int) -> dict[str, list[Step]]:
    """Count with and without npu-ops, each in a process on the emulated NPU.

    The process with npu-ops obeys NPU_OPS_DISABLE: it leaves out the ops that the variable names.

    Raises:
        ValueError: the folder has no configuration.
        RuntimeError: a process failed; it has printed the error.
    """
    if not (pathlib.Path(folder) / "config.json").is_file():
        raise ValueError(f"model: got {folder!r}, needs a folder with a config.json")
    found = {}
    for name, changes in (("without", {"NPU_OPS_DISABLE": "all"}), ("with npu-ops", {})):
        with tempfile.TemporaryDirectory() as scratch:
            path = pathlib.Path(scratch) / "steps.json"
            line = [sys.executable, "-m", "npu_ops_emulator", "--", sys.executable, "-m", __name__]
            arguments = (folder, str(tokens), str(path))
            code = subprocess.call([*line, *arguments], env=os.environ | changes)
            if code:
                raise RuntimeError(f"the model {name}: its process ended with {code}, see above")
            found[name] = [Step(**row) for row in json.loads(path.read_text())]
    return found


def rows(found: dict[str, list[Step]]) -> Iterator[tuple[str, str, list[int]]]:
    """Yield (step, layer or "all", [launches without npu-ops, launches with it])."""
    for without, ours in zip(*found.values(), strict=True):
        for layer, count in without.layers.items():
            yield without.name, layer, [count, ours.layers[layer]]
        yield without.name, "all", [without.total, ours.total]


def main(folder: str, tokens: str, path: str) -> None:
    found = [dataclasses.asdict(step) for step in of_folder(folder, int(tokens))]
    pathlib.Path(path).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
