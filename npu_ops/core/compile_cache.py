"""torch's caches of compiled graphs, told which npu-ops a graph was compiled with.

torch keeps compiled graphs on disk, by the operators that they call. It does not know that
another version of npu-ops gives the same operator another gradient: without this, an upgrade would
call what is no longer there, or compute what a former version did.
"""

from __future__ import annotations

import hashlib
import pathlib

import torch.compiler

_PACKAGE = pathlib.Path(__file__).parent.parent


def tell_torch(package: pathlib.Path = _PACKAGE) -> None:
    """Add what `package` consists of to the key of torch's caches, behind a tag that is there."""
    tag = getattr(torch.compiler.config, "cache_key_tag", None)
    if tag is None:  # a torch that knows no tags
        return
    ours = f"npu_ops={fingerprint(package)}"
    if ours not in tag:
        torch.compiler.config.cache_key_tag = f"{tag} {ours}".lstrip()


def fingerprint(package: pathlib.Path) -> str:
    """16 hexadecimal digits of what is in a package's Python files. Costs 7 ms for ours."""
    digest = hashlib.sha256()
    for file in sorted(package.rglob("*.py")):
        digest.update(f"{file.relative_to(package)} {file.stat().st_size} ".encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]
