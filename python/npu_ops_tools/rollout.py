"""Compares log-probabilities: SGLang samples as a server, transformers recomputes as a trainer.

Both run in this environment, with its npu-ops settings: NPU_OPS_CONSISTENT selects the mode.
Prompts are random tokens. Each prompt of the second half begins like one of the first, so its
prefix is cached. For a vision model, two more prompts have a random picture; the second one's
prefix is cached.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import inspect
import itertools
import json
import math
from collections.abc import Iterator

import torch

from npu_ops.core import env

# Tokens of the prompts in each half. A prompt of the second half begins with the whole prompt of
# the first.
LENGTHS = ((7, 70, 150, 333), (100, 140, 200, 400))
# Patches of the picture in height and width; tokens before it, and after it in each prompt.
PATCHES, AROUND = (8, 12), (60, (9, 40))


@dataclasses.dataclass(frozen=True)
class Row:
    """The result for one prompt.

    prompt, cached: numbers of the prompt's tokens, and of those in SGLang's prefix cache.
    sampled: number of sampled tokens.
    largest, mean: absolute difference of the sampled tokens' log-probabilities.
    equal: fraction of sampled tokens without a difference.
    picture: whether the prompt has a picture.
    """

    prompt: int
    cached: int
    sampled: int
    largest: float
    mean: float
    equal: float
    picture: bool = False


@dataclasses.dataclass(frozen=True)
class Prompt:
    """Tokens, and the picture in transformers' arguments: `pixel_values`, `image_grid_thw`."""

    tokens: list[int]
    picture: dict[str, torch.Tensor] | None = None


def settings(given) -> dict:
    """Parse arguments of `sglang.Engine` from NAME=VALUE; values are JSON, or else text.

    Raises:
        ValueError: a text without "=".
    """
    found = {}
    for text in given:
        name, separator, value = text.partition("=")
        if not separator:
            raise ValueError(f"engine: got {text!r}, needs NAME=VALUE")
        try:
            found[name] = json.loads(value)
        except ValueError:
            found[name] = value
    return found


def run(model: str, dtype: str, device: str, tokens: int, engine: dict) -> Iterator[Row]:
    """Yield a `Row` for each prompt.

    Args:
        model: a folder that both load. dtype: of weights. tokens: to sample after each prompt.
        engine: more arguments of `sglang.Engine`.

    Raises:
        ImportError: sglang or transformers is not installed.
        RuntimeError: sglang or transformers failed.
    """
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(model)
    vocabulary = getattr(config, "text_config", config).vocab_size
    asked = [Prompt(text) for half in prompts(vocabulary) for text in half]
    if hasattr(config, "vision_config"):
        asked += pictured(config, vocabulary)
    with serving(model, dtype, device, engine) as server:
        served = [sampled(server, prompt, tokens) for prompt in asked]
    gc.collect()
    trained = trainer(model, config, dtype, device)
    for prompt, following, cached, logprobs in served:
        following = before_pictures(following, config)
        again = logprobs_of(trained, prompt, following, device)
        off = (again - torch.tensor(logprobs[: len(following)], dtype=torch.float64)).abs()
        equal = (off == 0).double().mean()
        found = map(float, (off.max(), off.mean(), equal))
        seen = prompt.picture is not None
        yield Row(len(prompt.tokens), cached, len(following), *found, picture=seen)


def prompts(vocabulary: int) -> list[list[list[int]]]:
    """Return two halves of prompts; each prompt of the second begins like one of the first."""
    draw, end = torch.Generator().manual_seed(0), ordinary(vocabulary)
    first, more = (
        [torch.randint(1, end, (n,), generator=draw).tolist() for n in lengths]
        for lengths in LENGTHS
    )
    return [first, [(a + b)[:n] for a, b, n in zip(first, more, LENGTHS[1], strict=True)]]


