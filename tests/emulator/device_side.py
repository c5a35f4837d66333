"""Checks AscendC kernels a second time: with clang and the device part of the vendor's headers.

The twin of a kernel (npu_ops_emulator) is compiled with g++ for a CPU, so it accepts code that a
device cannot run. Here every pointer has its address space. The checker reports these in a kernel:
- double, recursion, indirect calls, global constructors, a stack that is too deep
- functions that are not for devices: the C and C++ library's, and ours without `__aicore__`
For Ascend950, whose instructions differ, it only checks that a kernel's calls are declared.
"""

from __future__ import annotations

import collections
import functools
import hashlib
import os
import pathlib
import re
import shutil
import subprocess
import tempfile

from npu_ops_emulator import EmulatorError, build, headers, twins

STACK = (
    32 * 1024
)  # bytes; bisheng's -cce-aicore-stack-size is 0x8000 in the builds of CANN's kernels
FLAGS = ("-std=c++17", "-O1", "-w", "-ferror-limit=0", "-fno-exceptions", "-fno-rtti",
         "-fno-threadsafe-statics", "-fno-asynchronous-unwind-tables",
         # The headers write `template` before a name without template arguments.
         "-Wno-missing-template-arg-list-after-template-kw")  # fmt: skip
_HERE = pathlib.Path(__file__).parent
# Instructions with unusual names; those with a common prefix are found in the headers.
_SCALAR = (
    "dcci dsb dc_preload preload pipe_barrier wait_flag get_sys_cnt asc_prof_start asc_prof_stop"
)
_NUMBERS = "sbitset0 sbitset1 sff0 sff1 sflbits clz bcnt0 bcnt1 conv_f322s32" + (
    "r conv_f322s32f conv_f322s32c conv_f322s32a conv_f322s32z"
)


@functools.cache
def clang() -> str | None:
    """Return a clang++ command that knows `__bf16`, None if there is none."""
    names = ("clang++", *(f"clang++-{version}" for version in range(21, 16, -1)))
    return next((name for name in names if shutil.which(name)), None)


def why_not() -> str | None:
    """Return None, or a sentence on why this checker cannot run here."""
    if clang() is None:
        return "clang++ 17 or later is not installed, so nobody but g++ has seen the kernels"
    return headers.why_not()


def findings(source: pathlib.Path, *flags: str) -> list[str]:
    """Return a sentence for each reason why a device cannot run a kernel."""
    return judge(source, *flags)[0]


def judge(source: pathlib.Path, *flags: str) -> tuple[list[str], Module | None]:
    """Return the findings, and the kernel's LLVM assembly; None if clang refused the kernel."""
    command = [*_compiler(), "-include-pch", _headers(), *flags, f"-I{source.parent}", source]
    with tempfile.TemporaryDirectory() as scratch:
        plain = pathlib.Path(scratch) / "plain.ll"
        done = _run([*command, "-Xclang", "-disable-llvm-passes", "-S", "-emit-llvm", "-o", plain])
        if done.returncode:
            refused = [line for line in done.stderr.splitlines() if " error: " in line]
            return refused or ["clang gave no reason"], None
        module = Module(plain.read_text())
        small = pathlib.Path(scratch) / "small.s"
        _run([clang(), "-O1", "-S", "-fstack-usage", plain, "-o", small], check=True)
        stack = deepest(small.read_text(), small.with_suffix(".su").read_text(), module.kernels)
    found = module.findings()
    for kernel, used in stack.items():
        if used > STACK:
            found.append(f"{kernel}: {used} bytes of stack, a core has {STACK}")
    return found, module


def of_ascend950(source: pathlib.Path, *flags: str) -> list[str]:
    """Return a sentence for each call that the headers do not declare for Ascend950.

    Bodies of the headers' functions are not checked: Ascend950's vector unit computes in registers,
    and clang does not know those instructions.
    """
    return [error for error in _errors_of_ascend950(source, *flags) if error not in _in_headers()]


@functools.cache
def _in_headers() -> frozenset[str]:
    """Return clang's errors in the headers themselves."""
    return frozenset(_errors_of_ascend950(None))


def _errors_of_ascend950(source: pathlib.Path | None, *flags: str) -> list[str]:
    """Return clang's errors in our files, and failed static assertions.

    The headers' templates are not instantiated: they use register instructions, which is no fault
    of the kernel.
    """
    architecture = ("-D__NPU_ARCH__=3510", "-D__DAV_C310__", "-D__DAV_C310_VEC__", "-D__DAV_VEC__",
                    "-D__CCE_AICORE__=310", "-DASCENDC_DUMP=0")  # fmt: skip
    begin = f'#include "ascend950.h"\n{_declarations()}#include "kernel_operator.h"\n'
    with tempfile.TemporaryDirectory() as scratch:
        whole = pathlib.Path(scratch) / "whole.cpp"
        whole.write_text(begin + (f'#include "{source}"\n' if source else ""))
        command = [*_compiler(architecture), *flags, "-fdelayed-template-parsing", "-fsyntax-only",
                   whole]  # fmt: skip
        said = _run(command).stderr
    vendor = str(headers.staged())
    errors = [line for line in said.splitlines() if " error: " in line]
    return [line for line in errors if vendor not in line or "static assertion" in line]


