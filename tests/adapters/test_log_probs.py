"""Trainers' log-probabilities and their gradients equal fp32 log_softmax, which servers compute."""

import subprocess
import sys

import fetch_megatron
import fetch_verl
import pytest
import torch
from npu_ops_adapters import log_probs as ours
from processes import HERE, environment
from torch import distributed

WORDS = 1003


def drawn(rows=37, dtype=torch.bfloat16):
    draw = torch.Generator().manual_seed(0)
    logits = 8 * torch.randn(rows, WORDS, generator=draw)
    labels = torch.randint(WORDS, (rows,), generator=draw)
    labels[:3] = torch.tensor([0, WORDS - 1, 5])
    return logits.to(dtype), labels, torch.randn(rows, generator=draw)


def right(logits, labels):
    return torch.log_softmax(logits.float(), -1).gather(-1, labels[..., None])[..., 0]


@pytest.fixture(params=[1, 5, 100], ids="{0}-rows-a-block".format)
def blocks(request, monkeypatch):
    monkeypatch.setattr(ours, "BLOCK", 4 * WORDS * request.param)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_they_are_log_softmaxs_in_every_bit(blocks, dtype):
    logits, labels, seeds = drawn(dtype=dtype)
    logits.requires_grad_()
    found = ours.log_probs(logits, labels)
    wide = logits.detach().to(torch.promote_types(dtype, torch.float32)).requires_grad_()
    expected = torch.log_softmax(wide, -1).gather(-1, labels[:, None])[:, 0]
    assert torch.equal(found, expected) and found.dtype == wide.dtype
    (grad,) = torch.autograd.grad(found, logits, seeds.to(found))
    (theirs,) = torch.autograd.grad(expected, wide, seeds.to(found))
    assert grad.dtype == dtype
    error = (grad - theirs).abs().max()
    assert error <= torch.finfo(dtype).eps * 32 * theirs.abs().max()


def test_shapes():
    logits, labels, _ = drawn(36)
    found = ours.log_probs(logits.view(4, 9, WORDS), labels.view(4, 9))
    assert torch.equal(found, right(logits, labels).view(4, 9))
    none = ours.log_probs(logits[:0].requires_grad_(), labels[:0])
    none.sum().backward()
    assert none.shape == (0,) and none.dtype == torch.float32


def shared(rank: int, store: str) -> None:
    """Run one of two ranks, each with half of the vocabulary; check its results and gradient."""
    distributed.init_process_group("gloo", f"file://{store}", rank=rank, world_size=2)
    torch.set_num_threads(1)
    logits, labels, seeds = drawn()
    logits = logits[:, :1002].clone()
    labels = labels.clamp(max=1001)
    whole = logits.float().requires_grad_()
    expected = right(whole, labels)
    (theirs,) = torch.autograd.grad(expected, whole, seeds)
    mine = logits.view(-1, 2, 501)[:, rank].clone().requires_grad_()
    ours.BLOCK = 4 * 501 * 7
    found = ours.log_probs(mine, labels, distributed.group.WORLD)
    assert torch.equal(found, expected)
    (grad,) = torch.autograd.grad(found, mine, seeds)
    torch.testing.assert_close(grad.float(), theirs.view(-1, 2, 501)[:, rank], rtol=1e-2, atol=1e-6)


def test_ranks_that_share_the_words_have_the_bits_of_one(tmp_path):
    torch.multiprocessing.spawn(shared, (str(tmp_path / "store"),), nprocs=2)


NPU = [sys.executable, "-m", "npu_ops_tools", "emulate", "--", "python"]


@pytest.mark.parametrize("mode", ["", "1"], ids=["default", "consistent"])
def test_verls_on_an_npu(mode):
    """verl's own function rounds log-probabilities to bf16, as torch_npu's cross entropy does."""
    on_npu = [sys.executable, "-m", "npu_ops_tools", "emulate", "--", "python"]
    assert output(on_npu, "verl", fetch_verl.path(), mode) == {
        "bf16": "right", "verl's own": "rounded", "fp32": "right",
        "temperature": "right" if mode else "rounded",
    }  # fmt: skip


@pytest.mark.parametrize("release", ["0.12.3", "0.19.2"])
def test_megatrons(release):
    path = [fetch_megatron.tree(release)]
    assert output([sys.executable], "megatron", path, "1") == {
        "cross_entropy": "right", "fused": "right", "smoothed": "1e-6", "Megatron's own": "1e-6",
    }  # fmt: skip


def output(command, framework, path, mode) -> dict[str, str]:
    done = subprocess.run(
        [*command, str(HERE / "framework_log_probs.py"), framework], capture_output=True,
        text=True, env=environment(HERE, *path, OMP_NUM_THREADS="1", NPU_OPS_CONSISTENT=mode),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(line.split(": ") for line in done.stdout.splitlines()[-4:])
