"""SGLang 0.5.23's engine as slime's rollout: slime v0.2.2 is for 0.5.7.

slime starts SGLang's router and server itself, sends them prompts and weights. What is not slime's:
names of the server's arguments, which are no dataclass now, a session around new weights, and a
torch whose version is after "2.6" as a string.
"""

from __future__ import annotations

import importlib
import types


def install() -> None:
    """In each process of slime's, before it starts an engine; MindSpeed first, as in train.py."""
    importlib.import_module("mindspeed.megatron_adaptor")
    from sglang.srt.arg_groups.arg_utils import record_fields
    from slime.backends.sglang_utils import sglang_engine
    from slime.utils import distributed_utils

    sglang_engine.dataclasses = types.SimpleNamespace(fields=record_fields)
    with_sessions(sglang_engine.SGLangEngine)
    make = distributed_utils._new_process_group_helper

    def make_group(*args, pg_options=None, **options):
        return make(*args, backend_options=pg_options, **options)

    distributed_utils._new_process_group_helper = make_group


def with_sessions(engine: type) -> None:
    """SGLang 0.5.23 takes weights between these two alone: slime pauses it for them."""
    pause, go_on = engine.pause_generation, engine.continue_generation

    def begin(self):
        pause(self)
        self._make_request("begin_weight_update")

    def end(self):
        self._make_request("end_weight_update")
        go_on(self)

    engine.pause_generation, engine.continue_generation = begin, end


async def reward(args, sample) -> float:
    """For --custom-rm-path: how many tokens of the answer are even."""
    answer = sample.tokens[-sample.response_length :]
    return sum(token % 2 == 0 for token in answer) / len(answer)
