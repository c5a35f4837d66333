"""Count the elements of a vision tower's position embedding that differ from a server's.

python consistent_tower.py, with any transformers on the path and NPU_OPS_CONSISTENT=1. Prints that
count, and how many elements there are.
"""

from __future__ import annotations

import json

import npu_ops_adapters
import torch
from npu_ops_adapters import vision_tower
from transformers.models.qwen3_vl import modeling_qwen3_vl
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig

# [frames, height, width] in patches: one merged patch (2 x 2); grids as high as the table (48),
# smaller and larger than it; and two frames.
GRIDS = [[1, 2, 2], [1, 48, 46], [1, 30, 62], [2, 14, 8], [1, 96, 38]]


def of_training(tower) -> torch.Tensor:
    """Return the first block's input for pictures of zeros: the position embedding alone."""
    seen = []
    hook = tower.blocks[0].register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    patches = sum(t * h * w for t, h, w in GRIDS)
    with torch.no_grad():
        weight, bias = tower.patch_embed.proj.weight, tower.patch_embed.proj.bias
        bias.zero_()
        tower(weight.new_zeros(patches, weight[0].numel()), torch.tensor(GRIDS))
    hook.remove()
    return seen[0]


def main() -> None:
    npu_ops_adapters.apply()
    torch.manual_seed(0)
    config = Qwen3VLVisionConfig(hidden_size=64, num_heads=4, depth=1, out_hidden_size=64)
    config._attn_implementation = "eager"
    tower = modeling_qwen3_vl.Qwen3VLVisionModel(config).bfloat16().eval()
    of_server = vision_tower.position_embedding(tower, GRIDS)
    found = of_training(tower)
    assert found.shape == of_server.shape
    print(json.dumps([int((found != of_server).sum()), found.numel()]))


if __name__ == "__main__":
    main()
