"""SGLang 0.5.23's engine as slime's rollout.

slime starts SGLang's router and server itself, sends them prompts and weights. npu-ops mends what
is in the way, but for a torch whose version is after "2.6", which v0.2.2 compares as strings.
"""

from __future__ import annotations

import importlib


def install() -> None:
    """In each process of v0.2.2's, before it starts an engine; MindSpeed first, as in train.py."""
    importlib.import_module("mindspeed.megatron_adaptor")
    from slime.utils import distributed_utils

    make = distributed_utils._new_process_group_helper

    def make_group(*args, pg_options=None, **options):
        return make(*args, backend_options=pg_options, **options)

    distributed_utils._new_process_group_helper = make_group


async def reward(args, sample) -> float:
    """For --custom-rm-path: how many tokens of the answer are even."""
    answer = sample.tokens[-sample.response_length :]
    return sum(token % 2 == 0 for token in answer) / len(answer)
