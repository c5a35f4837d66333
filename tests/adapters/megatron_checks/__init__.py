"""Run the checks of one megatron-core release in a process of their own.

python -c "import megatron_checks; megatron_checks.run('early')"    with the release on PYTHONPATH

Prints a line of JSON for each check: its name, and null or the error. `early` registers the
adapters before Megatron is imported, as `import torch` does; `late` after all of it was imported.
"""

from __future__ import annotations

import json
import traceback

import counting

from megatron_checks.release import CALLS, CHECKS, gdn, is_of_gated_delta_net, names, note_call

# Each module registers its checks, which run in this order.
# isort: off
from megatron_checks import registration  # noqa: F401
from megatron_checks import calls  # noqa: F401
from megatron_checks import attention  # noqa: F401
from megatron_checks import rope_and_dropout  # noqa: F401
from megatron_checks import equality  # noqa: F401
from megatron_checks import refusals  # noqa: F401
from megatron_checks import late  # noqa: F401
# isort: on

__all__ = ["CHECKS", "names", "run"]


def run(mode: str) -> None:
    import torch

    torch.set_num_threads(1)
    started = False
    for function in CHECKS[mode]:
        if is_of_gated_delta_net(function) and gdn() is None:
            continue
        try:
            function()
            if not started:
                import megatron_cpu

                megatron_cpu.start()
                counting.on_calls(CALLS, note_call)
                started = True
            error = None
        except Exception:
            error = traceback.format_exc()
        print(json.dumps([function.__name__, error]), flush=True)
