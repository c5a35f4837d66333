"""A tile that does not fit on chip is halved and launched again; other errors pass through."""

import pytest

from npu_ops.core import log, room


@pytest.fixture
def toy(monkeypatch):
    monkeypatch.setattr(room, "rooms", {})
    monkeypatch.setattr(log, "_said", set())
    return room.Room("toy")


def launching(toy, fits: int, launched: list, complaint: str):
    """Return a function that plans tiles of 64 and raises until they are at most `fits`."""

    @toy.found_for
    def launch(x, *, y):
        launched.append(toy.of(64))
        if launched[-1] > fits:
            raise RuntimeError(complaint)
        return x + y

    return launch


@pytest.mark.parametrize("fits, tried", [(64, [64]), (40, [64, 32]), (16, [64, 32, 16])])
def test_until_they_fit_and_from_then_on(toy, fits, tried):
    launched = []
    launch = launching(toy, fits, launched, "error: ub overflow, requires 1968128 bits")
    assert launch(1, y=2) == 3 and launched == tried
    launched.clear()
    assert launch(1, y=2) == 3 and launched == tried[-1:]


@pytest.mark.parametrize(
    "complaint, tried", [("ub overflow", [64, 32, 16]), ("cannot load x", [64])]
)
def test_another_complaint_and_the_smallest_are_passed_on(toy, complaint, tried):
    launched = []
    with pytest.raises(RuntimeError, match=complaint):
        launching(toy, 0, launched, complaint)(1, y=2)
    assert launched == tried


def test_it_is_said_once(toy, caplog):
    launch = launching(toy, 32, [], "ub overflow")
    launch(1, y=2), launch(1, y=2)
    assert len(caplog.records) == 1 and "toy: this compiler does not fit" in caplog.text
