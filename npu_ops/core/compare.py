"""Error measures of results against expected values, shared by tests, benchmarks and tools."""

from __future__ import annotations

import dataclasses

import torch


@dataclasses.dataclass(frozen=True)
class Tolerance:
    """The largest error that a result may have.

    ratio: RMS of the error over RMS of the expected values.
    max_abs: largest absolute error of one element, relative to max(1, largest expected element).
    """

    ratio: float
    max_abs: float


def tolerances(float64, float32, float16, bfloat16) -> dict[torch.dtype, Tolerance]:
    """Return the tolerance of each dtype. Each argument is (ratio, max_abs)."""
    given = {
        torch.float64: float64,
        torch.float32: float32,
        torch.float16: float16,
        torch.bfloat16: bfloat16,
    }
    return {dtype: Tolerance(*pair) for dtype, pair in given.items()}


# For ops that sum along rows in fp32 and round the result once to its dtype. The expected values
# are computed in fp64 from the same inputs.
ROUNDED_ONCE = tolerances((2e-15, 1e-14), (6e-7, 2e-6), (4e-4, 6e-4), (2.5e-3, 5e-3))


def error_ratio(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the RMS of the error over the RMS of `expected`.

    The ratio is 0 if both RMS values are 0, and infinity if only the RMS of `expected` is 0.
    Otherwise it is NaN if `actual` has a NaN.
    """
    return _ratio(_error(actual, expected), expected)


def max_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest absolute error over max(1, largest absolute element of `expected`)."""
    return _largest(_error(actual, expected)) / max(1.0, _largest(expected))


def assert_close(
    name: str, actual: torch.Tensor, expected: torch.Tensor, tolerance: Tolerance
) -> None:
    """Raise unless `actual` is close to `expected`, which may have a wider dtype.

    Raises:
        AssertionError: the shapes differ, the error exceeds `tolerance`, or there is a NaN.
    """
    if actual.shape != expected.shape:
        raise AssertionError(f"{name}: shape {list(actual.shape)}, expected {list(expected.shape)}")
    error = _error(actual, expected)
    ratio, largest = _ratio(error, expected), _largest(error) / max(1.0, _largest(expected))
    if not (ratio <= tolerance.ratio and largest <= tolerance.max_abs):  # <= is False for a NaN
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
