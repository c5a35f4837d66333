"""Wrong kernels made from ours: each must be caught by a check of the twin or by a wrong result.

    npu-ops emulate -- python tests/emulator/mutants.py           # all; --every 20: a sample

A mutant is one of our AscendC kernels with one line changed: a wait, a free or an event left out, a
buffer halved, an edge shifted, a queue taken for another, cores that do the same. It runs the cases
of its op below. Prints those that survive and the score; ends with 1 if that is below 95 %.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import dataclasses
import importlib
import pathlib
import re
import shutil
import sys
import tempfile
from unittest import mock

import torch
import torch_npu  # noqa: F401
from npu_ops_emulator import EmulatorError, headers, twins

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))
from support import assert_all_close, evaluate, floats, forced

import npu_ops
from npu_ops.core import ascendc, library, rng

library.poison_outputs = True
LOWEST = 0.95

# Of each op, cases and changes of them that take every branch of its kernels, and are small.
CASES = {
    "bias_dropout_add": [("odd-t65-h7-full", {"tokens": 700}), ("odd-t63-h129-row", {})],
    "l2norm": [("odd-t131-d256-behind5", {}), ("wide-4096", {}), ("odd-t63-d60-behind5", {}),
               ("one-element", {})],
    "rms_norm_gated": [("odd-t63-d60-after-sigmoid", {}), ("mamba2-groups", {"tokens": 60}),
                       ("wide-8192", {}), ("qwen3-next-tp1-t64", {"tokens": 9})],
    "gdn_gate": [("many-heads", {}), ("odd-t131-h100", {}), ("odd-t63-h6", {"tokens": 500})],
}  # fmt: skip
# Headers that ops share are tried with one of them.
SHARED = {
    "common/rows_ascendc.h": "rms_norm_gated",
    "common/activation_ascendc.h": "gdn_gate",
    "common/ascendc.h": "bias_dropout_add",
    "common/philox_ascendc.h": "bias_dropout_add",
}

# What a mutation is called; what it finds in a line; what it puts there.
_STATEMENT = r"^(\s*)[\w.\[\]>-]*\b{}\b.*;$"
RULES = [
    ("no EnQue", _STATEMENT.format("EnQue"), r"\1;"),
    ("no DeQue", r"^(\s*)\w+ = .*\bDeQue<.*;$", r"\1;"),
    ("no FreeTensor", _STATEMENT.format("FreeTensor"), r"\1;"),
    ("no SetFlag", _STATEMENT.format(r"SetFlag<.*>"), r"\1;"),
    ("no WaitFlag", _STATEMENT.format(r"WaitFlag<.*>"), r"\1;"),
    ("no event", r"^(\s*)(Set|Wait)Flag<.*>\(.*\);$", r"\1;"),
    ("half a buffer", r"(InitBuffer\(\w+, (?:2, |1, )?)(.*)(\);)$", r"\1(\2) / 2\3"),
    ("half the floats", r"(\.floats\()([^,;]*)(.*\);)$", r"\1(\2) / 2\3"),
    ("a column more", r"\btile\.columns\b(?! ==)", "(tile.columns + 1)"),
    ("a row more", r"\btile\.rows\b(?! /|\);)", "(tile.rows + 1)"),
    ("a row less", r"\btile\.rows\b(?! /)", "(tile.rows - 1)"),
    ("the first columns again", r" \+ tile\.column\b", ""),
    ("the first column's sums again", r"\[tile\.column\]", ""),
    ("an edge forgotten", r"\bsmaller\((.*), (tiling_\.rows|last - row)\)", r"(\1)"),
    ("cores do the same", r"\+= AscendC::GetBlockNum\(\)|\+= GetBlockNum\(\)", "+= 1"),
    ("cores begin alike", r"= (AscendC::)?GetBlockIdx\(\)", "= 0"),
    ("another queue", r"\bx_queue_(?=, x_)", "out_queue_"),
    ("buffers swapped", r"\btake\((\w+)_queue_, (wide_x_|value_|x_), ", r"take(\1_queue_, s_, "),
    ("no zeros before", r"^(\s*)(?:AscendC::)?Duplicate\(\w+(?:\[.*\])?, 0.*;$", r"\1;"),
    ("not added up", r"^(\s*)rows_\.add_(?:products|rows)\(.*;$", r"\1;"),
    ("an instruction less",
     r"^(\s*)(?:AscendC::)?(?:Add|Sub|Mul|Muls|Adds|Div|Exp|Sqrt|Brcb|Select)\(.*\);$", r"\1;"),
    ("a stride less", r"\bapart\b(?=[,}])", "(apart - 2)"),
]  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Mutant:
    """`line` of `file`, counted from 1, is `text` instead; `op` is what it is tried with."""

    rule: str
    op: str
    file: str
    line: int
    text: str

    def __str__(self):
        return f"{self.rule}: {self.file}:{self.line}: {self.text.strip() or '(nothing)'}"


def mutants() -> list[Mutant]:
    """All of them, the files one after the other."""
    files = {f"{op}/{op}_ascendc.cpp": op for op in CASES} | SHARED
    found = {}
    for file, op in files.items():
        lines = (headers.kernel_sources() / file).read_text().splitlines()
        for number, line in enumerate(lines, 1):
            if line.lstrip().startswith("//"):
                continue
            for rule, pattern, replacement in RULES:
                changed, count = re.subn(pattern, replacement, line, count=1)
                if count and changed != line:
                    found.setdefault(
                        (file, number, changed), Mutant(rule, op, file, number, changed)
                    )
    return list(found.values())


def compiled(mutant: Mutant, folder: pathlib.Path) -> pathlib.Path | str:
    """The mutant's twin, or why there is none."""
    sources = folder / f"{abs(hash(mutant))}"
    for part in ("common", mutant.op):
        shutil.copytree(headers.kernel_sources() / part, sources / part)
    path = sources / mutant.file
    lines = path.read_text().splitlines()
    lines[mutant.line - 1] = mutant.text
    path.write_text("\n".join(lines) + "\n")
    try:
        return twins.compile(sources / mutant.op / f"{mutant.op}_ascendc.cpp", [sources]).path
    except EmulatorError as error:
        return str(error)


