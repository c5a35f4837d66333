"""aten operators on NPU tensors: the values, errors and random streams that PyTorch promises."""

import copy
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

NPU = torch.device("npu:0")


def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.LayerNorm(32), torch.nn.Dropout(0.3),
        torch.nn.Linear(32, 4),
    )  # fmt: skip


def test_training_step_equals_cpu():
    ours, theirs = model().eval(), model().eval()
    ours.to(NPU)
    x = torch.randn(8, 16)
    for net, at in ((ours, NPU), (theirs, "cpu")):
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
        for _ in range(3):
            optimizer.zero_grad()
            net(x.to(at)).square().mean().backward()
            torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert a.device == NPU
        torch.testing.assert_close(a.cpu(), b)


CALLS = {
    "cat": lambda x: torch.cat([x, x * 2], 1),
    "sort": lambda x: torch.sort(x, 0)[1],
    "topk": lambda x: x.topk(2).values,
    "index": lambda x: x[torch.tensor([2, 0])],
    "index_put": lambda x: x.clone().index_put_((torch.tensor([1]),), x[0]),
    "masked": lambda x: x[x > 0],
    "where": lambda x: torch.where(x > 0, x, -x),
    "strided write": lambda x: x.clone()[:, ::2].add_(7).sum(1),
    "transposed in place": lambda x: x.clone().t().mul_(3),
    "einsum": lambda x: torch.einsum("ij,kj->ik", x, x),
    "svd": lambda x: torch.linalg.svdvals(x),
    "unique": lambda x: torch.unique(x.round()),
    "histc": lambda x: torch.histc(x, 4),
    "softmax": lambda x: x.softmax(-1),
    "cumsum": lambda x: x.cumsum(0),
    "conv2d": lambda x: F.conv2d(x[None, None], x[None, None, :2, :2]),
    "split": lambda x: torch.stack(x.split(2, 1)[:2]),
    "complex": lambda x: torch.view_as_real(torch.view_as_complex(x.view(4, 3, 2)) * 2j),
    "foreach": lambda x: torch._foreach_add([x, x], 1)[1],
    "bf16": lambda x: (x.bfloat16() @ x.bfloat16().t()).float(),
    "out": lambda x: torch.add(x, 1, out=x.new_empty(0)),
    "scatter": lambda x: x.scatter_add(0, torch.zeros_like(x, dtype=torch.long), x),
    "embedding": lambda x: F.embedding(torch.tensor([1, 2], device=x.device), x),
    "expand": lambda x: x[:, :1].expand(4, 5).contiguous(),
    "flip": lambda x: x.flip(0, 1),
}


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
def test_histc_counts_integers(dtype):
    """verl and transformers count tokens by histc; torch's CPU kernel refuses integers."""
    x = torch.tensor([0, 3, 3, 1, 0, 3, 5, 6], dtype=dtype, device=NPU)
    counts = torch.histc(x, bins=6, min=0, max=5)
    assert counts.device == NPU and counts.dtype == dtype and counts.tolist() == [2, 1, 0, 3, 0, 1]


@pytest.mark.parametrize("name", CALLS)
def test_call_equals_cpu(name):
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))
    on_npu = CALLS[name](x.to(NPU))
    assert on_npu.device == NPU
    torch.testing.assert_close(on_npu.cpu(), CALLS[name](x))


def test_views_share_memory():
    x = torch.zeros(4, 6, device=NPU)
    x.view(6, 4)[0].fill_(1)
    assert x.sum() == 4 and x.flatten().data_ptr() == x.data_ptr()


@pytest.mark.parametrize("layer", [torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d])
def test_convolution_gradients(layer):
    ours = layer(3, 4, 3, padding=1)
    theirs = copy.deepcopy(ours).to(NPU)
    x = torch.randn(2, 3, *[5] * (ours.weight.dim() - 2))
    ours(x).square().sum().backward()
    theirs(x.to(NPU)).square().sum().backward()
    torch.testing.assert_close(theirs.weight.grad.cpu(), ours.weight.grad)


