"""Run verl_sft.py with verl's Megatron engine; same arguments, but WHO is never "truth".

There are stand-ins for modules that MindSpeed imports and a machine without an NPU lacks. Training
is in fp32, which the engine's configuration refuses but its code supports. mbridge expects the
picture tokens of released models; here it gets those of verl_data.py.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import warnings

import upstream_mindspeed
import verl_data
import verl_sft


def main(*arguments: str) -> None:
    upstream_mindspeed.without_torchair()
    upstream_mindspeed.stand_in()
    from verl.workers.engine.megatron import transformer_impl

    build = transformer_impl.MegatronEngine._build_tf_config

    def build_in_fp32(self):
        object.__setattr__(self.engine_config, "dtype", "float32")
        build(self)

    transformer_impl.MegatronEngine._build_tf_config = build_in_fp32
    with contextlib.suppress(ImportError):  # mbridge's release lacks the model
        from mbridge.models.qwen3_vl import base_bridge, transformer_config

        if arguments[1] == "shipped":  # MindSpeed sets it on Megatron's class only
            transformer_config.Qwen3VLTransformerConfig.use_flash_attn = True
        names = ("image_token_id", "video_token_id", "vision_start_token_id")
        tokens = {name: verl_data.TOKENS[name] for name in names}
        base_bridge.Qwen3VLModel = functools.partial(base_bridge.Qwen3VLModel, **tokens)
    verl_sft.main(*arguments)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(*sys.argv[1:])
