"""Make .cache/trainers: verl and the packages it needs, in folders that precede .venv's.

python tests/adapters/fetch_verl.py

If VERL names a checkout of verl, tests run it with the same packages. torch is the environment's.
torchvision's binary is for CUDA; its Python works, after two operators are declared.
"""

from __future__ import annotations

import os
import pathlib

import fetching
from fetch_sglang import DECLARED

VERSION = "0.9.1"
FOLDER = fetching.CACHE / "trainers" / f"verl-{VERSION}"
QUEUE = FOLDER.with_name("transfer-queue-0.1.11")  # only verl's RL trainers import it
REQUIREMENTS = pathlib.Path(__file__).with_name("verl_requirements.txt")


def tree() -> pathlib.Path:
    """Return the folder for PYTHONPATH. Raises FileNotFoundError if it was not made."""
    return fetching.tree(FOLDER, "tests/adapters/fetch_verl.py")


def path() -> list[pathlib.Path]:
    """Return the folders for PYTHONPATH: the checkout, if VERL is set, before tree().

    Raises:
        FileNotFoundError: VERL is no checkout, or tree() was not made.
    """
    if "VERL" not in os.environ:
        return [tree()]
    checkout = pathlib.Path(os.environ["VERL"]).resolve()
    if not (checkout / "verl" / "trainer").exists():
        raise FileNotFoundError(f"VERL={checkout} is no checkout of verl")
    return [checkout, tree()]


def queue() -> pathlib.Path:
    """Return the folder of TransferQueue. Raises FileNotFoundError if it was not made."""
    return fetching.tree(QUEUE, "tests/adapters/fetch_verl.py")


def fetch() -> None:
    """Download everything, unless the folders exist."""
    fetching.install(QUEUE, "transferqueue==0.1.11", "prometheus_client==0.26.0")
    if FOLDER.exists():
        return
    print("0.2 GB, half a minute", flush=True)
    with fetching.whole(FOLDER) as partial:
        fetching.pip(
            "install", "--no-compile", "--no-build-isolation", "--target", str(partial),
            "--no-binary=antlr4-python3-runtime",  # pure Python, published only as source
            "--requirement", str(REQUIREMENTS),
        )  # fmt: skip
        with open(partial / "torchvision" / "extension.py", "a") as extension:
            extension.write(DECLARED)


if __name__ == "__main__":
    fetch()
