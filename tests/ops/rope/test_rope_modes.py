"""Modes of npu_rotary_mul that npu-ops lacks are refused; the error names an equivalent call.

Tables that require a gradient are refused too, because no rotation of npu-ops computes it.
"""

import pytest
import torch

import npu_ops

Q = torch.randn(2, 5, 3, 16, generator=torch.Generator().manual_seed(0))
ANGLES = torch.randn(5, 8, generator=torch.Generator().manual_seed(1))


def rotated(x, angles, **settings):
    q, _ = npu_ops.apply_rotary_pos_emb(
        x, None, angles.cos(), angles.sin(), layout="BSND", rotary_dim=x.shape[-1], **settings
    )
    return q


def mode(x, turned, angles):
    """Compute npu_rotary_mul's formula, x * cos + turned * sin, with tables as wide as x.

    turned: x with each pair (a, b) replaced by (-b, a).
    """
    cos, sin = (f(angles).repeat(1, 2)[:, None] for f in (torch.cos, torch.sin))
    return x * cos + turned * sin


@pytest.mark.parametrize(
    "name, says", [
        ("quarter", "call with 'half' for each half of a head and of the tables"),
        ("interleave", "which is 'interleaved'"),
        ("interleave-half", "call with 'interleaved', then put even elements before odd ones"),
    ],
)  # fmt: skip
def test_a_mode_is_refused_by_name(name, says):
    tables = torch.zeros(3, 2, 5, 16), torch.zeros(3, 2, 5, 16), [3, 3, 2]
    rows, table = Q.view(10, 48), torch.zeros(10, 16)
    calls = (
        lambda: rotated(Q, ANGLES, pair_layout=name),
        lambda: npu_ops.apply_multimodal_rotary_pos_emb(
            Q, Q, *tables, section_layout="chunked", pair_layout=name
        ),
        lambda: npu_ops.qk_norm_rope(
            rows, Q[0, 0, 0], Q[0, 0, 0], table, table, num_heads=1, num_kv_heads=1,
            pair_layout=name,
        ),
    )  # fmt: skip
    for call in calls:
        with pytest.raises(ValueError, match="^pair_layout: ") as error:
            call()
        assert f"got {name!r}" in str(error.value) and says in str(error.value)


def test_quarter_is_two_calls():
    halves, angles = Q.chunk(2, dim=-1), ANGLES.chunk(2, dim=-1)
    right = [
        mode(x, torch.cat((-x[..., 4:], x[..., :4]), -1), angle)
        for x, angle in zip(halves, angles, strict=True)
    ]
    ours = [rotated(x, angle) for x, angle in zip(halves, angles, strict=True)]
    torch.testing.assert_close(torch.cat(ours, -1), torch.cat(right, -1))


def test_interleave_half_is_interleaved_in_another_order():
    even, odd = Q[..., ::2], Q[..., 1::2]
    right = mode(torch.cat((even, odd), -1), torch.cat((-odd, even), -1), ANGLES)
    ours = rotated(Q, ANGLES, pair_layout="interleaved")
    torch.testing.assert_close(torch.cat((ours[..., ::2], ours[..., 1::2]), -1), right)


def with_gradient(*shape):
    return torch.randn(shape, requires_grad=True)


@pytest.mark.parametrize(
    "name, call", [
        ("cos", lambda t: npu_ops.apply_rotary_pos_emb(Q, None, t(5, 16), torch.zeros(5, 16), 2)),
        ("sin", lambda t: npu_ops.apply_rotary_pos_emb(Q, None, torch.zeros(5, 16), t(5, 16), 2)),
        ("freqs", lambda t: npu_ops.apply_rotary_pos_emb_freqs(Q, None, t(2, 1, 1, 16))),
        ("cos", lambda t: npu_ops.apply_multimodal_rotary_pos_emb(
            Q, Q, t(3, 2, 5, 16), torch.zeros(3, 2, 5, 16), [3, 3, 2], section_layout="chunked",
            unsqueeze_dim=2,
        )),
        ("cos", lambda t: npu_ops.qk_norm_rope(
            Q.view(10, 48), Q[0, 0, 0], Q[0, 0, 0], t(10, 16), torch.zeros(10, 16), num_heads=1,
            num_kv_heads=1,
        )),
    ],
)  # fmt: skip
def test_a_gradient_of_a_table_is_refused_never_missing(name, call):
    with pytest.raises(ValueError, match=f"^{name}: got a tensor that requires a gradient"):
        call(with_gradient)
    with torch.no_grad():
        call(with_gradient)