def ordinary(vocabulary: int) -> int:
    """Return how many tokens to draw from; excludes the last ones, some of which end a text."""
    return max(2, vocabulary * 9 // 10)


def pictured(config, vocabulary: int) -> list[Prompt]:
    """Return prompts with one picture; the second continues where the first ends."""
    draw, vision = torch.Generator().manual_seed(1), config.vision_config
    patches = math.prod(PATCHES)
    values = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    picture = {
        "pixel_values": torch.randn(patches, values, generator=draw),
        "image_grid_thw": torch.tensor([[1, *PATCHES]]),
    }
    before, behind = AROUND
    shape = (before + max(behind),)
    text = torch.randint(1, ordinary(vocabulary), shape, generator=draw).tolist()
    tokens = [config.image_token_id] * (patches // vision.spatial_merge_size**2)
    begin = [*text[:before], config.vision_start_token_id, *tokens, config.vision_end_token_id]
    return [Prompt(begin + text[before : before + n], picture) for n in behind]


@contextlib.contextmanager
def serving(model: str, dtype: str, device: str, engine: dict):
    """Run SGLang's engine in a block."""
    import sglang

    arguments = {"skip_tokenizer_init": True, "device": device, "dtype": dtype} | engine
    server = sglang.Engine(model_path=model, **arguments)
    try:
        yield server
    finally:
        server.shutdown()


def sampled(server, prompt: Prompt, tokens: int):
    """Sample; return the prompt, the sampled tokens, the number of cached ones, and
    log-probabilities."""
    sampling = {"temperature": 1.0, "max_new_tokens": tokens, "ignore_eos": True}
    given = {"input_ids": prompt.tokens, "sampling_params": sampling, "return_logprob": True}
    if prompt.picture:
        ids = torch.tensor([prompt.tokens])
        given["image_data"] = [prompt.picture | {"format": "processor_output", "input_ids": ids}]
    out = server.generate(**given)
    out = out[0] if isinstance(out, list) else out
    about = out["meta_info"]
    found = about["output_token_logprobs"]
    return prompt, out["output_ids"], about["cached_tokens"], [logprob for logprob, *_ in found]


def before_pictures(following: list[int], config) -> list[int]:
    """Return the tokens before the first special token of a picture.

    With random weights such tokens may be sampled, and transformers would reject them without a
    picture.

    Raises:
        RuntimeError: the first token is special.
    """
    names = ("image_token_id", "video_token_id", "vision_start_token_id")
    special = {getattr(config, name, None) for name in names}
    found = list(itertools.takewhile(lambda token: token not in special, following))
    if not found:
        raise RuntimeError(
            f"sampled {following[0]}, the placeholder token of a picture, after a prompt"
        )
    return found


def trainer(model: str, config, dtype: str, device: str):
    """Load the model as a trainer does."""
    import transformers

    kind = "ImageTextToText" if hasattr(config, "vision_config") else "CausalLM"
    auto = getattr(transformers, f"AutoModelFor{kind}")
    ours = {"attn_implementation": "npu_ops"} if env.settings.consistent else {}
    loaded = auto.from_pretrained(model, dtype=getattr(torch, dtype), **ours)
    return loaded.to(device).eval()


@torch.no_grad()
def logprobs_of(model, prompt: Prompt, following: list[int], device: str) -> torch.Tensor:
    """Return the trainer's log-probabilities of the following tokens, fp64 `[tokens]`."""
    ids = torch.tensor([prompt.tokens + following], device=device)
    picture = {name: x.to(device) for name, x in (prompt.picture or {}).items()}
    if picture and "mm_token_type_ids" in inspect.signature(model.forward).parameters:
        picture["mm_token_type_ids"] = (ids == model.config.image_token_id).long()
    logits = model(input_ids=ids, use_cache=False, **picture).logits
    logits = logits[0, len(prompt.tokens) - 1 : -1].float()
    chosen = ids[0, len(prompt.tokens) :, None]
    # SGLang takes the logarithm of the sampling probabilities; on NPUs it uses log_softmax.
    found = logits.log_softmax(-1) if device == "npu" else logits.softmax(-1).log()
    return found.gather(1, chosen)[:, 0].double().cpu()


HEAD = f"{'prompt':>7}{'cached':>8}{'sampled':>9}{'largest':>11}{'mean':>11}{'equal':>8}"


def line(row: Row) -> str:
    """Format a row as text."""
    return (
        f"{row.prompt:7}{row.cached:8}{row.sampled:9}{row.largest:11.2e}{row.mean:11.2e}"
        f"{row.equal:8.1%}{'  picture' * row.picture}"
    )
