"""Run vLLM's engine on a model of `tiny`; print a line of JSON for each prompt.

python -m vllm_npu.engine FOLDER [KEY=VALUE...]

A line is [how, prompt, tokens]. Each prompt is served alone, then all together: some decode while
others are prefilled, with their prefixes cached if vLLM caches them. Values are JSON. With
enforce_eager=false the lines of `graphs` follow.
"""

from __future__ import annotations

import json
import pathlib
import sys

from sglang_cpu.tiny import HYBRID, IMAGE, PICTURED

from vllm_npu import graphs, stand_ins

SETTINGS = {
    "dtype": "float16",
    "enforce_eager": True,
    "max_model_len": 512,
    "max_num_batched_tokens": 128,  # the long prompt's second part reads the cache of its first
    "max_num_seqs": 4,
    "block_size": 128,
    "num_gpu_blocks_override": 16,
    "async_scheduling": False,
}


def start(folder: pathlib.Path, **changes):
    """Start vLLM's engine in this process, and return it."""
    stand_ins.install()
    import vllm

    stand_ins.mend_log_probabilities_of_drafts()
    graphs.watch()

    # A vision model has a processor with a tokenizer; a text model has none.
    settings = SETTINGS | {"skip_tokenizer_init": folder.name not in PICTURED}
    if folder.name in HYBRID:
        settings["mamba_ssm_cache_dtype"] = "float32"
    return vllm.LLM(model=str(folder), **settings | changes)


def prompt_of(folder: pathlib.Path, tokens: list[int]) -> dict:
    """Return a prompt for vLLM, which itself repeats a picture's token."""
    once = [token for i, token in enumerate(tokens) if token != IMAGE or tokens[i - 1] != IMAGE]
    prompt = {"prompt_token_ids": once}
    if IMAGE in tokens:
        from PIL import Image

        prompt["multi_modal_data"] = {"image": Image.open(folder / "picture.png")}
    return prompt


def main(folder: pathlib.Path, **changes) -> None:
    engine = start(folder, **changes)
    import vllm

    expected = json.loads((folder / "expected.json").read_text())
    asked = {name: prompt_of(folder, tokens) for name, (tokens, _) in expected.items()}
    (count,) = {len(following) for _, following in expected.values()}
    sampling = vllm.SamplingParams(
        temperature=0, max_tokens=count, ignore_eos=True, detokenize=False
    )
    rounds = [("alone", {name: prompt}) for name, prompt in asked.items()]
    for how, prompts in [*rounds, ("together", asked)]:
        found = engine.generate(list(prompts.values()), sampling, use_tqdm=False)
        for name, out in zip(prompts, found, strict=True):
            print(json.dumps([how, name, list(out.outputs[0].token_ids)]), flush=True)
    graphs.report()


if __name__ == "__main__":
    given = (argument.partition("=") for argument in sys.argv[2:])
    main(pathlib.Path(sys.argv[1]), **{name: json.loads(value) for name, _, value in given})
