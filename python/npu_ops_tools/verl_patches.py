"""What verl's NPU patches set over ours once an engine of it starts, read from its source."""

from __future__ import annotations

import ast
import importlib.util
import pathlib
from collections.abc import Iterable, Iterator

FILE = "models/transformers/npu_patch.py"


def source() -> str | None:
    """Of the verl that is installed, which is not imported; None where there is none."""
    found = importlib.util.find_spec("verl")
    folders = found.submodule_search_locations if found else ()
    files = [pathlib.Path(folder, FILE) for folder in folders]
    return next((file.read_text() for file in files if file.exists()), None)


def targets(text: str) -> Iterator[str]:
    """ "module:attribute" of all that its functions set in the modules that they import."""
    for function in ast.walk(ast.parse(text)):
        if not isinstance(function, ast.FunctionDef):
            continue
        modules = {}
        for node in ast.walk(function):
            if isinstance(node, ast.ImportFrom):
                modules |= {name.name: f"{node.module}.{name.name}" for name in node.names}
            elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Attribute):
                name, _, attribute = ast.unparse(node.targets[0]).partition(".")
                if name in modules:
                    yield f"{modules[name]}:{attribute}"


def over(ours: Iterable[str]) -> list[str]:
    """Those of our targets that verl will set."""
    return sorted(set(ours).intersection(targets(source() or "")))
