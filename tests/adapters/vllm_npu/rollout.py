"""Compare a server's log-probabilities with a trainer's, as `npu-ops parity --rollout` does.

python -m vllm_npu.rollout FOLDER KEY=VALUE...     in vLLM's environment
python -m vllm_npu.rollout FOLDER DTYPE SERVED     in this one, by transformers

The server prints, per prompt, ["served", tokens, following, cached, log-probabilities]. SERVED is a
list of these without the word. The trainer prints ["compared", number of tokens, cached, sampled,
largest difference, number of equal ones].
"""

from __future__ import annotations

import json
import pathlib
import sys

from npu_ops_tools import rollout
from sglang_cpu.tiny import IMAGE, PICTURE, PICTURED

SAMPLED = 5
MORE = [7, 11, 13]  # after a cached picture


def asked_of(folder: pathlib.Path) -> list[list[list[int]]]:
    """Return prompts in two halves, some with pictures; the second's start like the first's."""
    config = json.loads((folder / "config.json").read_text())
    halves = rollout.prompts(config.get("text_config", config)["vocab_size"])
    if folder.name in PICTURED:
        halves = [[*halves[0], PICTURE], [*halves[1], PICTURE + MORE]]
    return halves


def serve(folder: pathlib.Path, **changes) -> None:
    """Sample after each prompt. vLLM may have prefixes from the first half in its cache."""
    from vllm_npu import engine, graphs

    server = engine.start(folder, **changes)
    import vllm

    sampling = vllm.SamplingParams(
        temperature=1.0, seed=0, max_tokens=SAMPLED, ignore_eos=True, detokenize=False, logprobs=0
    )
    for half in asked_of(folder):
        asked = [engine.prompt_of(folder, tokens) for tokens in half]
        for tokens, out in zip(half, server.generate(asked, sampling, use_tqdm=False), strict=True):
            following = list(out.outputs[0].token_ids)
            found = zip(following, out.outputs[0].logprobs, strict=True)
            logprobs = [each[token].logprob for token, each in found]
            print(json.dumps(["served", tokens, following, out.num_cached_tokens, logprobs]))
    sys.stdout.flush()
    graphs.report()


def compare(folder: pathlib.Path, dtype: str, served: pathlib.Path) -> None:
    """Compute the same log-probabilities by one forward of each prompt with its tokens."""
    import torch
    from transformers import AutoConfig

    model = rollout.trainer(str(folder), AutoConfig.from_pretrained(folder), dtype, "npu")
    for tokens, following, cached, logprobs in json.loads(served.read_text()):
        picture = torch.load(folder / "picture.pt") if IMAGE in tokens else None
        prompt = rollout.Prompt(tokens, picture)
        again = rollout.logprobs_of(model, prompt, following, "npu")
        off = (again - torch.tensor(logprobs, dtype=torch.float64)).abs()
        row = [len(tokens), cached, len(following), off.max().item(), int((off == 0).sum())]
        print(json.dumps(["compared", *row]), flush=True)


if __name__ == "__main__":
    folder, *given = sys.argv[1:]
    if "=" not in given[0]:
        compare(pathlib.Path(folder), given[0], pathlib.Path(given[1]))
    else:
        changes = (argument.partition("=") for argument in given)
        serve(pathlib.Path(folder), **{name: json.loads(value) for name, _, value in changes})
