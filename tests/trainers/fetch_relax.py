"""Makes .cache/trainers/relax-COMMIT: Relax with its NPU patches, without them, and for the CPU.

    git clone https://github.com/redai-infra/Relax
    git clone https://github.com/NVIDIA/Megatron-LM
    git clone https://gitcode.com/Ascend/MindSpeed
    git clone https://github.com/redai-infra/TransferQueue
    git clone https://gitcode.com/Ascend/MindSpeed-Bridge
    python tests/trainers/fetch_relax.py Relax Megatron-LM MindSpeed TransferQueue MindSpeed-Bridge

The folders:

- `shipped` has the patches of Relax's docker/npu_patch.
- `npu_ops`, for runs with npu-ops, has none.
- `truth`, for reference runs on the CPU, has the patch for Megatron-LM. Its runs do not import
  MindSpeed.

The clones are only read.

RELAX_COMMIT selects another commit of Relax than that of July 2026 on main, e.g. of a fork. Set it
for the tests too: they look in that commit's folder.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import sys
from collections.abc import Iterator

import fetch_slime

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "adapters"))

import fetching

COMMIT = os.environ.get("RELAX_COMMIT", "36a3e04")
FOLDER = fetching.CACHE / "trainers" / f"relax-{COMMIT}"
COMMITS = {
    "relax": COMMIT,
    "megatron": "core_v0.16.1",
    "mindspeed": "e4772499",
    "queue": "dcc78f0a021284412921217fde71fea7cb276ffc",
    "mindspeed_bridge": "3655c07cbcc9",
}
# Relax's trainer imports these for Ray Serve, logging, video and audio.
PACKAGES = (
    "aiorwlock==1.5.1",
    "cffi==2.1.1",
    "grpcio==1.85.1",
    "grpcio-reflection==1.85.1",
    "imageio==2.38.1",
    "loguru==0.7.3",
    "soundfile==0.14.0",
    "watchfiles==1.3.0",
)
PATCHES = "docker/npu_patch"
NAMES = fetch_slime.NAMES | {"mindspeed_bridge": "mindspeed-bridge"}
# MindSpeed-Bridge's own tools/install_auto.sh appends this to Megatron-Bridge's models.
REGISTER = "\nfrom mindspeed_bridge.models import *\n"
WHO = ("shipped", "npu_ops", "truth")
PATCHED = {
    "shipped": ("megatron", "mindspeed", "mindspeed_bridge", "bridge"),
    "truth": ("megatron",),
}


def tree(who: str, project: str) -> pathlib.Path:
    """Return the folder for PYTHONPATH. Raises FileNotFoundError if it was not made."""
    return fetching.tree(FOLDER / who / project, "tests/trainers/fetch_relax.py")


def packages() -> pathlib.Path:
    """Return the folder of the packages that Relax needs beyond slime's and verl's."""
    return fetching.tree(FOLDER / "packages", "tests/trainers/fetch_relax.py")


def fetch(*clones: str) -> None:
    """Install packages, and unpack and patch the clones' commits. Skip folders that exist."""
    fetching.install(fetch_slime.FOLDER / "packages", *fetch_slime.PACKAGES)
    fetching.install(FOLDER / "packages", *PACKAGES)
    paths = dict(zip(COMMITS, map(pathlib.Path, clones), strict=True))
    for who in WHO:
        for project, clone in paths.items():
            with missing(who, project) as folder:
                if folder:
                    fetch_slime.unpack(clone, COMMITS[project], folder)
                    patch(who, project, folder)
        with missing(who, "bridge") as folder:
            if folder:
                fetch_slime.install_bridge(folder)
                patch(who, "bridge", folder)


@contextlib.contextmanager
def missing(who: str, project: str) -> Iterator[pathlib.Path | None]:
    """Yield the folder of a project to fill, or None if it exists already."""
    folder = FOLDER / who / project
    if folder.exists():
        yield None
    else:
        with fetching.whole(folder) as partial:
            yield partial


def patch(who: str, project: str, folder: pathlib.Path) -> None:
    """Apply the patches of `who` to a project.

    `truth` needs the patch for Megatron-LM only to read its checkpoints.
    """
    if project == "mindspeed":
        fetch_slime.for_newer_torch(folder)
    if project in PATCHED.get(who, ()):
        # wheels have no src/
        apply(who, project, folder, *(("-p2",) if project == "bridge" else ()))
    if project == "bridge" and who != "truth":
        with open(folder / "megatron" / "bridge" / "models" / "__init__.py", "a") as models:
            models.write(REGISTER)


def apply(who: str, project: str, folder: pathlib.Path, *which: str) -> None:
    name = NAMES.get(project, project)
    changes = FOLDER / who / "relax" / PATCHES / f"{name}.patch"
    fetch_slime.apply(folder, changes.read_bytes(), *which)


if __name__ == "__main__":
    fetch(*sys.argv[1:])
