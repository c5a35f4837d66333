"""Finds the vendor's AscendC headers, checks their digests, and copies them to the cache.

They are needed to compile AscendC kernels for the CPU; a compiled kernel is called a twin. Their
licence (CANN Open Software License 2.0) keeps them out of this package, so the user provides a
folder. The staged copy in the cache differs from the vendor's in one file: LocalTensor and
GlobalTensor report their scalar accesses to the twin.
"""

from __future__ import annotations

import hashlib
import inspect
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile

from npu_ops_emulator import build, wheels
from npu_ops_emulator.errors import EmulatorError

VARIABLE = "NPU_OPS_ASCENDC_HEADERS"


class Pin:
    """A repository of the vendor: its commit, the parts in use, and their digest."""

    def __init__(self, commit: str, parts: tuple[str, ...], digest: str):
        self.commit, self.parts, self.digest = commit, parts, digest


# The two repositories contain different copies of some headers, so both are pinned.
PINS = {
    "asc-devkit": Pin("82b89a15f", ("include", "impl"), "6b34ef0243f0659ee2adfd6ada8b0ca1"),
    "asc-tools": Pin("2113e48", ("cpudebug",), "41d7c30985489369fc195ad547eef844"),
}


def cache() -> pathlib.Path:
    """Return the folder of headers and twins; neither depends on torch."""
    return wheels.cache().parent / "ascendc"


def why_not() -> str | None:
    """Return None, or why AscendC kernels cannot run here."""
    if source() is None:
        wanted = " and ".join(f"{name} at {pin.commit}" for name, pin in PINS.items())
        return (
            f"there are no AscendC headers: set {VARIABLE} to a folder with {wanted} (checkouts or "
            "tar.xz archives), or keep them by `npu-ops emulate --headers FOLDER`"
        )
    try:
        build.compiler()
    except EmulatorError as error:
        return str(error)
    return None


def keep(folder: str) -> pathlib.Path:
    """Copy the headers in `folder` to the cache, where they are found from then on.

    Raises:
        EmulatorError: the headers are missing or not the pinned ones.
    """
    with tempfile.TemporaryDirectory(dir=_made(cache())) as scratch:
        _unpack(pathlib.Path(folder), pathlib.Path(scratch))
        kept = _made(cache()) / "headers"
        shutil.rmtree(kept, ignore_errors=True)
        shutil.copytree(scratch, kept)
    return kept


def staged() -> pathlib.Path:
    """Return the folder of the staged headers; create it on first use.

    Raises:
        EmulatorError: the headers are missing or not the pinned ones.
    """
    found = source()
    if found is None:
        raise EmulatorError(why_not())
    target = cache() / f"staged-{_digest_of_staging()}"
    if target.exists():
        return target
    with tempfile.TemporaryDirectory(dir=_made(cache())) as scratch:
        folder = pathlib.Path(scratch) / "staged"
        folder.mkdir()
        _unpack(found, folder)
        _tell_of_scalars(folder)
        _generate(folder)
        try:
            folder.rename(target)
        except OSError:  # another process was faster
            if not target.exists():
                raise
    return target


def include_dirs(folder: pathlib.Path) -> list[pathlib.Path]:
    """Return the include folders for AscendC's headers."""
    devkit = folder / "asc-devkit"
    parts = ("", "include", "include/basic_api", "include/utils", "include/adv_api", "impl")
    inner = ("impl/basic_api", "impl/adv_api")
    return [
        folder / "generated",
        folder / "asc-tools" / "cpudebug" / "include",
        *(devkit / part for part in (*parts, *inner)),
    ]


def source() -> pathlib.Path | None:
    """Return the folder that contains the headers, or None."""
    named = os.environ.get(VARIABLE)
    for folder in (pathlib.Path(named) if named else None, cache() / "headers"):
        if folder and all(_found(folder, name) for name in PINS):
            return folder
    return None


def _found(folder: pathlib.Path, name: str) -> pathlib.Path | None:
    """Return a repository's checkout in a folder, or its archive."""
    if (folder / name / PINS[name].parts[0]).is_dir():
        return folder / name
    return next(iter(sorted(folder.glob(f"{name}-*.tar.xz"))), None)


def _unpack(source: pathlib.Path, target: pathlib.Path) -> None:
    for name, pin in PINS.items():
        found = _found(source, name)
        if found is None:
            raise EmulatorError(f"headers: {source} has no folder or archive {name}")
        if found.is_dir():
            for part in pin.parts:
                shutil.copytree(found / part, target / name / part)
        else:
            with tarfile.open(found) as archive:
                archive.extractall(target, filter="data")
        digest = _tree_digest(target / name, pin.parts)
        if digest != pin.digest:
            raise EmulatorError(
                f"headers: {found} is not {name} at commit {pin.commit}, which the twin was "
                f"written for (the digest of its files is {digest}, needs {pin.digest})"
            )


def _tree_digest(folder: pathlib.Path, parts: tuple[str, ...]) -> str:
    state = hashlib.sha256()
    for part in parts:
        for path in sorted((folder / part).rglob("*")):
            if path.is_file():
                state.update(f"{path.relative_to(folder)}\n".encode())
                state.update(hashlib.sha256(path.read_bytes()).digest())
    return state.hexdigest()[:32]


