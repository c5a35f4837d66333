"""NPU_OPS_CONSISTENT: a query's output has the same bits in training, prefill,
decode and verify."""

import pytest
import torch
from support import forced, implementations, named

import npu_ops
from npu_ops.core import env
from npu_ops.core.registry import Table, as_if_on, explain

HEADS, KEY_HEADS = 8, 2
LENGTHS = (150, 1, 64, 65)
every_kernel = pytest.mark.parametrize(
    "implementation, device",
    [
        chosen
        for chosen in implementations(Table.tables["attention"])
        if chosen.values[0] in ("cpu", "triton_ascend")
    ],
)


@pytest.fixture(autouse=True)
def consistent():
    with env.override(consistent="tokens"):
        yield


class Sequences:
    """Packed q, k and v of four sequences, and paged caches with their keys and values."""

    def __init__(self, dim, dtype, device):
        draw = torch.Generator().manual_seed(0)
        self.device, self.tokens = device, sum(LENGTHS)
        self.q, self.k, self.v = (
            torch.randn(self.tokens, heads, dim, generator=draw, dtype=torch.float32).to(dtype)
            for heads in (HEADS, KEY_HEADS, KEY_HEADS)
        )
        self.starts = torch.tensor((0, *LENGTHS), dtype=torch.int32).cumsum(0, dtype=torch.int32)

    def own(self, x, n):
        return x[self.starts[n] : self.starts[n + 1]]

    def trained(self):
        starts = self.starts.to(self.device)
        given = (x.to(self.device) for x in (self.q, self.k, self.v))
        out = npu_ops.attention(*given, layout="TND", cu_seqlens_q=starts, is_causal=True)
        return out.cpu()

    def cache(self, size):
        """Return k and v in shuffled blocks of `size` rows, and the block table."""
        across = -(-max(LENGTHS) // size)
        draw = torch.Generator().manual_seed(1)
        table = torch.randperm(len(LENGTHS) * across, generator=draw).view(-1, across).int()
        caches = []
        for x in (self.k, self.v):
            cache = torch.zeros(table.numel(), size, *x.shape[1:], dtype=x.dtype)
            for n in range(len(LENGTHS)):
                for page, part in zip(table[n], self.own(x, n).split(size), strict=False):
                    cache[page, : len(part)] = part
            caches.append(cache.to(self.device))
        return *caches, table.to(self.device)

    def served(self, size, seen, count=1):
        """Decode the last `count` queries of some sequences: `[n, count, heads, dim]`.

        seen: for each sequence, how many of its keys are in the cache.
        """
        *caches, table = self.cache(size)
        q = torch.stack([self.own(self.q, n)[end - count : end] for n, end in seen.items()])
        out = npu_ops.attention(
            q.to(self.device),
            *caches,
            is_causal=True,
            seqlens_k=torch.tensor(list(seen.values()), dtype=torch.int32, device=self.device),
            block_table=table[list(seen)],
        )
        return out.cpu()


@every_kernel
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=named)
@pytest.mark.parametrize("dim", [64, 256])
@pytest.mark.parametrize("size", [64, 128])
def test_decoding_is_training(implementation, device, dtype, dim, size):
    """The other sequences of the decoded batch, and their lengths, change no bit."""
    sequences = Sequences(dim, dtype, device)
    with torch.no_grad(), forced(implementation, "attention"):
        trained = sequences.trained()
        for seen in ({0: 150, 1: 1, 2: 64, 3: 65}, {0: 64, 3: 2}, {2: 33}):
            out = sequences.served(size, seen)
            for (n, end), mine in zip(seen.items(), out, strict=True):
                assert torch.equal(mine[0], sequences.own(trained, n)[end - 1]), (n, end)


@every_kernel
@pytest.mark.parametrize("count", [4, 40])
def test_drafts_and_parts_of_a_prompt_are_training(implementation, device, count):
    sequences = Sequences(64, torch.bfloat16, device)
    with torch.no_grad(), forced(implementation, "attention"):
        trained = sequences.trained()
        seen = {0: 111, 2: 64}
        out = sequences.served(64, seen, count)
        for (n, end), mine in zip(seen.items(), out, strict=True):
            assert torch.equal(mine, sequences.own(trained, n)[end - count : end]), (n, end)


