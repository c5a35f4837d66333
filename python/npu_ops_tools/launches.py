"""How many kernels a model of transformers launches on the emulated NPU, layer by layer.

A launch is what runs a kernel: an operator of PyTorch that makes or writes a tensor, or a kernel of
Triton's. Views and allocations are none. A product of matrices and an operator of torch_npu count
as one each.
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

LAYERS = ("DecoderLayer", "VisionBlock")  # what the names of their classes end with
# Operators that launch nothing, by how their names begin.
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
    """One step of a model: launches in all, of each layer by its name, and by the operator."""

    name: str
    total: int
    layers: dict[str, int]
    operators: dict[str, int]


class Counter(TorchDispatchMode):
    """Counts launches on a device. Our own operators are not counted, but what they launch is."""

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
        """By name, kernels of Triton's too."""
        return +self.found + collections.Counter(_of_triton())


def steps(model: torch.nn.Module, inputs: dict, token: int = 3) -> Iterator[Step]:
    """A training step's forward and backward, a prompt, and a token behind it.

    Args:
        model: on an NPU. inputs: of its `forward`. token: what is decoded, in every sequence.
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
    """What `run()` launches."""
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
    """Put what each call of `module` launches into layers."""
    before = []

    def begin(module, args):
        before.append(counter.operators().total())

    def end(module, args, result):
        layers[name] = counter.operators().total() - before.pop()

    for hook in (module.register_forward_pre_hook(begin), module.register_forward_hook(end)):
        hooks.callback(hook.remove)


@contextlib.contextmanager
def seen_in_our_operators(counter: Counter) -> Iterator[None]:
    """torch takes a mode away while one of our operators runs: put it back."""
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
    """A model of transformers with random weights: of each kind of layer the first, with those
    before it; few words and experts. Sizes of a layer change no launches.

    Raises:
        OSError, ValueError: transformers finds no configuration there, or no model for it.
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
    """All steps of a model, of one sequence of so many tokens. Runs on the emulated NPU."""
    model = build(folder).bfloat16().to("npu")
    ids = torch.randint(59, (1, tokens), generator=torch.Generator().manual_seed(0))
    return list(steps(model, {"input_ids": ids.to("npu")}))


def both(folder: str, tokens: int) -> dict[str, list[Step]]:
    """Without npu-ops and with it, each in a process on the emulated NPU.

    Raises:
        ValueError: the folder has no configuration.
        RuntimeError: a process ended with an error, which it has printed.
    """
    if not (pathlib.Path(folder) / "config.json").is_file():
        raise ValueError(f"model: got {folder!r}, needs a folder with a config.json")
    found = {}
    for name, disabled in (("without", "all"), ("with npu-ops", "")):
        with tempfile.TemporaryDirectory() as scratch:
            path = pathlib.Path(scratch) / "steps.json"
            line = [sys.executable, "-m", "npu_ops_emulator", "--", sys.executable, "-m", __name__]
            environment = os.environ | {"NPU_OPS_DISABLE": disabled}
            code = subprocess.call([*line, folder, str(tokens), str(path)], env=environment)
            if code:
                raise RuntimeError(f"the model {name}: its process ended with {code}, see above")
            found[name] = [Step(**row) for row in json.loads(path.read_text())]
    return found


def rows(found: dict[str, list[Step]]) -> Iterator[tuple[str, str, list[int]]]:
    """(step, layer or "all", launches without and with npu-ops)."""
    for without, ours in zip(*found.values(), strict=True):
        for layer, count in without.layers.items():
            yield without.name, layer, [count, ours.layers[layer]]
        yield without.name, "all", [without.total, ours.total]


def main(folder: str, tokens: str, path: str) -> None:
    found = [dataclasses.asdict(step) for step in of_folder(folder, int(tokens))]
    pathlib.Path(path).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
