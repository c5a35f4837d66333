"""torch_npu's gated delta rule and causal convolution against plain PyTorch."""

import pytest
import torch
import torch_npu


def inputs(tokens, heads=2, value_heads=4, dim=16):
    torch.manual_seed(0)
    q, k = (
        torch.nn.functional.normalize(torch.randn(tokens, heads, dim), dim=-1) for _ in range(2)
    )
    v, beta = torch.randn(tokens, value_heads, dim), torch.rand(tokens, value_heads)
    return [t.bfloat16() for t in (q, k, v, beta)], -torch.rand(tokens, value_heads)


def reference(q, k, v, beta, g, state, scale):
    """Compute token by token in fp32, with q and k repeated for the value heads."""
    q, k, v, beta = (t.float() for t in (q, k, v, beta))
    q, k = (t.repeat_interleave(v.size(1) // t.size(1), 1) for t in (q, k))
    out = []
    for t in range(len(q)):
        state = state * g[t].exp()[:, None, None]
        delta = (v[t] - torch.einsum("hvk,hk->hv", state, k[t])) * beta[t][:, None]
        state = state + torch.einsum("hv,hk->hvk", delta, k[t])
        out.append(torch.einsum("hvk,hk->hv", state, q[t]) * scale)
    return torch.stack(out), state


def close(actual, expected):
    torch.testing.assert_close(actual.cpu().float(), expected, atol=3e-2, rtol=3e-2)


def test_chunk():
    (q, k, v, beta), g = inputs(9)
    start = torch.randn(2, 4, 16, 16).bfloat16()
    lengths = torch.tensor([4, 5], dtype=torch.int32)
    out, last = torch_npu.npu_chunk_gated_delta_rule(
        q.npu(), k.npu(), v.npu(), beta=beta.npu(), initial_state=start.npu(),
        actual_seq_lengths=lengths.npu(), scale=0.25, g=g.npu(),
    )  # fmt: skip
    for b, part in enumerate((slice(0, 4), slice(4, 9))):
        expected, state = reference(
            q[part], k[part], v[part], beta[part], g[part], start[b].float(), 0.25
        )
        close(out[part], expected)
        close(last[b], state)


def test_recurrent_writes_the_state_of_every_token():
    (q, k, v, beta), g = inputs(3)
    pool = torch.randn(5, 4, 16, 16).bfloat16()
    state, slots = pool.npu(), torch.tensor([4, 1, 2], dtype=torch.int32)
    out = torch_npu.npu_recurrent_gated_delta_rule(
        q.npu(), k.npu(), v.npu(), state, beta=beta.npu(), scale=0.25, g=g.npu(),
        actual_seq_lengths=torch.tensor([3], dtype=torch.int32).npu(),
        ssm_state_indices=slots.npu(),
    )  # fmt: skip
    expected, last = reference(q, k, v, beta, g, pool[4].float(), 0.25)
    close(out, expected)
    close(state[2], last)
    assert torch.equal(state[[0, 3]].cpu(), pool[[0, 3]])


def test_is_rejected():
    (q, k, v, beta), g = inputs(3)
    with pytest.raises(RuntimeError, match="(?s)error code is 161002.*needs bfloat16"):
        torch_npu.npu_recurrent_gated_delta_rule(
            q.npu(), k.npu(), v.npu(), torch.zeros(3, 4, 16, 16).npu(), beta=beta.npu(), scale=1.0,
            actual_seq_lengths=torch.tensor([3], dtype=torch.int32).npu(), g=g.npu(),
        )  # fmt: skip


def test_masked_causal_conv1d():
    x, weight = torch.randn(7, 2, 8).bfloat16(), torch.randn(3, 8).bfloat16()
    ours = [t.npu().requires_grad_() for t in (x, weight)]
    theirs = [t.float().requires_grad_() for t in (x, weight)]
    padded = torch.cat([torch.zeros(2, 2, 8), theirs[0]])
    expected = sum(padded[w : w + 7] * theirs[1][w] for w in range(3))
    out = torch_npu.npu_masked_causal_conv1d(*ours)
    close(out, expected)
    out.float().square().sum().backward()
    expected.square().sum().backward()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.grad.cpu().float(), b.grad, atol=0.3, rtol=5e-2)
