"""Tensors as rows: a kernel may get a copy of an input, never of an output."""

import pytest
import torch

from npu_ops.core.rows import as_matrix, as_rows, output_matrix

FOLD = {
    "contiguous": lambda x: x,
    "a slice of a projection": lambda x: torch.empty(2, 3, 4, 10)[..., 2:7],
    "every other row": lambda x: torch.empty(2, 6, 4, 5)[:, ::2],
}
DO_NOT = {
    "columns first": lambda x: torch.empty(2, 3, 5, 4).mT,
    "three strides": lambda x: torch.empty(4, 3, 2, 5).permute(2, 1, 0, 3),
}


@pytest.mark.parametrize("make", [*FOLD.values(), *DO_NOT.values()], ids=[*FOLD, *DO_NOT])
def test_an_input_of_any_strides(make):
    x = make(torch.empty(2, 3, 4, 5)).copy_(torch.arange(120.0).view(2, 3, 4, 5))
    rows, out = as_rows([x], [torch.empty(2, 3, 4, 5)])
    assert rows.reshape(24, 5).equal(torch.arange(120.0).view(24, 5)) and rows.stride(-1) == 1
    assert rows.shape == out.shape and as_matrix(x).equal(x.reshape(24, 5))


@pytest.mark.parametrize("make", FOLD.values(), ids=FOLD)
@pytest.mark.parametrize("make_input", [*FOLD.values(), *DO_NOT.values()], ids=[*FOLD, *DO_NOT])
def test_what_is_written_to_an_output_is_the_caller_s(make, make_input):
    out = make(torch.empty(2, 3, 4, 5)).zero_()
    rows, written = as_rows([make_input(torch.empty(2, 3, 4, 5)).fill_(7)], [out])
    written.copy_(rows)
    assert out.eq(7).all()


@pytest.mark.parametrize("make", DO_NOT.values(), ids=DO_NOT)
@pytest.mark.parametrize("make_input", [FOLD["contiguous"], *DO_NOT.values()])
def test_an_output_that_is_no_view_raises(make, make_input):
    inputs, out = [make_input(torch.empty(2, 3, 4, 5))], make(None)
    with pytest.raises(ValueError, match="output: got strides"):
        as_rows(inputs, [out])
    with pytest.raises(ValueError, match="output: got strides"):
        output_matrix(out)


def test_no_output_at_all():
    assert output_matrix(None) is None
