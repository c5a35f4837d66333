"""Let slime use SGLang 0.5.23's engine as its rollout.

slime itself starts SGLang's router and server, and sends prompts and weights. npu-ops fixes what
prevents this, with one exception, which `install` fixes: slime v0.2.2 compares torch's version with
"2.6" as strings.
"""

from __future__ import annotations

import importlib


def install() -> None:
    """Prepare a process of v0.2.2 before it starts an engine; MindSpeed first, as in train.py."""
    importlib.import_module("mindspeed.megatron_adaptor")
    from slime.utils import distributed_utils

    make = distributed_utils._new_process_group_helper

    def make_group(*args, pg_options=None, **options):
        return make(*args, backend_options=pg_options, **options)

    distributed_utils._new_process_group_helper = make_group


async def reward(args, sample) -> float:
    """For --custom-rm-path: the share of even tokens in the answer."""
    answer = sample.tokens[-sample.response_length :]
    return sum(token % 2 == 0 for token in answer) / len(answer)
