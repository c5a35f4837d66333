"""AscendC kernels on the emulated NPU, launched through the runtime's C interface."""

import ctypes
import pathlib
import re
import struct

import pytest
import torch
import torch_npu  # noqa: F401
from npu_ops_emulator import twins

SOURCE = pathlib.Path(__file__).parents[1] / "kernels" / "doubling.cpp"
BLOCKS, COUNT = 2, 1024


@pytest.fixture(scope="module")
def runtime():
    library = ctypes.CDLL("libascendcl.so")
    library.aclGetRecentErrMsg.restype = ctypes.c_char_p
    return library


@pytest.fixture(scope="module")
def doubling(runtime):
    """Return the kernel's function handle, loaded as CANN loads a device binary."""
    binary, function = ctypes.c_void_p(), ctypes.c_void_p()
    path = str(twins.compile(SOURCE).path).encode()
    assert runtime.aclrtBinaryLoadFromFile(path, None, ctypes.byref(binary)) == 0
    assert runtime.aclrtBinaryGetFunction(binary, b"doubling", ctypes.byref(function)) == 0
    assert runtime.aclrtBinaryGetFunction(binary, b"tripling", ctypes.byref(binary)) != 0
    assert b"no kernel tripling" in runtime.aclGetRecentErrMsg()
    return function


def launch(runtime, function, mistake):
    """Run doubling.cpp with a mistake on NPU tensors; return its status and its result."""
    names = re.search(r"enum Mistake.*?\{(.*?)\}", SOURCE.read_text(), re.S)[1].split(",")
    number = [name.strip() for name in names].index(mistake)
    x = torch.arange(BLOCKS * COUNT, dtype=torch.float32).npu()
    z = torch.full_like(x, torch.nan)
    addresses = (ctypes.c_uint64 * 2)(x.data_ptr(), z.data_ptr())
    sizes = (ctypes.c_uint64 * 2)(x.nbytes, z.nbytes)
    labels = (ctypes.c_char_p * 2)(b"x", b"z")
    runtime.npu_ops_emulator_tensors(labels, addresses, sizes, ctypes.c_int64(2))
    arguments = struct.pack("<QQii", x.data_ptr(), z.data_ptr(), COUNT, number)
    status = runtime.aclrtLaunchKernelWithHostArgs(
        function, BLOCKS, None, None, arguments, ctypes.c_size_t(len(arguments)), None,
        ctypes.c_size_t(0),
    )  # fmt: skip
    return status, z.cpu(), 2 * x.cpu()


def test_a_kernel_runs(runtime, doubling):
    status, z, expected = launch(runtime, doubling, "kNone")
    assert status == 0
    assert torch.equal(z, expected)


def test_a_wrong_kernel_fails_with_what_is_wrong(runtime, doubling):
    status, _, _ = launch(runtime, doubling, "kStoredTooEarly")
    assert status != 0
    message = runtime.aclGetRecentErrMsg().decode()
    assert "the AscendC kernel is wrong" in message
    assert re.search(r"doubling, block 0: race: .* at doubling\.cpp:\d+, after .*:\d+", message)


def test_what_bisheng_mends_is_no_error(runtime, doubling):
    assert launch(runtime, doubling, "kScalarTooEarly")[0] == 0


def test_a_device_binary_is_refused(runtime, tmp_path):
    path = tmp_path / "kernel.o"
    path.write_bytes(b"\x7fELF")
    binary = ctypes.c_void_p()
    assert runtime.aclrtBinaryLoadFromFile(str(path).encode(), None, ctypes.byref(binary)) != 0
    assert b"does not load" in runtime.aclGetRecentErrMsg()
