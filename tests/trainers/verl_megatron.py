"""verl_sft.py with verl's Megatron engine: the same arguments, "truth" excepted.

MindSpeed imports modules that a machine without an NPU lacks; they are stood in for. In fp32, which
the engine's configuration refuses and its code does not.
"""

from __future__ import annotations

import sys
import warnings

import upstream_mindspeed
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
    verl_sft.main(*arguments)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(*sys.argv[1:])
