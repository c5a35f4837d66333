"""Run checks of this folder; print a line of JSON for each, [module, name, error].

python -m sglang_cpu.each checks gdn_kit ascend

Each module runs in a fork of this process, because importing SGLang takes 15 seconds.
"""

import importlib
import json
import multiprocessing
import sys

import sglang.srt.managers.scheduler  # noqa: F401
import torch


def show(module: str) -> None:
    torch.set_num_threads(1)
    for row in importlib.import_module(f"sglang_cpu.{module}").run():
        print(json.dumps([module, *row]), flush=True)


def main(modules: list[str]) -> int:
    """Run the modules; return how many did not finish."""
    ended = []
    for module in modules:
        process = multiprocessing.get_context("fork").Process(target=show, args=[module])
        process.start()
        process.join()
        ended.append(process.exitcode)
    return sum(code != 0 for code in ended)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
