"""GCC vectorises the loops of the native kernels, also for targets without mask registers.

x86-64-v3 (AVX2), which most servers have, and NEON on aarch64, where most NPUs are, have no mask
registers.
"""

import pathlib
import platform
import re
import subprocess

import pytest
import torch

ROOT = pathlib.Path(__file__).parents[1]
SETUP = ROOT / "setup.py"
MARCH = {"x86_64": "x86-64-v3", "aarch64": "armv8.2-a"}[platform.machine()]
HEADERS = """#include <cmath>
#include "common/math.h"
#include "common/vec.h"
using namespace npu_ops;
"""
LOOP = """void loop_{name}(const {type}* in, {type}* out, int64_t count) {{
#pragma GCC ivdep
  for (int64_t i = 0; i < count; ++i) store(out + i, {function}(load(in[i])));
}}
"""
OF_A_FLOAT = ("", "exp_within", "sigmoid", "sigmoid_slope", "softplus", "log_1_plus")
IN_VECTORS = "loop vectorized"


def compiled(source: pathlib.Path, *options: str) -> str:
    """Return GCC's vectorisation report for `source`, compiled with setup.py's options."""
    flags = re.findall(r'^ {12}"(-[fO]\S+|-std=\S+)",$', SETUP.read_text(), re.M)
    assert "-O3" in flags and "-fno-trapping-math" in flags
    command = ["g++", *flags, f"-march={MARCH}"]
    command += ["-fopt-info-vec-optimized-missed", f"-I{ROOT / 'csrc'}", *options]
    command += ["-c", str(source), "-o", "/dev/null"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stderr


def said(report: str, file: pathlib.Path, line: int) -> str:
    return "\n".join(re.findall(rf"{file.name}:{line}:\d+: (.*)", report))


def loops_in(source: str) -> list[int]:
    """Return the line of each loop marked `#pragma GCC ivdep`."""
    return [
        source[: mark.end()].count("\n") + 2 for mark in re.finditer("#pragma GCC ivdep", source)
    ]


def headers_of(file: pathlib.Path) -> set[pathlib.Path]:
    """Return the csrc headers that a file includes, directly or through others."""
    included = re.findall(r'^#include "(\w+/\w+\.h)"', file.read_text(), re.M)
    direct = {ROOT / "csrc" / name for name in included}
    return direct.union(*map(headers_of, direct))


def reports_of(functions, type: str, tmp_path) -> list[str]:
    named = enumerate(functions)
    loops = [LOOP.format(name=i, function=function, type=type) for i, function in named]
    source = HEADERS + "".join(loops)
    file = tmp_path / "loops.cpp"
    file.write_text(source)
    report = compiled(file)
    return [said(report, file, line) for line in loops_in(source)]


@pytest.mark.parametrize("type", ["float", "bf16"])
def test_functions_of_floats_are_computed_in_vectors(type, tmp_path):
    reports = reports_of(OF_A_FLOAT, type, tmp_path)
    scalar = [f for f, report in zip(OF_A_FLOAT, reports, strict=True) if IN_VECTORS not in report]
    assert not scalar


def test_the_report_tells_a_loop_that_is_not(tmp_path):
    """A call of the C library's lgamma, which sets errno, cannot be vectorised."""
    (report,) = reports_of(["std::lgamma"], "float", tmp_path)
    assert "couldn't vectorize" in report and IN_VECTORS not in report


@pytest.mark.slow
@pytest.mark.parametrize("file", sorted(ROOT.glob("csrc/*/*_cpu.cpp")), ids=lambda file: file.stem)
def test_each_marked_loop_of_a_kernel_is_vectorised(file):
    """GCC vectorises an instance of each marked loop; control flow prevents it in none."""
    include = pathlib.Path(torch.__file__).parent / "include"
    places = [include, include / "torch" / "csrc" / "api" / "include"]
    report = compiled(file, *[f"-isystem{place}" for place in places],
                      "-DTORCH_TARGET_VERSION=0x020a000000000000")  # fmt: skip
    for source in (file, *headers_of(file)):
        for line in loops_in(source.read_text()):
            found = said(report, source, line)
            if source != file and not found:
                continue  # a template that this kernel does not use
            assert IN_VECTORS in found, f"{source.name}:{line}"
            assert "control flow" not in found, f"{source.name}:{line}"
