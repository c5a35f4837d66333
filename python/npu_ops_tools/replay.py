"""Repeats calls that NPU_OPS_LOG=shadow:N found to be wrong."""

from __future__ import annotations

import pathlib
import warnings

import torch

from npu_ops.core import shadow
from npu_ops.core.registry import Table
from npu_ops_tools.options import check_device


def replay(path: pathlib.Path, device: str | None = None) -> tuple[str, dict]:
    """Repeat a call; return its name, and the error and limit of each tensor that it wrote.

    device: None: the device on which the error was found.

    The file is untrusted: nothing in it is run or looked up by name. The reference computes the
    call first, so calls that it rejects never reach a kernel.

    Raises:
        OSError: there is no such file.
        ValueError: it is not a file of shadow mode, or the device does not exist here.
        RuntimeError: the implementation cannot run here.
    """
    found = _read(path)
    table, device = Table.tables[found["op"]], found["device"] if device is None else device
    check_device(device)
    args = shadow.thaw(found, device)
    reference = table.implementations[-1].launcher
    before = shadow.freeze(args)
    with torch.no_grad():
        try:
            reference(*shadow.thaw(before))
            implementation = _named(table, found["implementation"], args)
            implementation.launcher(*args)
        except (ArithmeticError, AttributeError, LookupError, TypeError) as error:
            raise ValueError(
                f"{path}: got arguments that do not fit {table.op} ({error})"
            ) from None
        errors = shadow.compare(reference, before, args)
    return f"{table.op}: {implementation.name} on {device} against reference", errors


def _read(path: pathlib.Path) -> dict:
    """Read a file of `shadow`, and check its names."""
    needs = "needs a file that NPU_OPS_LOG=shadow:N wrote"
    if path.exists() and not path.is_file():  # reading a FIFO would block
        raise ValueError(f"{path}: got something other than a regular file, {needs}")
    try:
        with warnings.catch_warnings():
            # warnings about other file types, which are rejected below
            warnings.simplefilter("ignore")
            found = torch.load(path, weights_only=True, map_location="cpu")
    except OSError:
        raise
    # With invalid data torch.load may raise any exception. Its message is dropped: it tells the
    # user to load the file with weights_only=False, which runs whatever the file contains.
    except Exception:
        raise ValueError(f"{path}: got a file that cannot be read, {needs}") from None
    given = found if isinstance(found, dict) else {}
    names = [given.get(name) for name in ("op", "implementation", "device")]
    if not all(isinstance(name, str) for name in names) or names[0] not in Table.tables:
        raise ValueError(f"{path}: got another file, {needs}")
    return found


def _named(table: Table, name: str, args: tuple):
    """Return the implementation of that name if it runs here, else raise with the reason."""
    reasons = {verdict.implementation: verdict.why_not for verdict in table.explain(*args)}
    for implementation in table.implementations:
        reason = reasons[implementation.name]
        if implementation.name == name and (reason is None or reason.endswith("comes first")):
            return implementation
    raise RuntimeError(
        f"{table.op}: {name} cannot run this call here: "
        f"{reasons.get(name, 'no such implementation')}"
    )