def _compiler(architecture=None) -> list:
    folders = (_HERE, headers.kernel_sources(), headers.twin_sources() / "include",
               *headers.include_dirs(headers.staged()))  # fmt: skip
    if architecture is None:
        architecture = [flag for flag in twins.ARCHITECTURE
                        if "CPU_DEBUG" not in flag and "CCE_KT_TEST" not in flag]  # fmt: skip
    return [clang(), *FLAGS, *architecture, *(f"-I{folder}" for folder in folders)]


def _run(command: list, check: bool = False) -> subprocess.CompletedProcess:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    if check and done.returncode:
        raise EmulatorError(f"clang does not compile AscendC's headers:\n{done.stderr[:4000]}")
    return done


@functools.cache
def _headers() -> pathlib.Path:
    """Return the headers as a precompiled header, which is built once."""
    state = (_declarations(), (_HERE / "device_side.h").read_text(), str(_compiler()),
             pathlib.Path(__file__).read_text(), _run([clang(), "--version"]).stdout)  # fmt: skip
    name = f"device-{hashlib.sha256(repr(state).encode()).hexdigest()[:16]}"
    kept, whole = headers.cache() / f"{name}.pch", headers.cache() / f"{name}.h"
    with build.locked():  # one process at a time, because clang compares file times
        if kept.exists():
            return kept
        with tempfile.TemporaryDirectory(dir=headers.cache()) as scratch:
            text, made = pathlib.Path(scratch) / "text.h", pathlib.Path(scratch) / "made.pch"
            text.write_text(_text_of_headers(pathlib.Path(scratch) / "start.h"))
            os.replace(text, whole)
            _run([*_compiler(), "-x", "c++-header", whole, "-o", made], check=True)
            os.replace(made, kept)
    return kept


def _text_of_headers(start: pathlib.Path) -> str:
    """Return the preprocessed headers, with char pointers moved to the default address space.

    The headers expect string literals in global memory, as in bisheng. clang puts string literals
    in the default address space.
    """
    begin = f'#include "device_side.h"\n{_declarations()}'
    start.write_text(f'{begin}#include "kernel_operator.h"\n#include "lib/matmul_intf.h"\n')
    done = _run([*_compiler(), "-E", "-dD", "-x", "c++", start], check=True)
    text = re.sub(r"\bNPU_OPS_GLOBAL const char\b", "const char", done.stdout)
    text = re.sub(r"\bconst NPU_OPS_GLOBAL char\b", "const char", text)
    text = re.sub(r"\bNPU_OPS_GLOBAL char\b", "char", text)
    text = re.sub(r"reinterpret_cast<NPU_OPS_GLOBAL const uint8_t\*>(?=\((?:dumphead|fmt)\))",
                  "(NPU_OPS_GLOBAL const uint8_t*)", text)  # fmt: skip
    return f"#define NPU_OPS_GLOBAL __attribute__((address_space(1)))\n{text}"


@functools.cache
def _declarations() -> str:
    """Return declarations of the instructions with operands of any type; headers check types."""
    names = headers._called(headers.staged() / "asc-devkit") | set(_SCALAR.split())
    numbers = {name for name in names if name.startswith("get_")} | set(_NUMBERS.split())
    lines = []
    for name in sorted(names | numbers):
        result = "int64_t" if name in numbers else "void"
        lines.append(f"template <class... A> __aicore__ {result} {name}(A...);\n")
    return "".join(lines)


# ---- LLVM assembly from clang ----


