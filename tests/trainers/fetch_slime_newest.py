"""Makes .cache/trainers/slime-624b824: slime of August 2026 without any patch for NPUs.

    git clone https://github.com/THUDM/slime
    git clone https://github.com/NVIDIA/Megatron-LM
    git clone https://gitcode.com/Ascend/MindSpeed
    python tests/trainers/fetch_slime_newest.py slime Megatron-LM MindSpeed

Megatron-LM is the commit in slime's Dockerfile, with slime's changes for GPUs. MindSpeed is the
version for that Megatron-LM. The clones are only read.
"""

from __future__ import annotations

import pathlib
import sys

import fetch_slime

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "adapters"))

import fetching

FOLDER = fetching.CACHE / "trainers" / "slime-624b824"
COMMITS = {
    "slime": "624b824a8",
    "megatron": "1dcf0dafa884ad52ffb243625717a3471643e087",
    "mindspeed": "e4772499",
}
FOR_GPUS = "624b824a8:docker/patch/latest/megatron.patch"


def tree(project: str) -> pathlib.Path:
    """Return the folder for PYTHONPATH. Raises FileNotFoundError if it was not made."""
    return fetching.tree(FOLDER / "all" / project, "tests/trainers/fetch_slime_newest.py")


def fetch(*clones: str) -> None:
    """Unpack the clones' commits and install slime's packages, each unless its folder exists."""
    fetching.install(fetch_slime.FOLDER / "packages", *fetch_slime.PACKAGES)
    paths = dict(zip(COMMITS, map(pathlib.Path, clones), strict=True))
    if (FOLDER / "all").exists():
        return
    with fetching.whole(FOLDER / "all") as partial:
        for project, clone in paths.items():
            fetch_slime.unpack(clone, COMMITS[project], partial / project)
        fetch_slime.for_newer_torch(partial / "mindspeed")
        changes = fetch_slime.git(paths["slime"], "show", FOR_GPUS)
        fetch_slime.apply(partial / "megatron", changes)


if __name__ == "__main__":
    fetch(*sys.argv[1:])
