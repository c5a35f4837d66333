"""Compare logits of a tiny Qwen3.5 in training, as a prompt and decoded, in consistent mode.

python consistent_model.py DTYPE [DEVICE]

Runs with NPU_OPS_CONSISTENT=1. Prints how many logits differ from those of one forward of all
tokens: first of a prompt of 50 tokens, then of 8 tokens decoded one by one from its cache. Then
prints how many logits there are.
"""

import sys

import torch
import transformers
from sglang_cpu import tiny


def main(dtype: torch.dtype, device: str) -> None:
    torch.manual_seed(0)
    model = tiny.qwen3_5().to(dtype).to(device).eval()
    model.set_attn_implementation("npu_ops")
    ids = torch.randint(1, 500, (2, 58), generator=torch.Generator().manual_seed(0)).to(device)
    with torch.no_grad():
        trained = model(input_ids=ids, use_cache=False).logits
        prompt = model(input_ids=ids[:, :50], use_cache=True)
        found, cache = [prompt.logits], prompt.past_key_values
        for at in range(50, 58):
            step = model(input_ids=ids[:, at : at + 1], past_key_values=cache, use_cache=True)
            found.append(step.logits)
    different = torch.cat(found, 1) != trained
    print(int(different[:, :50].sum()), int(different[:, 50:].sum()), different.numel())


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    main(getattr(torch, sys.argv[1]), *(sys.argv[2:] or ["cpu"]))