@pytest.mark.parametrize("size", [1, 16, 48])
def test_on_a_cpu_blocks_have_any_size(size):
    sequences = Sequences(64, torch.bfloat16, "cpu")
    with torch.no_grad():
        trained = sequences.trained()
        out = sequences.served(size, {0: 150, 3: 65})
    assert torch.equal(out[0, 0], trained[149]) and torch.equal(out[1, 0], trained[-1])


@every_kernel
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=named)
def test_a_query_with_a_mask_has_the_same_bits_alone(implementation, device, dtype):
    """The mask is that of sparse attention: causal, with only some of the keys chosen."""
    draw = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(1, 150, n, 64, generator=draw, dtype=torch.float32).to(dtype).to(device)
        for n in (HEADS, KEY_HEADS, KEY_HEADS)
    )
    causal = torch.ones(150, 150, dtype=torch.bool).tril()
    chosen = causal & (torch.rand(150, 150, generator=draw) < 0.7)
    causal, chosen = causal.to(device), chosen.to(device)
    with torch.no_grad(), forced(implementation, "attention"):
        out = npu_ops.attention(q, k, v, attn_mask=chosen)
        for end in (1, 70, 150):
            mine = npu_ops.attention(
                q[:, end - 1 : end], k[:, :end], v[:, :end], attn_mask=chosen[end - 1 : end, :end]
            )
            assert torch.equal(mine[:, 0], out[:, end - 1]), end
        part = npu_ops.attention(q[:, 40:], k, v, attn_mask=chosen[40:])
        assert torch.equal(part, out[:, 40:])
        whole = npu_ops.attention(q, k, v, attn_mask=causal)
        assert torch.equal(whole, npu_ops.attention(q, k, v, is_causal=True))
    with forced("reference", "attention"):
        expected = npu_ops.attention(q.float(), k.float(), v.float(), attn_mask=chosen)
    torch.testing.assert_close(out.float(), expected, rtol=0, atol=1e-2)


def test_queries_that_see_nothing_and_gradients():
    """There are more queries than keys, so the first queries see no key."""
    draw = torch.Generator().manual_seed(0)
    q = torch.randn(1, 9, 4, 64, generator=draw, dtype=torch.float32, requires_grad=True)
    k, v = torch.randn(2, 1, 5, 2, 64, generator=draw, dtype=torch.float32)
    out = npu_ops.attention(q, k, v, is_causal=True)
    gradient = torch.autograd.grad(out.sum(), q)
    with forced("reference", "attention"):
        expected = npu_ops.attention(q, k, v, is_causal=True)
        expected_gradient = torch.autograd.grad(expected.sum(), q)
    assert not out[:, :4].any()
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(gradient, expected_gradient)


@pytest.mark.parametrize("keys", [{}, {"keys": "paged", "block_size": 128, "host_lengths": True}])
def test_the_vendors_operators_decline(keys):
    spec = npu_ops.AttentionSpec(is_causal=True, consistent=True, **keys)
    plan = npu_ops.plan_attention(spec)
    assert plan.runs == "triton_ascend" and "NPU_OPS_CONSISTENT" in plan.why_not("aclnn")


def test_small_blocks_of_a_cache_are_declined_by_name():
    x = torch.zeros(2, 1, 4, 64, dtype=torch.bfloat16)
    cache = torch.zeros(4, 16, 4, 64, dtype=torch.bfloat16)
    table = torch.arange(4, dtype=torch.int32).view(2, 2)
    lengths = torch.tensor([3, 4], dtype=torch.int32)
    with as_if_on("npu"):
        found = explain(npu_ops.attention, x, cache, cache, seqlens_k=lengths, block_table=table)
    reason = next(v.why_not for v in found if v.implementation == "triton_ascend")
    assert reason == (
        "blocks of 16 keys are not a multiple of 64 keys, which NPU_OPS_CONSISTENT needs"
    )
