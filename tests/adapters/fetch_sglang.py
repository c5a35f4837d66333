"""Make .cache/sglang: SGLang and the packages it needs on a CPU, in a folder that precedes .venv's.

python tests/adapters/fetch_sglang.py

Packages for GPUs, such as sglang-kernel and flashinfer, are left out. torchvision's binary does not
load with a CPU build of torch; its Python code works after two operators are declared. SGLang runs
on a CPU and on the emulated NPU through platform plugins, which are registered only in this folder.
"""

from __future__ import annotations

import pathlib

import fetching

HERE = pathlib.Path(__file__).parent
FOLDER = fetching.CACHE / "sglang"
VERSION = "0.5.23"
READ = ("0.5.9", "0.5.10", "0.5.11", "0.5.12", "0.5.15", "0.5.18", "0.5.20")

DECLARED = """
with __import__("contextlib").suppress(RuntimeError):  # its binary is for CUDA
    _library = torch.library.Library("torchvision", "FRAGMENT")
    for _op in () if _has_ops() else ("nms", "qnms"):
        _library.define(f"{_op}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
"""
PLUGINS = {
    "sglang_cpu": "[sglang.srt.platforms]\nsglang_cpu = sglang_cpu:activate\n",
    "sglang_npu": "[sglang.srt.platforms]\nsglang_npu = sglang_npu:activate\n"
    "[sglang.srt.plugins]\nsglang_npu_hooks = sglang_npu:register\n",
}


def tree(version: str = VERSION) -> pathlib.Path:
    """Return the folder for PYTHONPATH. Raises FileNotFoundError if it was not made."""
    return fetching.tree(FOLDER / version, "tests/adapters/fetch_sglang.py")


def fetch(version: str = VERSION) -> None:
    """Download everything, unless the folder exists."""
    if (FOLDER / version).exists():
        return
    print("0.3 GB, a minute", flush=True)
    requirements = str(HERE / "sglang_cpu" / "requirements.txt")
    with fetching.whole(FOLDER / version) as partial:
        fetching.pip(
            "install", "--no-compile", "--target", str(partial), "--requirement", requirements
        )
        with open(partial / "torchvision" / "extension.py", "a") as extension:
            extension.write(DECLARED)


def register(folder: pathlib.Path) -> None:
    """Register our platforms as two distributions; their modules are beside this file."""
    for name, points in PLUGINS.items():
        plugin = folder / f"{name}-1.dist-info"
        plugin.mkdir(exist_ok=True)
        about = f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n"
        (plugin / "METADATA").write_text(about)
        (plugin / "entry_points.txt").write_text(points)


def wheel(version: str) -> pathlib.Path:
    """Return a release's wheel, whose sources tests read; to run it would need other packages."""
    (found,) = (FOLDER / "wheels").glob(f"sglang-{version}-*.whl")
    return found


def fetch_wheels() -> None:
    """Download the missing wheels."""
    folder = FOLDER / "wheels"
    wanted = [version for version in READ if not list(folder.glob(f"sglang-{version}-*.whl"))]
    for version in wanted:
        print(f"sglang {version}, to be read", flush=True)
        fetching.pip("download", "--dest", str(folder), f"sglang=={version}")


if __name__ == "__main__":
    fetch()
    register(tree())
    fetch_wheels()
