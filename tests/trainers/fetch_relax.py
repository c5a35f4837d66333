"""Makes .cache/trainers/relax-36a3e04: Relax as its users have it on NPUs, with npu-ops, on a CPU.

    git clone https://github.com/redai-infra/Relax
    git clone https://github.com/NVIDIA/Megatron-LM
    git clone https://gitcode.com/Ascend/MindSpeed
    git clone https://github.com/redai-infra/TransferQueue
    python tests/trainers/fetch_relax.py Relax Megatron-LM MindSpeed TransferQueue

`shipped` has the patches of Relax's docker/npu_patch, `npu_ops` those hunks that
docs/replacing-patches.md says stay. `truth` is without MindSpeed. Any fork of Relax with the commit
below does. The clones are only read.
"""

from __future__ import annotations

import pathlib
import sys

import fetch_slime

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "adapters"))

import fetching

FOLDER = fetching.CACHE / "trainers" / "relax-36a3e04"
COMMITS = {
    "relax": "36a3e04",
    "megatron": "core_v0.16.1",
    "mindspeed": "e4772499",
    "queue": "dcc78f0a021284412921217fde71fea7cb276ffc",
}
# For Ray Serve and logs, whose modules Relax's trainer imports.
PACKAGES = (
    "aiorwlock==1.5.1",
    "grpcio==1.85.1",
    "grpcio-reflection==1.85.1",
    "loguru==0.7.3",
    "watchfiles==1.3.0",
)
PATCHES = "docker/npu_patch"
# What stays of each patch beside npu-ops, where it is not all of it.
STAYS = {"mindspeed": ("--exclude=mindspeed/megatron_adaptor.py",)}
WHO = fetch_slime.WHO


def tree(who: str, project: str) -> pathlib.Path:
    """The folder to put on PYTHONPATH; FileNotFoundError if it was not made."""
    return fetching.tree(FOLDER / who / project, "tests/trainers/fetch_relax.py")


def packages() -> pathlib.Path:
    """What Relax needs beside slime's packages and verl's."""
    return fetching.tree(FOLDER / "packages", "tests/trainers/fetch_relax.py")


def fetch(*clones: str) -> None:
    """Make what is not there."""
    fetching.install(fetch_slime.FOLDER / "packages", *fetch_slime.PACKAGES)
    fetching.install(FOLDER / "packages", *PACKAGES)
    paths = dict(zip(COMMITS, map(pathlib.Path, clones), strict=True))
    for who in WHO:
        if not (FOLDER / who).exists():
            with fetching.whole(FOLDER / who) as partial:
                for project, clone in paths.items():
                    fetch_slime.unpack(clone, COMMITS[project], partial / project)
                fetch_slime.install_bridge(partial / "bridge")
                fetch_slime.for_newer_torch(partial / "mindspeed")
                patch(who, partial)


def patch(who: str, folder: pathlib.Path) -> None:
    """The truth has Relax's changes to Megatron-LM, of which none is an operator's, and no more."""
    apply(folder, "megatron")
    if who != "truth":
        apply(folder, "mindspeed", *(STAYS["mindspeed"] if who == "npu_ops" else ()))
        apply(folder, "bridge", "-p2")  # the wheel has no src/


def apply(folder: pathlib.Path, project: str, *which: str) -> None:
    name = fetch_slime.NAMES.get(project, project)
    changes = (folder / "relax" / PATCHES / f"{name}.patch").read_bytes()
    fetch_slime.apply(folder / project, changes, *which)


if __name__ == "__main__":
    fetch(*sys.argv[1:])
