"""Run SGLang's own test kit for Gated Delta Net; print a line of JSON per case, [name, error].

python -m sglang_cpu.each gdn_kit

The kit builds SGLang's backend and pools and compares with a recurrence in torch. It is written for
CUDA; here it runs in fp32, without saving a CUDA generator.
"""

import functools
import unittest

import torch
from outcomes import error_of


def run():
    torch.cuda.get_rng_state = lambda device=None: torch.get_rng_state()
    torch.cuda.set_rng_state = lambda state, device=None: torch.set_rng_state(state)
    torch.cuda.manual_seed_all = lambda seed: None
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang.test.kits.attention_unittest.attention_methods import gdn_attention as kit

    for case in kit.make_gdn_cases("torch_native"):
        check = functools.partial(kit.run_gdn_attention_case, unittest.TestCase(), case)
        yield case.name, error_of(check, dtype=torch.float32, device="cpu")
