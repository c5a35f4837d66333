"""Builds the native library from csrc/*/*.cpp; everything else is in pyproject.toml.

The library uses torch's stable ABI and has no PyInit, so one abi3 wheel serves every Python and
every torch from TORCH_TARGET on. NPU_OPS_SKIP_NATIVE=1 installs without it.
"""

import glob
import json
import os
import pathlib
import shutil
import subprocess

import setuptools

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
            self.build_temp = "build/native"  # else pip gives each build a new folder

    here, compiler = os.getcwd(), find_compiler()
    version = subprocess.run([*compiler.split(), "--version"], capture_output=True, text=True)
    write_build_info(
        torch=torch.__version__, torch_target="2.10", compiler=version.stdout.partition("\n")[0]
    )
    extension = CppExtension(
        "npu_ops._native",
        sorted([*glob.glob("csrc/*/*_cpu.cpp"), *glob.glob("csrc/*/*_npu.cpp")]),
        include_dirs=[os.path.abspath("csrc")],
        depends=sorted(glob.glob("csrc/*/*.h")),
        py_limited_api=True,
        define_macros=[("Py_LIMITED_API", PYTHON_TARGET), ("TORCH_TARGET_VERSION", TORCH_TARGET)],
        extra_compile_args=[
            "-O3",
            "-std=c++20",
            "-g0",
            "-fvisibility=hidden",
            f"-fmacro-prefix-map={here}/=",
        ],
        extra_link_args=["-s", "-ldl"],
    )
    return {
        "ext_modules": [extension],
        "cmdclass": {"build_ext": BuildNative},
        "options": {"bdist_wheel": {"py_limited_api": "cp310"}},
    }


def native_settings():
    if os.environ.get("NPU_OPS_SKIP_NATIVE") == "1":
        write_build_info(torch=None, torch_target=None, compiler=None)
        return {}
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
    py_modules=["npu_ops_autoload"],
    package_data={
        "npu_ops": ["_build_info.json"],
        "npu_ops_tools": [
            "templates/*",
            "model/*.csv",
            "model/*.txt",
            "model/validation/*.csv",
            "model/validation/*.xz",
        ],
        "npu_ops_emulator": ["startup/*"],
        EMULATOR_SOURCES: ["*"],
        KERNEL_SOURCES: [
            "twin/*",
            "twin/include/**/*",
            "common/*.h",
            "*/*_ascendc.cpp",
            "*/*_tiling.h",
        ],
    },
    **native_settings(),
)
