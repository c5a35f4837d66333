"""mrope by torch_npu's npu_mrope: equal to the reference on all calls it takes."""

import pytest
import torch
from npu_ops_tools import parity
from support import declined_by_vendor, forced, on_npu, parametrize_dtypes

import npu_ops
from npu_ops.core import cases
from npu_ops.core.compare import assert_close
from npu_ops.ops.mrope import aclnn

MROPE = npu_ops.apply_multimodal_rotary_pos_emb_cached
TAKEN = [  # sections, section layout, head dimension
    ([24, 20, 20], "interleaved", 128),
    ([24, 20, 20], "chunked", 128),
    ([16, 24, 24], "chunked", 160),
    ([8, 12, 12], "chunked", 96),
]


def inputs(section, layout, head_dim, dtype, device="cpu", tokens=13):
    draw = torch.Generator().manual_seed(0)
    angles = torch.randn(50, sum(section), generator=draw)
    made = {
        "q": torch.randn(tokens, 3 * head_dim, generator=draw),
        "k": torch.randn(tokens, head_dim, generator=draw),
        "cos_sin_cache": torch.cat([angles.cos(), angles.sin()], -1),
    }
    made = {name: x.to(device, dtype) for name, x in made.items()}
    positions = torch.randint(50, (3, tokens), generator=draw).to(device)
    settings = {"mrope_section": section, "section_layout": layout, "head_dim": head_dim}
    return made | {"positions": positions} | settings


def declined(given, monkeypatch):
    """Return why the vendor's operator declines a call on an NPU with torch_npu, or None."""
    return declined_by_vendor(aclnn, "mrope", MROPE, given, monkeypatch)


@on_npu
@parametrize_dtypes()
@pytest.mark.parametrize("pair_layout", ["half", "interleaved"])
@pytest.mark.parametrize("section, layout, head_dim", TAKEN)
def test_it_is_the_reference(device, section, layout, head_dim, pair_layout, dtype):
    given = inputs(section, layout, head_dim, dtype, device) | {"pair_layout": pair_layout}
    expected = parity.by_reference(MROPE, given, ())
    with forced("aclnn", "mrope"):
        actual = parity.evaluate(MROPE, given, ())
        written = given | {n: given[n].clone() for n in ("q", "k")} | {"inplace": True}
        q, _ = MROPE(**written)
    for name, value in actual.items():
        tolerance = cases.tolerance("mrope", name, value, dtype)
        assert_close(name, value, expected[name], tolerance)
    assert q is written["q"] and torch.equal(q.cpu(), actual["output 0"])


@pytest.mark.parametrize("section, layout, head_dim", TAKEN)
def test_what_it_takes(section, layout, head_dim, monkeypatch):
    given = inputs(section, layout, head_dim, torch.bfloat16)
    assert declined(given, monkeypatch) is None


@pytest.mark.parametrize(
    "section, head_dim, changes, said",
    [
        (
            [11, 11, 10],
            64,
            {},
            "mrope_section is [11, 11, 10], the vendor's operator takes [16, 24, 24]",
        ),
        ([24, 20, 20], 136, {}, "multiples of 32"),
        ([24, 20, 20], 128, {"k": None}, "rotates q and k, and has no inverse"),
        ([24, 20, 20], 128, {"cos_sin_cache": torch.zeros(50, 128)}, "takes one dtype"),
    ],
)
def test_what_it_declines(section, head_dim, changes, said, monkeypatch):
    given = inputs(section, "interleaved", head_dim, torch.bfloat16) | changes
    assert said in declined(given, monkeypatch)
