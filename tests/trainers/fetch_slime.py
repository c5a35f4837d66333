"""Makes .cache/trainers/slime-0.2.2: slime with its NPU patches, without them, and for the CPU.

    git clone https://github.com/THUDM/slime
    git clone https://github.com/NVIDIA/Megatron-LM
    git clone https://gitcode.com/Ascend/MindSpeed
    python tests/trainers/fetch_slime.py slime Megatron-LM MindSpeed

The folders:

- `shipped` has all patches of slime's docker/npu_patch.
- `engine`, for SGLang as rollout, has only the patch for slime itself.
- `npu_ops`, for runs with npu-ops, and `truth`, for reference runs on the CPU, have none.

All have slime's changes to Megatron-LM for GPUs. `shipped` and `truth` have a later fix of slime's
Qwen3-Next. The clones need the commits below, and are only read.
"""

from __future__ import annotations

import io
import pathlib
import subprocess
import sys
import tarfile

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "adapters"))

import fetching

FOLDER = fetching.CACHE / "trainers" / "slime-0.2.2"
ROUTER = "sglang-router==0.3.2"  # for SGLang's engine as rollout
BRIDGE = "megatron-bridge==0.3.1"  # slime uses a fork; its patch fits this release
PACKAGES = (
    "mbridge==0.15.1",
    "numpy==1.26.4",  # slime refuses numpy 2
    "pyarrow==20.0.0",  # verl's version needs numpy 2
    "torch_memory_saver==0.0.10",
)
COMMITS = {
    "slime": "v0.2.2",
    "megatron": "3714d81d418c9f1bca4594fc35f9e8289f652862",
    "mindspeed": "fc63de5c48426dd019c3b3f39e65f5bdf56e4086",
}
# The last commit whose slime.patch fits v0.2.2: the next commit renames the patched modules.
PATCHES = "d38dc29c9:docker/npu_patch"
FOR_GPUS = "v0.2.2:docker/patch/v0.5.7/megatron.patch"
# slime's fix of a bug: the state of a packed sequence passes into the next. npu-ops fixes it, too.
FIX = ("1d31a49fb", "--include=slime_plugins/models/qwen3_next.py")
FIXED = ("shipped", "truth")
NAMES = {"bridge": "megatron-bridge"}
WHO = ("shipped", "engine", "npu_ops", "truth")
PATCHED = {"shipped": ("slime", "megatron", "mindspeed", "bridge"), "engine": ("slime",)}


def tree(who: str, project: str) -> pathlib.Path:
    """Return the folder for PYTHONPATH. Raises FileNotFoundError if it was not made."""
    return fetching.tree(FOLDER / who / project, "tests/trainers/fetch_slime.py")


def packages() -> pathlib.Path:
    """Return the folder of the packages that slime needs beyond verl's."""
    return fetching.tree(FOLDER / "packages", "tests/trainers/fetch_slime.py")


def router() -> pathlib.Path:
    """Return the folder of the packages that slime needs beyond SGLang's to start an engine."""
    return fetching.tree(FOLDER / "router", "tests/trainers/fetch_slime.py")


def fetch(*clones: str) -> None:
    """Install packages, and unpack and patch the clones' commits. Skip folders that exist."""
    fetching.install(FOLDER / "packages", *PACKAGES)
    fetching.install(FOLDER / "router", ROUTER)
    paths = dict(zip(COMMITS, map(pathlib.Path, clones), strict=True))
    for who in WHO:
        if not (FOLDER / who).exists():
            with fetching.whole(FOLDER / who) as partial:
                for project, clone in paths.items():
                    unpack(clone, COMMITS[project], partial / project)
                    patch(who, project, partial / project, paths["slime"])
                for_newer_torch(partial / "mindspeed")
                install_bridge(partial / "bridge")
                patch(who, "bridge", partial / "bridge", paths["slime"])


def install_bridge(folder: pathlib.Path) -> None:
    fetching.pip("install", "--target", str(folder), "--ignore-requires-python", BRIDGE)


def unpack(clone: pathlib.Path, commit: str, folder: pathlib.Path) -> None:
    archive = git(clone, "archive", commit)
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        files.extractall(folder, filter="data")


def for_newer_torch(folder: pathlib.Path) -> None:
    """Let MindSpeed's get_device_capability accept `device`, an argument that torch 2.13 passes."""
    for file in ("core/fusions/grouped_matmul.py", "core/transformer/moe/grouped_gemm_util.py"):
        path = folder / "mindspeed" / file
        source = path.read_text().replace("capability():", "capability(device=None):")
        path.write_text(source)


def patch(who: str, project: str, folder: pathlib.Path, slime: pathlib.Path) -> None:
    if project == "megatron":
        apply(folder, git(slime, "show", FOR_GPUS))
    if project == "slime" and who in FIXED:
        apply(folder, git(slime, "show", FIX[0]), FIX[1])
    if project not in PATCHED.get(who, ()):
        return
    name = NAMES.get(project, project)
    inside = ("-p2",) if project == "bridge" else ()  # the wheel has no src/
    apply(folder, git(slime, "show", f"{PATCHES}/{name}.patch"), *inside)


def apply(folder: pathlib.Path, changes: bytes, *which: str) -> None:
    git(folder, "init", "--quiet")  # otherwise git would use the repository around the folder
    git(folder, "apply", "--whitespace=nowarn", *which, given=changes)


def git(folder: pathlib.Path, *command: str, given: bytes | None = None) -> bytes:
    done = subprocess.run(["git", "-C", folder, *command], input=given, stdout=subprocess.PIPE)
    if done.returncode:
        sys.exit(f"{folder}: git {' '.join(command)} failed; fetch_slime.py says what it needs")
    return done.stdout


if __name__ == "__main__":
    fetch(*sys.argv[1:])