def test_generator():
    torch.npu.manual_seed(5)
    first = torch.randn(4, device=NPU)
    second = torch.randn(4, device=NPU)
    torch.npu.manual_seed(5)
    assert torch.equal(first, torch.randn(4, device=NPU)) and not torch.equal(first, second)
    with torch.random.fork_rng(devices=[0], device_type="npu"):
        inside = F.dropout(torch.ones(64, device=NPU))
    assert torch.equal(inside, F.dropout(torch.ones(64, device=NPU)))
    own = torch.Generator(device="npu").manual_seed(3)
    drawn = torch.rand(3, generator=own, device=NPU)
    assert torch.equal(drawn, torch.rand(3, generator=own.manual_seed(3), device=NPU))
    state = torch.get_rng_state()
    torch.randn(3, device=NPU)
    assert torch.equal(state, torch.get_rng_state()), "an NPU draw moved the CPU's generator"


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_repeats_dropout(reentrant):
    net = model().to(NPU)
    gradients = []
    for run in (net, lambda x: checkpoint(net, x, use_reentrant=reentrant)):
        x = torch.ones(8, 16, device=NPU, requires_grad=True)
        torch.npu.manual_seed(1)
        run(x).sum().backward()
        gradients.append(x.grad)
    assert torch.equal(*gradients)


def test_autocast_and_scaler():
    net = model().to(NPU)
    optimizer, scaler = torch.optim.SGD(net.parameters(), lr=0.1), torch.npu.amp.GradScaler()
    with torch.autocast("npu", dtype=torch.float16):
        out = net(torch.ones(2, 16, device=NPU))
    assert out.dtype == torch.float16
    scaler.scale(out.float().sum()).backward()
    scaler.step(optimizer)
    scaler.update()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compile(backend):
    torch._dynamo.reset()
    x = torch.randn(4, 4)
    ours, theirs = (x.to(at).requires_grad_() for at in (NPU, "cpu"))

    def function(x):
        return (x.sin() + x @ x.t()).relu().sum()

    torch.compile(function, backend=backend, fullgraph=True)(ours).backward()
    function(theirs).backward()
    torch.testing.assert_close(ours.grad.cpu(), theirs.grad)


def test_errors_are_raised_at_the_call():
    x = torch.ones(4, 6, device=NPU)
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        x @ x
    with pytest.raises(RuntimeError, match="devices, npu:0 and cpu"):
        x + torch.ones(6)
    with pytest.raises(RuntimeError, match="devices, npu:0 and npu:1"):
        x + torch.ones(4, 6, device="npu:1")
    assert (x + torch.tensor(1.0)).sum() == 48, "a CPU scalar may be mixed in"


def test_memory_limit():
    free, total = torch.npu.mem_get_info()
    assert free <= total == 64 << 30
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate 70.00 GiB"):
        torch.empty(70 << 30, dtype=torch.uint8, device=NPU)
    before = torch.npu.memory_allocated()
    block = torch.empty(1 << 20, device=NPU)
    # torch_npu adds 32 bytes to each tensor, and rounds the sum up to a multiple of 512 bytes.
    assert 32 <= torch.npu.memory_allocated() - before - block.nbytes <= 512


def test_streams_and_events():
    x = torch.ones(1 << 16, device=NPU)
    begin, end = (torch.npu.Event(enable_timing=True) for _ in range(2))
    side = torch.npu.Stream()
    begin.record()
    with torch.npu.stream(side):
        side.wait_event(begin)
        y = x * 2
        for _ in range(20):
            y = y + 1
        end.record()
    torch.npu.current_stream().wait_event(end)
    assert (y - 20).eq(2).all()
    end.synchronize()
    assert begin.elapsed_time(end) >= 0


def test_save_and_load(tmp_path):
    torch.save({"x": torch.arange(3, device=NPU)}, tmp_path / "x.pt")
    loaded = torch.load(tmp_path / "x.pt", map_location="npu:1")["x"]
    assert loaded.device == torch.device("npu:1") and loaded.tolist() == [0, 1, 2]


EARLY = """
import torch, torch_npu
library = torch.library.Library("aten", "IMPL")
library.impl("linear", lambda x, weight, bias=None: x + 1, "PrivateUse1")
x = torch.ones(2, 2, device="npu")
with torch.inference_mode():
    assert torch.nn.functional.linear(x, x).tolist() == [[2, 2], [2, 2]]
"""


def test_a_kernel_registered_before_the_first_use_of_a_device_stays():
    done = subprocess.run([sys.executable, "-c", EARLY], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
