"""How far a result is from what is expected: one measure for tests, benchmarks and tools."""

from __future__ import annotations

import dataclasses

import torch


@dataclasses.dataclass(frozen=True)
class Tolerance:
    """What may be wrong with a result.

    ratio: RMS of the error over RMS of what is expected.
    max_abs: the largest error of one element, where the largest element expected is about 1;
        larger ones may be proportionally further off.
    """

    ratio: float
    max_abs: float


def tolerances(float64, float32, float16, bfloat16) -> dict[torch.dtype, Tolerance]:
    """By dtype; each is given as (ratio, max_abs)."""
    given = {
        torch.float64: float64,
        torch.float32: float32,
        torch.float16: float16,
        torch.bfloat16: bfloat16,
    }
    return {dtype: Tolerance(*pair) for dtype, pair in given.items()}


# Against fp64 on the same inputs: one rounding to the dtype, after sums over a row in fp32.
ROUNDED_ONCE = tolerances((2e-15, 1e-14), (6e-7, 2e-6), (4e-4, 6e-4), (2.5e-3, 5e-3))


def error_ratio(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """RMS of the error over RMS of `expected`; 0 where both are, NaN if `actual` has one."""
    return _ratio(_error(actual, expected), expected)


def max_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest absolute error over the largest absolute element expected, which counts as 1 at
    least."""
    return _largest(_error(actual, expected)) / max(1.0, _largest(expected))


def assert_close(
    name: str, actual: torch.Tensor, expected: torch.Tensor, tolerance: Tolerance
) -> None:
    """Compare `actual` with `expected`, which may have a wider dtype.

    Raises:
        AssertionError: other shapes, an error beyond `tolerance`, or a NaN.
    """
    if actual.shape != expected.shape:
        raise AssertionError(f"{name}: shape {list(actual.shape)}, expected {list(expected.shape)}")
    error = _error(actual, expected)
    ratio, largest = _ratio(error, expected), _largest(error) / max(1.0, _largest(expected))
    if not (ratio <= tolerance.ratio and largest <= tolerance.max_abs):  # a NaN is not <=
        raise AssertionError(
            f"{name}: error ratio {ratio:.3g} (at most {tolerance.ratio:.3g}), max error "
            f"{largest:.3g} (at most {tolerance.max_abs:.3g}), worst at {_worst(error)}"
        )


def _error(actual, expected):
    return actual.detach().double() - expected.detach()


def _ratio(error, expected):
    wrong = torch.linalg.vector_norm(error).item()
    size = torch.linalg.vector_norm(expected, dtype=torch.float64).item()
    return wrong / size if size else wrong and float("inf")


def _largest(x):
    return torch.linalg.vector_norm(x, ord=float("inf")).item() if x.numel() else 0.0


def _worst(error):
    worst = error.abs().nan_to_num(nan=float("inf")).argmax()
    return [int(i) for i in torch.unravel_index(worst, error.shape)]
