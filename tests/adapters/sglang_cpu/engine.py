"""Run SGLang's engine on tiny models of `tiny.py`; print a line of JSON for each prompt.

python -m sglang_cpu.engine FOLDER [KEY=VALUE...] [FOLDER [KEY=VALUE...]...]

A line is [model, prompt, tokens]. On stderr, the line "model: NAME" precedes a model's output.
"""

import contextlib
import json
import multiprocessing
import os
import pathlib
import sys
from unittest import mock

SETTINGS = {
    "device": "cpu",
    "dtype": "float32",
    "skip_tokenizer_init": True,
    "attention_backend": "torch_native",
    "mm_attention_backend": "sdpa",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "disable_radix_cache": True,
    "disable_overlap_schedule": True,
    "disable_cuda_graph": True,
    "chunked_prefill_size": -1,
    "mem_fraction_static": 0.3,
    "max_total_tokens": 2048,
    "max_running_requests": 4,
    "log_level": "info",
}


ON_NPU = {
    "device": "npu",
    "dtype": "float16",
    "attention_backend": "ascend",
    "mm_attention_backend": "ascend_attn",
    "sampling_backend": "ascend",
    "page_size": 128,
    "chunked_prefill_size": 128,  # the long prompt's second part reads the cache of its first
}


def serve(folder: pathlib.Path, **changes):
    """Yield each prompt's name and the tokens that follow it."""
    import sglang
    import torch

    expected = json.loads((folder / "expected.json").read_text())
    npu = ON_NPU if os.environ.get("SGLANG_PLATFORM") == "sglang_npu" else {}
    engine = sglang.Engine(**SETTINGS | npu | {"model_path": str(folder)} | changes)
    try:
        for prompt, (tokens, following) in expected.items():
            inputs = {}
            if prompt == "picture":
                picture = torch.load(folder / "picture.pt")
                picture |= {"format": "processor_output", "input_ids": torch.tensor([tokens])}
                inputs["image_data"] = [picture]
            sampling = {"temperature": 0, "max_new_tokens": len(following), "ignore_eos": True}
            out = engine.generate(input_ids=tokens, sampling_params=sampling, **inputs)
            yield prompt, (out[0] if isinstance(out, list) else out)["output_ids"]
    finally:
        engine.shutdown()


@contextlib.contextmanager
def forked():
    """Fork SGLang's processes from this one; else each would import SGLang, which
    takes 15 seconds."""
    import sglang.srt.managers.detokenizer_manager
    import sglang.srt.managers.scheduler  # noqa: F401

    multiprocessing.set_start_method("fork", force=True)
    with mock.patch.object(multiprocessing, "set_start_method"):
        yield


def main(arguments: list[str]):
    jobs = []
    for argument in arguments:
        if "=" in argument:
            name, _, value = argument.partition("=")
            jobs[-1][1].append((name, json.loads(value) if value[:1] in "{[0123456789" else value))
        else:
            jobs.append((pathlib.Path(argument), []))
    for folder, changes in jobs:
        print("model:", folder.name, file=sys.stderr, flush=True)
        # The last model's processes start as SGLang starts them. For the others forking is safe, as
        # this process has no threads before it serves.
        with forked() if folder != jobs[-1][0] else contextlib.nullcontext():
            for row in serve(folder, **dict(changes)):
                print(json.dumps([folder.name, *row]), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
