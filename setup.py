"""Build the native library from csrc/*/*.cpp; everything else is in pyproject.toml.

From torch 2.10 on the library uses torch's stable ABI: npu_ops/_native.abi3.so serves every torch
from TORCH_TARGET on. For torch 2.7 to 2.9 the same sources are built with that torch's C++ API:
npu_ops/_native_torch2_9.abi3.so. Neither has a PyInit, so one file serves every Python.

NPU_OPS_SKIP_NATIVE=1 installs without the libraries. NPU_OPS_OLDER_TORCH lists folders of unpacked
torch wheels, separated by colons. Libraries for these are built too, so that one wheel serves all.

Where CANN is installed (ASCEND_HOME_PATH), csrc/CMakeLists.txt compiles the AscendC kernels too:
they are shipped as npu_ops/_ascendc/<family>/<op>.o. NPU_OPS_SKIP_ASCENDC=1 installs without them.
"""

import ast
import fcntl
import glob
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

import setuptools
from setuptools.command.build_py import build_py

if int(setuptools.__version__.split(".")[0]) < 77:  # older versions cannot read pyproject.toml
    raise SystemExit(
        f"npu-ops: got setuptools {setuptools.__version__} to build with, needs 77 or newer: "
        "pip install 'setuptools>=77' ninja"
    )
STABLE_FROM = (2, 10)
OLDEST = (2, 7)
TORCH_TARGET = "0x020a000000000000"  # 2.10
WITHOUT = (
    "or set NPU_OPS_SKIP_NATIVE=1 to install without native kernels: every operator then runs "
    "through its PyTorch reference, or through Triton on an NPU."
)


def release(torch):
    """Return the release of a version: (2, 9) for "2.9.0a0+git1234"."""
    return tuple(int(number) for number in torch.split(".")[:2])


def find_compiler():
    """Check that the C++ compiler knows C++20; return the name and version that it prints."""
    compiler = os.environ.get("CXX", "g++").split()
    if shutil.which(compiler[0]) is None:
        raise SystemExit(
            f"npu-ops: the C++ compiler {compiler[0]!r} was not found. Install g++ (or set CXX), "
            + WITHOUT
        )
    asked = [*compiler, "-std=c++20", "-x", "c++", "-fsyntax-only", "-"]
    tried = subprocess.run(asked, input="#include <concepts>", capture_output=True, text=True)
    version = subprocess.run([*compiler, "--version"], capture_output=True, text=True).stdout
    version = version.partition("\n")[0]
    if tried.returncode:
        raise SystemExit(
            f"npu-ops: {version} does not know C++20. Install g++ 10 or newer (or set CXX), "
            + WITHOUT
        )
    return version


def write_build_info(**info):
    path = pathlib.Path(__file__).parent / "npu_ops" / "_build_info.json"
    path.write_text(json.dumps(info) + "\n")


def library(torch, **options):
    """Return the native library's extension for a release of torch."""
    from torch.utils.cpp_extension import CppExtension

    here, stable = os.getcwd(), torch >= STABLE_FROM
    return CppExtension(
        "npu_ops._native" if stable else "npu_ops._native_torch{}_{}".format(*torch),
        sorted([*glob.glob("csrc/*/*_cpu.cpp"), *glob.glob("csrc/*/*_npu.cpp")]),
        py_limited_api=True,
        define_macros=[("TORCH_TARGET_VERSION", TORCH_TARGET)] if stable else [],
        extra_compile_args=[
            "-O3",
            # Nothing here uses floating-point traps. If the compiler had to allow for them, a
            # condition in a loop would prevent vectorisation, except with masks as in AVX-512.
            "-fno-trapping-math",
            "-std=c++20",
            "-g0",
            "-fvisibility=hidden",
            f"-fmacro-prefix-map={here}/=",
        ],
        extra_link_args=["-s", "-ldl"],
        depends=sorted(glob.glob("csrc/*/*.h")),
        **options,
    )


def older_library(folder):
    """Return the extension of the library for the torch in a folder, an unpacked wheel."""
    version = (pathlib.Path(folder) / "torch" / "version.py").read_text()
    torch = release(re.search(r"__version__ = '([^']+)'", version)[1])
    made = library(torch)
    headers = f"{folder}/torch/include"
    # These replace the headers of the torch that runs the build.
    made.include_dirs = [os.path.abspath("csrc"), headers, f"{headers}/torch/csrc/api/include"]
    made.library_dirs = [f"{folder}/torch/lib"]
    return made


