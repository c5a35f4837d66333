"""The description of a public function for the fuzzer: settings, arguments, formula.

Settings are plain values that hypothesis draws and shrinks. `make` turns them and a seed into
arguments that the docstring allows. Another seed gives other numbers in the same shapes, also other
lengths and indices.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import torch
from hypothesis import strategies as st
from torch import distributed

SIZES = (1, 2, 3, 5, 8)
TOKENS = (3, 1, 2, 0, 5, 9)
DTYPES = ("float32", "bfloat16", "float16", "float64")
INDEX = ("int64", "int32")
NAN = float("nan")


class Drawn(NamedTuple):
    """A setting: its simplest value, and hypothesis's strategy for it."""

    simplest: object
    strategy: st.SearchStrategy


@dataclasses.dataclass(frozen=True)
class Target:
    """A public function.

    formula: returns the expected results, see `formula.py`.
    fields: settings by name: a tuple of all values, the simplest first, or `Drawn`.
    make: (settings, draw) -> arguments.
    wrt: arguments with a gradient.
    indices: arguments with index values.
    writes: settings -> arguments that it overwrites.
    inference: settings -> whether it has no gradient.
    forms: (argument, settings) -> allowed memory layouts; None: any.
    roundings: allowed error of an output, in roundings of its largest number.
    loose: whether intermediate results have the inputs' dtype instead of fp32.
    met: arguments -> the largest intermediate number of the gradients. The tolerance needs it where
      such numbers cancel: the formula, in fp64, shows only the small result.
    tokens: arguments with a row per token, [1, T, ...].
    states: arguments with a row per sequence. `judge` uses `tokens` and `states` to compare each
      packed sequence, bit for bit, with a call that has only this sequence.
    drops: (arguments, outputs) -> which elements dropout kept, for the formula's argument `keep`.
    """

    formula: Callable[..., list]
    fields: dict
    make: Callable[[dict, Draw], dict]
    wrt: tuple[str, ...] = ()
    writes: Callable[[dict], tuple[str, ...]] = lambda s: ()
    inference: Callable[[dict], bool] = lambda s: False
    indices: tuple[str, ...] = ()
    forms: Callable[[str, dict], tuple[str, ...] | None] = lambda name, s: None
    roundings: int = 32
    loose: bool = False
    met: Callable[[dict], float] = lambda arguments: 1.0
    tokens: tuple[str, ...] = ()
    states: tuple[str, ...] = ("initial_state",)
    drops: Callable[[dict, list], object] | None = None

    @property
    def settings(self) -> st.SearchStrategy:
        """Return the strategy for all settings: either all are drawn, or only a few.

        With many values per setting a plain call is rare, and a defect that only plain calls have
        would stay hidden (Groce et al., "Swarm Testing", 2012).
        """
        drawn = st.fixed_dictionaries({
            name: field.strategy if isinstance(field, Drawn) else st.sampled_from(field)
            for name, field in self.fields.items()
        })  # fmt: skip
        few = st.frozensets(st.sampled_from(list(self.fields)))
        return st.builds(self._with, drawn, st.none() | few)

    def _with(self, settings: dict, names: frozenset[str] | None) -> dict:
        """Return `settings`, with the simplest value for each that is not in `names`."""
        if names is None:
            return settings
        return {n: x if n in names else self.simplest[n] for n, x in settings.items()}

    @property
    def simplest(self) -> dict:
        """Return the simplest value of each setting."""
        return {name: field[0] for name, field in self.fields.items()}


class Draw:
    """Random numbers from a seed."""

    def __init__(self, seed: int):
        self.generator = torch.Generator(device="cpu").manual_seed(seed)

    def normal(self, *shape, dtype="float32"):
        x = torch.randn(shape, generator=self.generator, dtype=torch.float64, device="cpu")
        return x.to(getattr(torch, dtype))

    def uniform(self, low, high, *shape, dtype="float32"):
        x = torch.rand(shape, generator=self.generator, dtype=torch.float64, device="cpu")
        return (low + (high - low) * x).to(getattr(torch, dtype))

    def integers(self, below, *shape, dtype="int64"):
        x = torch.randint(max(below, 1), shape, generator=self.generator, device="cpu")
        return x.to(getattr(torch, dtype))

    def shuffled(self, values: list) -> list:
        order = torch.randperm(len(values), generator=self.generator, device="cpu")
        return [values[i] for i in order]

    def starts(self, lengths: list[int], dtype="int64"):
        """Return cu_seqlens of sequences with these lengths, in random order."""
        lengths = torch.tensor([0, *self.shuffled(lengths)], dtype=torch.int64, device="cpu")
        return lengths.cumsum(0).to(getattr(torch, dtype))

    def distinct(self, count: int, below: int) -> list[int]:
        return self.shuffled(list(range(below)))[:count]


def tensor(values, dtype="int64"):
    return torch.tensor(values, dtype=getattr(torch, dtype), device="cpu")


YES, NO = (True, False), (False, True)
LENGTHS = Drawn(None, st.none() | st.lists(st.integers(0, 6), min_size=1, max_size=4))
SHAPE = Drawn([], st.lists(st.sampled_from(TOKENS), max_size=3))


RANKS = (None, "contiguous", "zigzag", "other", "no group")


def one_rank():
    """Return a process group that has only this process."""
    if not distributed.is_initialized():
        store = distributed.HashStore()
        distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    return distributed.group.WORLD


def ranks(s) -> dict:
    """Return the context-parallel arguments for the setting `ranks`, one of RANKS."""
    if s["ranks"] is None:
        return {}
    if s["ranks"] == "no group":
        return {"cp_layout": "zigzag"}
    return {"cp_group": one_rank(), "cp_layout": s["ranks"]}


def packed(s, draw, tokens_name="tokens"):
    """Return (batch, tokens, cu_seqlens).

    They come from the settings "lengths" and "behind", the number of tokens after the last
    sequence, or from "batch" and "tokens".
    """
    if s["lengths"] is None:
        return s["batch"], s[tokens_name], None
    return 1, sum(s["lengths"]) + s["behind"], draw.starts(s["lengths"], s["index"])