def _digest_of_staging() -> str:
    """Return a hash of the pins and of the staging code."""
    code = map(inspect.getsource, (_tell_of_scalars, _generate))
    state = "".join([*(pin.digest for pin in PINS.values()), *code])
    return hashlib.sha256(state.encode()).hexdigest()[:16]


def kernel_sources() -> pathlib.Path:
    """Return csrc of an installed package (only files for AscendC kernels) or of a checkout."""
    here = pathlib.Path(__file__).resolve().parent
    for folder in (here / "_csrc", here.parents[1] / "csrc"):
        if (folder / "twin").is_dir():
            return folder
    raise EmulatorError(f"the twin's sources (csrc/twin) are not installed next to {here}")


def twin_sources() -> pathlib.Path:
    """Return csrc/twin."""
    return kernel_sources() / "twin"


def _tell_of_scalars(folder: pathlib.Path) -> None:
    """Make GetValue, SetValue and operator() of tensors report their accesses to the twin."""
    path = folder / "asc-devkit" / "impl" / "basic_api" / "kernel_tensor_impl.h"
    text = path.read_text()
    told = "::npu_ops::twin::scalar(::npu_ops::twin::Access::{}, {}, sizeof(PrimType)); "

    def announce(pattern: str, access: str, address: str, count: int) -> None:
        nonlocal text
        text, found = re.subn(pattern, lambda m: told.format(access, m.expand(address)) + m[0],
                              text, count=count)  # fmt: skip
        if not found:
            raise EmulatorError(f"headers: {path.name} has no scalar access of the form {pattern}")

    # Only the first match: the second is operator(), whose reference may also be written.
    announce(r"return \*\((GetPhyAddr\(offset\))\);", "kRead", r"\1", 1)
    announce(r"(?<=[ ;{])\*\((GetPhyAddr\(index\))\) = ", "kWrite", r"\1", 0)
    announce(r"return this->(\w+)\[offset\];", "kRead", r"this->\1 + offset", 0)
    announce(r"(?<=[ ;{])this->(\w+)\[offset\] = ", "kWrite", r"this->\1 + offset", 0)
    path.write_text(text)


def _generate(folder: pathlib.Path) -> None:
    """Run the vendor's scripts that generate headers."""
    devkit, generated = folder / "asc-devkit", folder / "generated"
    (generated / "kernel_tiling").mkdir(parents=True)
    script = devkit / "impl/adv_api/cmake/scripts/gen_kernel_tiling_data_def.py"
    subprocess.run(
        [sys.executable, script, devkit / "include/adv_api",
         generated / "kernel_tiling/kernel_tiling.h"],
        check=True, capture_output=True,
    )  # fmt: skip


def missing_instructions(folder: pathlib.Path) -> str:
    """Return C++ that stops a kernel at instructions which the headers call and the twin lacks."""
    missing = sorted(_called(folder / "asc-devkit") - _defined())
    stop = "template <class... T>\nnpu_ops::twin::Nothing {0}(T...) {{ "
    stop += 'npu_ops::twin::not_emulated("{0}"); }}\n'
    return "#pragma once\n" + "".join(map(stop.format, missing))


# Matches calls of instructions, and of some other functions, all of which the headers define.
_INSTRUCTION = re.compile(
    r"(?<![\w:.>])((?:v|mad|set_|get_|copy_|load_|load3d|img2col|create_|scatter_|broadcast_|ffts_|"
    r"fix_matrix|dma_|winograd|depthwise|rpn_|__ib_)[a-z0-9_]+|wait_flag_dev|hset_flag|hwait_flag|"
    r"st_dev|ld_dev|st_atomic|pload|movev|__sync_all_stub|trap|clear_overflow_status)\s*\("
)
_WORDS = {"value", "void", "volatile"}


def _called(devkit: pathlib.Path) -> set[str]:
    """Return the names of instructions that the headers for this architecture call."""
    basic = devkit / "impl" / "basic_api"
    files = [*basic.glob("dav_c220/**/*.h"), *basic.glob("*.h"), *basic.glob("utils/*.h"),
             *devkit.glob("impl/adv_api/**/*.h")]  # fmt: skip
    names: set[str] = set()
    for path in files:
        names.update(_INSTRUCTION.findall(re.sub(r"//.*", "", path.read_text(errors="ignore"))))
    return names - _WORDS


def _defined() -> set[str]:
    """Return the names that the twin's instructions define, after preprocessing."""
    sources = twin_sources()
    headers = ("arithmetic", "control", "conversion", "moves", "rearrangement", "reductions",
               "selection")  # fmt: skip
    text = "".join(f'#include "{name}.h"\n' for name in headers)
    with tempfile.TemporaryDirectory() as scratch:
        pathlib.Path(scratch, "stub_def.h").touch()  # the vendor's types are not needed here
        done = subprocess.run(
            [*build.compiler(), "-E", "-P", "-std=c++17", f"-I{scratch}", f"-I{sources}",
             "-x", "c++", "-"],
            input=text, capture_output=True, text=True,
        )  # fmt: skip
    if done.returncode:
        raise EmulatorError(f"the twin's headers do not preprocess:\n{done.stderr[-2000:]}")
    return set(re.findall(r"\b([A-Za-z_]\w+)\s*\(", done.stdout))


def _made(folder: pathlib.Path) -> pathlib.Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder
