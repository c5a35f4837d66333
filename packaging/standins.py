"""Stand-ins for CUDA's libraries: a CUDA build of torch loads without CUDA, next to torch_npu.

Nearly all functions of a stand-in only return cudaErrorNoDevice. The reasons for stand-ins:
- Only torch 2.13 has a CPU build in every registry.
- CUDA's libraries are several GB, and a machine without a GPU needs none of them.
"""

import collections
import pathlib
import re
import subprocess

_CUDA = re.compile(r"lib(cu|nv|nccl)")
_NO_DEVICE = 100  # cudaErrorNoDevice

# The set of names of settings that device allocators have registered; see `one_allocator`.
_KEYS = """
#include <string>
#include <unordered_set>
namespace c10::CachingAllocator {
struct AcceleratorAllocatorConfig {
  static std::unordered_set<std::string>& getMutableKeys();
};
std::unordered_set<std::string>& AcceleratorAllocatorConfig::getMutableKeys() {
  return *new std::unordered_set<std::string>;
}
}  // namespace c10::CachingAllocator
"""


def one_allocator(folder: pathlib.Path) -> pathlib.Path:
    """Build a library to preload that lets each allocator register its settings as if it were
    alone.

    From torch 2.14 on, the allocators of CUDA and torch_npu register equal names, and torch aborts.
    torch_npu is made for builds without CUDA, in which there is only one device allocator.

    Returns:
        The library's path.
    """
    folder.mkdir(parents=True, exist_ok=True)
    source, library = folder / "one_allocator.cpp", folder / "libone_allocator.so"
    source.write_text(_KEYS)
    subprocess.run(["g++", "-shared", "-fPIC", source, "-o", library], check=True)
    return library


def make(libraries: pathlib.Path, folder: pathlib.Path) -> None:
    """Write to `folder` the CUDA libraries that torch's `libraries` need and do not include."""
    shipped = {path.name for path in libraries.iterdir()}
    needed, wanted, owner = set(), collections.defaultdict(set), {}
    for path in libraries.glob("*.so*"):
        headers = _output("objdump", "-p", path)
        needed |= set(re.findall(r"NEEDED\s+(\S+)", headers))
        for library, versions in re.findall(r"required from (\S+):\n((?:\s+0x.*\n)+)", headers):
            owner |= dict.fromkeys(re.findall(r"(\S+)$", versions, re.MULTILINE), library)
        for symbol in re.findall(r" U (\S+)", _output("nm", "-D", path)):
            name, _, version = symbol.partition("@")
            wanted[version.lstrip("@")].add(name)
    missing = sorted(name for name in needed - shipped if _CUDA.match(name))
    if not missing:
        return
    folder.mkdir(parents=True, exist_ok=True)
    plain = {name for name in wanted[""] if re.match(r"cu|nv|Nv|nccl|__cuda", name)}
    for library in missing:
        versions = {v: wanted[v] for v, of in owner.items() if of == library}
        _library(folder, library, versions, plain if library == missing[0] else set())


def _library(folder, library, versions, plain) -> None:
    """Build a library with the given functions by version; functions in `plain` have no version."""
    functions = sorted(plain.union(*versions.values()))
    source = folder / f"{library}.c"
    source.write_text("".join(
        f"long {name}(void) {{ return {0 if name.startswith('_') else _NO_DEVICE}; }}\n"
        for name in functions
    ))  # fmt: skip
    script = folder / f"{library}.map"
    script.write_text("".join(
        f"{version} {{ global: {' '.join(f'{name};' for name in sorted(names))} }};\n"
        for version, names in versions.items()
    ))  # fmt: skip
    by_version = [f"-Wl,--version-script={script}"] if versions else []
    subprocess.run(
        ["gcc", "-shared", "-fPIC", "-w", source, f"-Wl,-soname,{library}", *by_version, "-o",
         folder / library],
        check=True,
    )  # fmt: skip


def _output(*command) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
