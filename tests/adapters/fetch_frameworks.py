"""Download frameworks in other versions than the environment's into .cache/frameworks.

python tests/adapters/fetch_frameworks.py [NAME...]
"""

from __future__ import annotations

import pathlib
import sys

import fetching

FOLDER = fetching.CACHE / "frameworks"
_REQUESTS = (
    "requests==2.32.5", "urllib3==2.6.3", "idna==3.11", "certifi==2026.1.4",
    "charset_normalizer==3.4.4",
)  # fmt: skip
# Each framework with the packages that the environment lacks, or has in another version.
FRAMEWORKS = {
    "fla-core-0.5.2": (),
    "fla-core-0.6.0": (),
    "transformers-4.57.6": ("tokenizers==0.22.2", "huggingface_hub==0.36.2", *_REQUESTS),
    "transformers-5.10.4": (
        "tokenizers==0.22.2", "huggingface_hub==1.33.0", "httpx==0.28.1", "httpcore==1.0.9",
        "h11==0.16.0", "anyio==4.16.0", "sniffio==1.3.1", "idna==3.11", "certifi==2026.1.4",
    ),
    "ray-2.55.1": (
        "jsonschema==4.26.0", "jsonschema-specifications==2025.9.1", "referencing==0.37.0",
        "rpds-py==0.30.0", "msgpack==1.1.2", "protobuf==6.33.5", *_REQUESTS,
    ),
}  # fmt: skip


def tree(name: str) -> pathlib.Path:
    """Return the folder for PYTHONPATH. Raises FileNotFoundError if it was not downloaded."""
    return fetching.tree(FOLDER / name, "tests/adapters/fetch_frameworks.py")


def fetch(name: str) -> None:
    """Download a framework, unless its folder exists."""
    fetching.install(FOLDER / name, "==".join(name.rsplit("-", 1)), *FRAMEWORKS[name])


if __name__ == "__main__":
    for framework in sys.argv[1:] or FRAMEWORKS:
        fetch(framework)
