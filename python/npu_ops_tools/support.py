"""Reads projects' images (`images.csv`) and results of npu-ops with their versions (`tested.csv`).

A project's image pins versions of torch, torch_npu and Python. packaging/versions.py installs
npu-ops with these versions, tests it with the emulated NPU on x86_64, and writes the results.
"""

from __future__ import annotations

import csv
import pathlib
import platform
from collections.abc import Mapping

from packaging.version import Version

from npu_ops_tools.known_bad import minor, release

HERE = pathlib.Path(__file__).parent
OLDEST = "2.7"
# Columns of tested.csv, and their titles in tables.
STEPS = {
    "source": "installs from source",
    "wheel": "from a wheel",
    "cpu": "cases on the CPU",
    "compile": "kernels that compile",
    "triton": "Triton, emulated NPU",
    "ascendc": "AscendC, twin",
    "demo": "Megatron trains, emulated NPU",
}
KEYS = ("torch", "torch_npu", "python")
# The compiler that decides whether a kernel can be launched on the emulated NPU.
COMPILER = "ascendnpu-ir"


def images() -> list[dict[str, str]]:
    """Return the images of projects that use npu-ops, and the versions that they pin."""
    return _read("images.csv")


def tested() -> list[dict[str, str]]:
    """Return a row for each tested combination of torch, torch_npu and Python.

    The result of a step is "yes", a number of passed tests, or an error.
    """
    return _read("tested.csv")


def write(row: Mapping[str, str]) -> None:
    """Replace the row with the same torch, torch_npu and Python."""
    rows = {_key(known): known for known in tested()} | {_key(row): dict(row)}
    with (HERE / "tested.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, [*KEYS, COMPILER, *STEPS, "commit"], lineterminator="\n")
        writer.writeheader()
        writer.writerows(sorted(rows.values(), key=_order))


def standing(versions: Mapping[str, str | None], python: str = platform.python_version()) -> str:
    """Return a sentence that begins with "tested", "should work" or "not supported", and says why.

    versions: of torch and torch_npu; None if not installed.
    """
    torch, npu = (
        release(versions[name]) if versions.get(name) else None for name in ("torch", "torch_npu")
    )
    if torch is None:
        return "not supported: torch is not installed"
    if Version(torch) < Version(OLDEST):
        return f"not supported: needs torch {OLDEST} or newer, this is {torch}"
    if npu and minor(npu) != minor(torch):
        return f"not supported: torch_npu {npu} is for another version of torch than {torch}"
    alike = [row for row in tested() if row["torch"] == torch and _fits(row, npu)]
    alike.sort(key=lambda row: row["python"] != minor(python))
    if alike and Version(versions["torch"]).is_prerelease:
        return (
            f"should work: this torch was built from source; it was tested with {_what(alike[0])}"
        )
    if alike:
        return f"tested: {_what(alike[0])}{_named(alike[0])}"
    near = [row for row in tested() if minor(row["torch"]) == minor(torch)] or tested()[-1:]
    was = f"it was tested with {_what(near[-1])}" if near else "no version was tested"
    return f"should work: {was}"


def _fits(row, npu: str | None) -> bool:
    return npu is None or (row["torch_npu"] and release(row["torch_npu"]) == npu)


def _what(row) -> str:
    npu = f" and torch_npu {row['torch_npu']}" if row["torch_npu"] else ""
    failed = [f"{STEPS[step]}: {row[step]}" for step in STEPS if "failed" in row[step]]
    return f"torch {row['torch']}{npu} (Python {row['python']})" + "".join(
        f"; {text}" for text in failed
    )


def _named(row) -> str:
    """Return a phrase that names the images with the row's torch; "" if there are none."""
    names = [image["image"] for image in images() if image["torch"] == row["torch"]]
    return f"; used by {', '.join(names)}" if names else ""


# ---- tables ----


def short_table() -> str:
    """Return the README's table: a line for each image."""
    head = ("image", "CANN", "Python", "torch, torch_npu", *STEPS.values())
    return _markdown(head, map(_short, images()))


def _short(image) -> tuple[str, ...]:
    row = _of(image)
    steps = [row[step] if row else "not tried" for step in STEPS]
    torch = f"{image['torch']}, {image['torch_npu']}"
    return (image["image"], image["cann"], image["python"], torch, *steps)


def whole_page() -> str:
    """Return the documentation's tables: the sources of images' versions, and all tested
    torches."""
    head = ("image", "from", "CANN", "Python", "torch", "torch_npu", "triton-ascend", "with")
    of_images = _markdown(head, (tuple(image.values()) for image in images()))
    tried = ("torch", "torch_npu", "Python", COMPILER, *STEPS.values(), "commit")
    return f"{of_images}\n{_markdown(tried, (tuple(row.values()) for row in tested()))}"


def _of(image) -> dict[str, str] | None:
    """Return the test result of an image's torch, preferably with the image's Python."""
    rows = [row for row in tested() if row["torch"] == image["torch"] and row["torch_npu"]]
    rows.sort(key=lambda row: row["python"] != image["python"])
    return rows[0] if rows else None


def _markdown(head, lines) -> str:
    rows = [head, ("---",) * len(head), *lines]
    return "".join(f"| {' | '.join(cell or '-' for cell in row)} |\n" for row in rows)


# ---- versions ----


def _read(name: str) -> list[dict[str, str]]:
    with (HERE / name).open(newline="") as file:
        return list(csv.DictReader(file))


def _key(row) -> tuple[str, ...]:
    return tuple(row[key] for key in KEYS)


def _order(row) -> tuple[Version, Version]:
    return Version(row["torch"]), Version(row["python"])