def native_extensions():
    try:
        import torch
    except ImportError as error:
        raise SystemExit(
            f"npu-ops: torch was not found ({error}). Install the torch you want first, and run "
            f"pip with --no-build-isolation, {WITHOUT}"
        ) from None
    from torch.utils.cpp_extension import BuildExtension

    if release(torch.__version__) < OLDEST:
        raise SystemExit(
            f"npu-ops: needs torch 2.7 or newer, this is {torch.__version__}. Install a newer one, "
            + WITHOUT
        )

    class BuildNative(BuildExtension):
        """Build the libraries and keep their objects, so that ninja compiles only changes again."""

        def finalize_options(self):
            super().finalize_options()
            # Without this, pip gives each build a new folder. setuptools reads the variable when it
            # builds for another machine.
            platform = os.environ.get("_PYTHON_HOST_PLATFORM", "native")
            self.build_temp = f"build/{platform}/torch-{torch.__version__}"

        def run(self):
            """Run one build at a time: make and pip may start builds in parallel."""
            pathlib.Path("build").mkdir(exist_ok=True)
            with open("build/lock", "w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                try:
                    super().run()
                except Exception as error:
                    raise SystemExit(
                        f"npu-ops: the native kernels were not built with {compiler} for torch "
                        f"{torch.__version__}: {error}. The compiler's first error is above. Mend "
                        f"it, {WITHOUT}"
                    ) from None

        def build_extension(self, extension):
            """Compile the objects for each torch in a folder of their own."""
            before = self.build_temp
            self.build_temp = f"{before}/{extension.name}"
            super().build_extension(extension)
            self.build_temp = before

    compiler = find_compiler()
    cann = os.path.realpath(os.environ["ASCEND_HOME_PATH"]) if kernels_wanted() else None
    write_build_info(torch=torch.__version__, compiler=compiler, cann=cann)
    older = filter(None, os.environ.get("NPU_OPS_OLDER_TORCH", "").split(":"))
    return {
        "ext_modules": [
            library(release(torch.__version__), include_dirs=[os.path.abspath("csrc")]),
            *map(older_library, older),
        ],
        "cmdclass": {"build_ext": BuildNative, "build_py": BuildPython},
        "options": {"bdist_wheel": {"py_limited_api": "cp310"}},
    }


class BuildPython(build_py):
    """Also write the stub of the package, and compile the AscendC kernels if CANN is there."""

    def run(self):
        super().run()
        package = pathlib.Path("." if self.editable_mode else self.build_lib, "npu_ops")
        (package / "__init__.pyi").write_text(stub(pathlib.Path("npu_ops")))
        folder = (package / "_ascendc").absolute()
        shutil.rmtree(folder, ignore_errors=True)  # kernels of another CANN
        if kernels_wanted():
            compile_kernels(folder)


def stub(package):
    """Return the text of `npu_ops/__init__.pyi`, which lists the public names.

    `npu_ops/__init__.py` finds the operators in a loop, which type checkers do not run.
    """
    source = (package / "__init__.py").read_text()
    lines = re.findall(r"^from npu_ops\..*", source, re.MULTILINE)
    names = exported(source)
    for op in sorted(package.glob("ops/*/__init__.py")):
        of_op = exported(op.read_text())
        lines.append(f"from npu_ops.ops.{op.parent.name} import {', '.join(of_op)}")
        names += of_op
    return "\n".join([*lines, f"__all__ = {names}", ""])


def exported(source):
    """Return the literal `__all__` of a module's source."""
    return ast.literal_eval(re.search(r"^__all__ = (\[.*?\])", source, re.M | re.S)[1])


def kernels_wanted():
    if not os.environ.get("ASCEND_HOME_PATH"):
        return False
    for skip in ("NPU_OPS_SKIP_ASCENDC", "NPU_OPS_SKIP_NATIVE"):
        if os.environ.get(skip) == "1":
            print(f"npu-ops: {skip}=1: WITHOUT AscendC kernels, for this CANN", file=sys.stderr)
            return False
    return True


def compile_kernels(folder):
    """Compile the kernels into `folder`; a kernel that does not compile ends the installation."""
    build = "build/ascendc"
    shutil.rmtree(build, ignore_errors=True)  # CMake would keep the compiler that it found first
    try:
        for step in (
            ["-S", "csrc", "-B", build, f"-DCMAKE_INSTALL_PREFIX={folder}"],
            ["--build", build, "--parallel", str(os.cpu_count())],
            ["--install", build],
        ):
            subprocess.run(["cmake", *step], check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise SystemExit(
            f"npu-ops: the AscendC kernels were not built with {os.environ['ASCEND_HOME_PATH']} "
            f"({error}). Set NPU_OPS_SKIP_ASCENDC=1 to install without them: on NPUs the Triton "
            "kernels then run."
        ) from None


def native_settings():
    if os.environ.get("NPU_OPS_SKIP_NATIVE") == "1":
        write_build_info(torch=None, compiler=None)
        return {"cmdclass": {"build_py": BuildPython}}
    return native_extensions()


# The sources that the emulated NPU compiles on first use: its own, and twins of AscendC kernels.
EMULATOR_SOURCES = "npu_ops_emulator._sources"
KERNEL_SOURCES = "npu_ops_emulator._csrc"

setuptools.setup(
    package_dir={
        "": "python",
        "npu_ops": "npu_ops",
        EMULATOR_SOURCES: "csrc/emulator",
        KERNEL_SOURCES: "csrc",
    },  # fmt: skip
    packages=[
        *setuptools.find_packages(include=["npu_ops*"]),
        *setuptools.find_packages("python"),
        EMULATOR_SOURCES,
        KERNEL_SOURCES,
    ],
    py_modules=["npu_ops_autoload", "npu_ops_import_hook"],
    package_data={
        "npu_ops": ["_build_info.json", "preferences/*.json", "py.typed"],
        "npu_ops_adapters": ["py.typed"],
        "npu_ops_tools": [
            "*.csv",
            "templates/**/*",
            "model/*.csv",
            "model/*.txt",
            "model/validation/*.csv",
            "model/validation/*.xz",
        ],
        "npu_ops_emulator": ["startup/*", "torch_npu.txt"],
        EMULATOR_SOURCES: ["*"],
        KERNEL_SOURCES: [
            "twin/*",
            "twin/include/**/*",
            "common/*.h",
            "*/*_ascendc.cpp",
            "*/*_ascendc.h",
            "*/*_tiling.h",
        ],
    },
    **native_settings(),
)
