"""Builds the native library from csrc/*/*.cpp; everything else is in pyproject.toml.

The library uses torch's stable ABI and has no PyInit, so one abi3 wheel serves every Python and
every torch from TORCH_TARGET on. NPU_OPS_SKIP_NATIVE=1 installs without it.

Where CANN is installed (ASCEND_HOME_PATH), csrc/CMakeLists.txt compiles the AscendC kernels too:
they are shipped as npu_ops/_ascendc/<family>/<op>.o. NPU_OPS_SKIP_ASCENDC=1 installs without them.
"""

import fcntl
import glob
import json
import os
import pathlib
import shutil
import subprocess
import sys

import setuptools
from setuptools.command.build_py import build_py

TORCH_TARGET = "0x020a000000000000"  # 2.10
PYTHON_TARGET = "0x030a0000"  # 3.10


def find_compiler():
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler.split()[0]) is None:
        raise SystemExit(
            f"npu-ops: the C++ compiler {compiler!r} was not found; the native CPU kernels need "
            "one. Install g++ (or set CXX), or set NPU_OPS_SKIP_NATIVE=1 to install without native "
            "kernels: every operator then runs through its PyTorch reference."
        )
    return compiler


def write_build_info(**info):
    path = pathlib.Path(__file__).parent / "npu_ops" / "_build_info.json"
    path.write_text(json.dumps(info) + "\n")


def native_extension():
    import torch
    from torch.utils.cpp_extension import BuildExtension, CppExtension

    class BuildNative(BuildExtension):
        """Keeps the objects, so that ninja compiles again only what has changed."""

        def finalize_options(self):
            super().finalize_options()
            # Else pip gives each build a new folder. The variable: another machine is built for.
            self.build_temp = f"build/{os.environ.get('_PYTHON_HOST_PLATFORM', 'native')}"

        def run(self):
            """One at a time: make begins to build while pip downloads what it will build for."""
            pathlib.Path("build").mkdir(exist_ok=True)
            with open("build/lock", "w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                super().run()

    here, compiler = os.getcwd(), find_compiler()
    version = subprocess.run([*compiler.split(), "--version"], capture_output=True, text=True)
    write_build_info(
        torch=torch.__version__, torch_target="2.10", compiler=version.stdout.partition("\n")[0]
    )
    kernels = CppExtension(
        "npu_ops._native",
        sorted([*glob.glob("csrc/*/*_cpu.cpp"), *glob.glob("csrc/*/*_npu.cpp")]),
        py_limited_api=True,
        define_macros=[("Py_LIMITED_API", PYTHON_TARGET), ("TORCH_TARGET_VERSION", TORCH_TARGET)],
        extra_compile_args=[
            "-O3",
            # No one asks for floating-point traps; if they could come, a condition in a loop would
            # keep it from being vectorised, but where there are masks, as in AVX-512.
            "-fno-trapping-math",
            "-std=c++20",
            "-g0",
            "-fvisibility=hidden",
            f"-fmacro-prefix-map={here}/=",
        ],
        extra_link_args=["-s", "-ldl"],
        include_dirs=[os.path.abspath("csrc")],
        depends=sorted(glob.glob("csrc/*/*.h")),
    )
    return {
        "ext_modules": [kernels],
        "cmdclass": {"build_ext": BuildNative, "build_py": BuildWithKernels},
        "options": {"bdist_wheel": {"py_limited_api": "cp310"}},
    }


class BuildWithKernels(build_py):
    """Also compiles the AscendC kernels, where there is a compiler for them."""

    def run(self):
        super().run()
        root = "." if self.editable_mode else self.build_lib
        folder = pathlib.Path(root, "npu_ops", "_ascendc").absolute()
        shutil.rmtree(folder, ignore_errors=True)  # of another CANN
        if kernels_wanted():
            compile_kernels(folder)


def kernels_wanted():
    if not os.environ.get("ASCEND_HOME_PATH"):
        return False
    for skip in ("NPU_OPS_SKIP_ASCENDC", "NPU_OPS_SKIP_NATIVE"):
        if os.environ.get(skip) == "1":
            print(f"npu-ops: {skip}=1: WITHOUT AscendC kernels, for this CANN", file=sys.stderr)
            return False
    return True


def compile_kernels(folder):
    """Fill `folder`; a kernel that does not compile ends the installation."""
    build = "build/ascendc"
    shutil.rmtree(build, ignore_errors=True)  # CMake keeps the compiler that it found first
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
        write_build_info(torch=None, torch_target=None, compiler=None)
        return {"cmdclass": {"build_py": BuildWithKernels}}
    return native_extension()


# What the emulated NPU builds on first use: itself, and twins of AscendC kernels.
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
        "npu_ops": ["_build_info.json", "preferences/*.json"],
        "npu_ops_tools": [
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
