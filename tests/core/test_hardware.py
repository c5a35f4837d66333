"""Queries about the NPU never raise, whatever state torch_npu is in."""

import subprocess
import sys
import types

import pytest
import torch

import npu_ops
from npu_ops.core import hardware


def fails(*args):
    raise RuntimeError("Failed to load the driver.\nTraceback of torch_npu")


def backend(available=lambda: True, count=lambda: 2, name=lambda index: "Ascend910B3"):
    return types.SimpleNamespace(is_available=available, device_count=count, get_device_name=name)


@pytest.fixture
def npu(monkeypatch):
    """Return a function that sets torch.npu; None removes it."""

    def put(value):
        if value is None:
            monkeypatch.delattr(torch, "npu", raising=False)
        else:
            monkeypatch.setattr(torch, "npu", value, raising=False)

    return put


def test_with_a_device(npu):
    npu(backend())
    assert npu_ops.is_npu() and hardware.npu_why_not() is None
    assert (hardware.npu_count(), hardware.npu_name()) == (2, "Ascend910B3")


@pytest.mark.parametrize(
    "value, reason",
    [
        (None, "torch_npu is not installed"),
        (backend(available=lambda: False), "torch_npu sees no device"),
        (backend(count=lambda: 0), "torch_npu sees no device"),
        (
            backend(available=fails),
            "torch_npu does not work: RuntimeError: Failed to load the driver.",
        ),
        (backend(count=fails), "torch_npu does not work: RuntimeError: Failed to load the driver."),
        (types.SimpleNamespace(), "torch_npu does not work: AttributeError"),
    ],
)
def test_without_one(npu, monkeypatch, value, reason):
    monkeypatch.setattr(hardware, "_has", lambda package: False)
    npu(value)
    assert npu_ops.is_npu() is False
    assert hardware.npu_why_not().startswith(reason) and "\n" not in hardware.npu_why_not()
    assert (hardware.npu_count(), hardware.npu_name()) == (0, None)


def test_a_device_without_a_name(npu):
    npu(backend(name=fails))
    assert npu_ops.is_npu() and hardware.npu_name() is None


def test_a_count_that_fails_the_second_time(npu):
    counts = iter([1])
    npu(backend(count=lambda: next(counts)))
    assert hardware.npu_count() == 0


@pytest.mark.parametrize("imported", [False, True])
def test_with_a_torch_npu_that_does_not_import(tmp_path, imported):
    """Test torch_npu without CANN, with torch's automatic import of torch_npu turned off."""
    package = tmp_path / "torch_npu"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('libhccl.so: cannot open')\n")
    attempt = "try:\n    import torch_npu\nexcept ImportError:\n    pass\n" if imported else ""
    program = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{attempt}"
        "import npu_ops\n"
        "from npu_ops.core import hardware\n"
        "assert npu_ops.is_npu() is False\n"
        "print(hardware.npu_why_not(), hardware.npu_count(), hardware.npu_name())\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    said = "torch_npu is installed but not imported (TORCH_DEVICE_BACKEND_AUTOLOAD=0?) 0 None\n"
    assert (done.returncode, done.stdout) == (0, said), done.stderr