class Module:
    """LLVM assembly of a kernel: its functions, and what they call."""

    def __init__(self, text: str):
        self._bodies = {
            name.strip('"'): body
            for name, body in re.findall(r'^define .*?@("?[\w.$<>:, ]+"?)\(.*?\{\n(.*?)^\}', text,
                                         re.M | re.S)
        }  # fmt: skip
        self._heads = dict(
            (name.strip('"'), head)
            for head, name in re.findall(r'^define (.*?@("?[\w.$]+"?)\(.*)$', text, re.M)
        )
        self._constructors = "@llvm.global_ctors" in text
        annotated = re.search(r"@llvm.global.annotations = .*", text)
        pairs = re.findall(r"ptr @([\w.$]+), ptr (?:addrspace\(\d+\) )?@([\w.]+)",
                           annotated[0] if annotated else "")  # fmt: skip
        strings = dict(re.findall(r'^@([\w.]+) = .*c"(npu_ops_\w+)\\00"', text, re.M))
        self._marked = {name for name, mark in pairs if mark in strings}
        self.kernels = [name for name, mark in pairs if strings.get(mark) == "npu_ops_kernel"]
        self._names = _demangled(
            [*self._bodies, *re.findall(r"^declare .*?@([\w.$]+)", text, re.M)]
        )

    def findings(self) -> list[str]:
        found = ["a global constructor: a device runs none"] if self._constructors else []
        reached = self._reached()
        for name in reached:
            shown = self._names.get(name, name)
            body = self._bodies.get(name)
            if body is None:
                if not self._is_instruction(name):
                    found.append(f"{shown}: a function that is not there on a device")
                continue
            if re.search(r"\bdouble\b", self._heads.get(name, "") + body):
                found.append(f"{shown}: double")
            if self._is_for_host(name):
                found.append(f"{shown}: has no __aicore__, so it is for the host")
            if re.search(r"\baddrspacecast\b|\bbitcast ptr addrspace", body):
                found.append(f"{shown}: takes an address in one memory for one in another")
            if re.search(r"\b(?:call|invoke) [^@\n]*%[\w.]+\(", body):
                found.append(f"{shown}: calls what is not known before")
        found += [
            f"{self._names.get(name, name)}: calls itself" for name in self._recursive(reached)
        ]
        return found

    def functions(self) -> list[str]:
        """Return the C++ names of the kernels and all functions that they call, directly or not."""
        return [self._names.get(name, name) for name in self._reached()]

    def _calls(self, name: str) -> list[str]:
        return re.findall(r"@([\w.$]+)", self._bodies.get(name, ""))

    def _reached(self) -> list[str]:
        """Return the kernels and all functions that they call, directly or not."""
        known = set(self._bodies) | set(self._names)
        reached = list(self.kernels)
        for name in reached:
            reached += [
                n for n in dict.fromkeys(self._calls(name)) if n in known and n not in reached
            ]
        return [name for name in reached if not name.startswith("llvm.")]

    def _recursive(self, reached: list[str]) -> list[str]:
        def comes_back(name: str) -> bool:
            seen, todo = set(), self._calls(name)
            while todo:
                called = todo.pop()
                if called == name:
                    return True
                if called not in seen:
                    seen.add(called)
                    todo += self._calls(called)
            return False

        return [name for name in reached if name in self._bodies and comes_back(name)]

    def _is_instruction(self, name: str) -> bool:
        shown = self._names.get(name, name)
        plain = re.match(r"(?:[\w ]+ )?(\w+)(?:<|\()", shown)
        declared = re.findall(r" (\w+)\(A\.\.\.\)", _declarations()) + ["conv_f322f16o"]
        return bool(plain) and plain[1] in declared

    def _is_for_host(self, name: str) -> bool:
        """Return whether a written function lacks `__aicore__`.

        Functions that the compiler generates and lambdas count as the caller's.
        """
        if name in self._marked or name in self.kernels:
            return False
        shown = self._names.get(name, name)
        if re.search(r"AscendC::", shown.split("(")[0]) and "npu_ops" not in shown.split("(")[0]:
            return False  # the vendor's headers are for devices
        is_lambda = "{lambda" in shown or "$_" in name or "EUl" in name
        return not is_lambda and not self._is_implicit(name, shown)

    def _is_implicit(self, name: str, shown: str) -> bool:
        """Return whether a function may be an implicit constructor, assignment or destructor."""
        last = re.sub(r"<.*>", "", shown.split("(")[0]).split("::")
        special = len(last) > 1 and last[-1].lstrip("~") == last[-2]
        return special or last[-1] == "operator="


def _demangled(names: list[str]) -> dict[str, str]:
    done = subprocess.run(["c++filt"], input="\n".join(names), capture_output=True, text=True)
    return dict(zip(names, done.stdout.splitlines(), strict=True))


def deepest(assembly: str, usage: str, kernels: list[str]) -> dict[str, int]:
    """Return each kernel's stack in bytes, including the functions that it calls.

    usage: the output of -fstack-usage.
    """
    own = {line.split("\t")[0].rsplit(":", 1)[-1]: int(line.split("\t")[1])
           for line in usage.splitlines()}  # fmt: skip
    calls = collections.defaultdict(set)
    name = ""
    for line in assembly.splitlines():
        if re.match(r"[A-Za-z_]\w*:", line):
            name = line.split(":")[0]
        called = re.search(r"\t(?:callq|jmp)\t([A-Za-z_]\w*)", line)
        if called:
            calls[name].add(called[1])

    @functools.cache
    def depth(function: str) -> int:
        return own.get(function, 0) + max(
            (depth(f) for f in calls[function] - {function}), default=0
        )

    return {kernel: depth(kernel) for kernel in kernels}