def verdict(op: str, path: pathlib.Path) -> str | None:
    """What gives a twin away: "check" or "result"; None if nothing does."""
    ascendc.target.cache_clear()
    with mock.patch.object(ascendc, "locate", lambda op, family: path):
        for inputs, expected, tolerances in examples(op):
            try:
                actual = run(op, "ascendc", inputs)
            except RuntimeError as error:
                if "the AscendC kernel is wrong" not in str(error):
                    raise
                return "check"
            try:
                assert_all_close(actual, expected, tolerances)
            except AssertionError:
                return "result"
    return None


def examples(op: str):
    """(arguments on the NPU, right results, tolerances) of each case, in a dtype of its own."""
    if op not in examples.made:
        cases = importlib.import_module(f"npu_ops.ops.{op}.cases")
        named = {case.name: case for case in cases.CASES}
        dtypes = torch.float32, torch.bfloat16, torch.float16
        made = examples.made[op] = []
        for i, (name, changes) in enumerate(CASES[op]):
            case, dtype = dataclasses.replace(named[name], **changes), dtypes[i % 3]
            right = run(op, "reference", floats(case.inputs(dtype), torch.float64))
            made.append((case.inputs(dtype, "npu"), right, cases.TOLERANCES))
    return examples.made[op]


examples.made = {}


def run(op: str, implementation: str, inputs: dict) -> dict:
    """Results and gradients; what is random is the same each time."""

    def state(device, generator):
        return torch.tensor((3, 5), device=device)

    differentiable = importlib.import_module(f"npu_ops.ops.{op}.cases").DIFFERENTIABLE
    with mock.patch.object(rng, "new_state", state), forced(implementation, op):
        return evaluate(getattr(npu_ops, op), inputs, differentiable)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--every", type=int, default=1, help="take each so many'th")
    parser.add_argument("--op", help="of one op alone")
    options = parser.parse_args()
    chosen = [m for m in mutants() if options.op in (None, m.op)][:: options.every]
    for op in {mutant.op for mutant in chosen}:
        assert verdict(op, ascendc.locate(op, "")) is None, f"{op}: the kernel itself is wrong"
    count: collections.Counter[str] = collections.Counter()
    with (
        tempfile.TemporaryDirectory() as folder,
        concurrent.futures.ThreadPoolExecutor(2) as pool,
    ):
        paths = pool.map(lambda m: compiled(m, pathlib.Path(folder)), chosen)
        for mutant, path in zip(chosen, paths, strict=True):
            if isinstance(path, str):
                count["does not compile"] += 1
                continue
            caught = verdict(mutant.op, path)
            path.unlink()
            count[caught or "survives"] += 1
            if not caught:
                print(f"survives: {mutant}", flush=True)
    caught = count["check"] + count["result"]
    tried = caught + count["survives"]
    print(
        f"{caught} of {tried} caught ({100 * caught / tried:.1f} %): {count['check']} by a check, "
        f"{count['result']} by a wrong result; {count['does not compile']} do not compile"
    )
    return caught < LOWEST * tried


if __name__ == "__main__":
    sys.exit(main())
