"""Judge one case: make its arguments, call the function, compare with the formula.

`judge(case)` returns None, or one sentence on what is wrong. A case is a dict:

    function, settings, seed   a function of `targets`, and what its arguments are made from
    forms      memory layouts, used in turn for the arguments
    way        a way to call the function, or a transform of it, see `ways`
    grad       whether gradients are computed
    defaults   (dtype, device or None, how they are set), see `ways.defaults`
    rewrite    None, or the route by which all arguments are rewritten between two calls
    malformed  None, or (number of an index argument, list of ways to malform it)
"""

from __future__ import annotations

import inspect
import pkgutil
import re
import warnings

import torch

import npu_ops
from fuzz import files, formula, memory, ways
from fuzz.target import Draw
from fuzz.targets import TARGETS
from npu_ops.core import library

MALFORMED = (
    "negative", "smallest", "huge", "decreasing", "short", "long", "first", "above", "twice",
)  # fmt: skip
FP32 = 2.0**-24  # unit roundoff of fp32
ALLOWED = (ValueError, TypeError, NotImplementedError)
# Names in messages besides the arguments': for a tensor that would be overwritten, for one without
# a gradient, and for parts of `qkv`.
MORE_NAMES = {"inplace", "positions", "q", "k", "v", "p"}


class Wrong(Exception):
    """A wrong outcome, described in one sentence."""


def judge(case: dict) -> str | None:
    """Return None, or what is wrong."""
    library.poison_outputs = True
    torch.manual_seed(case["seed"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            _Case(case).run()
        except Wrong as wrong:
            return str(wrong)
    return None


class _Case:
    """One case while it is judged."""

    def __init__(self, case: dict):
        self.case, self.target = case, TARGETS[case["function"]]
        self.function = getattr(npu_ops, case["function"])
        self.formula = self.target.formula
        self.results_dtypes, self.known = [], []

    def run(self) -> None:
        made = self.make(self.case["seed"])
        for arguments in self.variants(made):
            self.arrange(arguments)
            self.call()

    def make(self, seed: int) -> dict:
        """Return the arguments of the call.

        With gradients, the setting `broken` (a NaN in one sequence) is off, because a NaN reaches
        the gradients of its whole sequence. With malformed indices, the setting `hide` (NaN in
        memory that the call must not read) is off, because such indices may select this memory.
        """
        settings = self.case["settings"]
        if self.case["grad"] or self.case["way"] in ("checkpoint", *ways.TRANSFORMS):
            settings = settings | {"broken": False}
        if self.case["malformed"]:
            settings = settings | {"hide": False}
        if self.case["way"] in ("compiled", *ways.TRANSFORMS):  # ranks cannot communicate there
            settings = settings | {"ranks": None}
        return self.target.make(settings, Draw(seed))

    def variants(self, made: dict) -> list[dict]:
        """Return one set of arguments, or one for each way to malform an index argument."""
        present = [n for n in self.target.indices if made.get(n) is not None and made[n].numel()]
        if not self.case["malformed"] or not present:
            return [made]
        which, hows = self.case["malformed"]
        name = present[which % len(present)]
        return [made | {name: malformed(made[name], how)} for how in hows]

    # Memory

    def arrange(self, arguments: dict) -> None:
        """Lay the arguments out in memory; set `self.tensors`, with parts of tuples, by name."""
        self.plain = {n: x for n, x in arguments.items() if not _has_tensors(x)}
        tensors = dict(_tensors(arguments))
        forms, cycle = {}, self.case["forms"] or ["dense"]
        for i, name in enumerate(tensors):
            allowed = self.target.forms(name, self.case["settings"])
            form = cycle[i % len(cycle)]
            forms[name] = form if allowed is None or form in allowed else "dense"
        self.memories = memory.arranged(tensors, forms)
        self.tensors = {}
        for each in self.memories:
            self.tensors |= each.views
        self.tensors = {name: self.tensors[name] for name in tensors}
        self.writes = tuple(
            n for n in self.target.writes(self.case["settings"]) if n in self.tensors
        )
        if self.case["rewrite"]:
            self.wanted = {name: x.clone() for name, x in self.tensors.items()}

    def arguments(
        self, *, wide: torch.dtype | None = None, noise: torch.Generator | None = None
    ) -> dict:
        """Return the arguments of a call.

        wide: the dtype of copies for the formula; None: the tensors themselves.
        noise: changes the copies by as much as rounding does.
        """
        tensors = {}
        for name, x in self.tensors.items():
            if wide and x.is_floating_point():
                x = x.detach().to(wide).clone()
                if noise is not None:
                    x = x + x * self.unit * (2 * torch.rand(x.shape, generator=noise) - 1)
            tensors[name] = x.clone() if wide else x.detach()
            if name in self.wrt:
                tensors[name].requires_grad_()
        together = dict(self.plain)
        for name, x in tensors.items():
            first, _, part = name.partition(".")
            together[first] = (*together.get(first, ()), x) if part else x
        return together

    @property
    def wrt(self) -> tuple[str, ...]:
        wanted = self.case["grad"] or self.case["way"] == "checkpoint"
        wanted = wanted and self.case["way"] != "inference"
        wanted = wanted and not self.target.inference(self.case["settings"])
        return tuple(n for n in self.target.wrt if wanted and n in self.tensors)

    @property
    def unit(self) -> float:
        """Return the unit roundoff of the call; fp64's only if all inputs and results are fp64."""
        dtypes = [x.dtype for x in self.tensors.values() if x.is_floating_point()]
        if all(dtype == torch.float64 for dtype in dtypes + self.results_dtypes):
            return 2.0**-53
        low = max(torch.finfo(dtype).eps for dtype in dtypes) / 2
        return low if self.target.loose and low > FP32 else FP32

    # Expected results

    def refusal(self) -> str | None:
        """Return the name of an invalid argument, None if all are valid."""
        for each in self.memories:
            if name := each.overlapping(self.writes):
                return name
        if self.writes and self.wrt:
            return "inplace"
        try:
            self.known = [out.known for out in self.formula(**self.arguments(wide=torch.float64))]
        except formula.Refused as refused:
            return str(refused)
        return None

    def expected(self, keep, seeds) -> tuple[dict, dict, dict]:
        """Return expected values, tolerances, and which elements are specified, each by name."""
        right = self.by_formula(keep, seeds)
        noise = torch.Generator().manual_seed(1)
        off = [self.by_formula(keep, seeds, noise) for _ in range(2)]
        narrow = self.by_formula(keep, seeds, dtype=torch.float32)
        limits, known = {}, {}
        met = self.target.met(self.arguments(wide=torch.float64)) if self.wrt else 0.0
        for name, (value, part) in right.items():
            deviation = max(_largest(other[name][0] - value) for other in off)
            # If a sum cancels, its result consists of rounding errors. The fp32 formula shows them.
            deviation += _largest(narrow[name][0] - value) * self.unit / FP32
            size = max(met if name.startswith("gradient") else 0.0, _largest(value))
            limits[name] = self.roundings * (deviation + self.unit * size)
            known[name] = part
        return {name: value for name, (value, _) in right.items()}, limits, known

    @property
    def roundings(self) -> int:
        """Return the allowed number of roundings: few for narrow dtypes, or any result passes."""
        return self.target.roundings if self.unit <= FP32 else 6

    def by_formula(self, keep, seeds, noise=None, dtype=torch.float64) -> dict:
        """Return (value, known) by name, from the formula in `dtype`."""
        arguments = self.arguments(wide=dtype, noise=noise)
        outs = self.formula(**arguments, **({} if keep is None else {"keep": keep}))
        found = {}
        for i, out in enumerate(outs):
            if out.value is not None:
                found[out.argument or f"output {i}"] = (out.value.detach(), out.known)
        if self.wrt:
            leaves = {name: arguments[name] for name in self.wrt}
            wide = [None if seed is None else seed.to(dtype) for seed in seeds]
            if noise is not None:
                wide = [
                    None if s is None
                    else s + s * self.unit * (2 * torch.rand(s.shape, generator=noise) - 1)
                    for s in wide
                ]  # fmt: skip
            values = [None if out.value is None else out.value for out in outs]
            for name, grad in ways.gradients(values, leaves, wide).items():
                found[f"gradient of {name}"] = grad, None
        return found

    # Bits

    def promises_bits(self) -> bool:
        """Return whether docs/invariance.md promises that sequences have the same bits alone.

        The call must pack sequences and must not run by the reference. Raw betas are excluded,
        because PyTorch's sigmoid on CPUs is not invariant.
        """
        arguments = self.arguments()
        if arguments.get("cu_seqlens") is None or self.writes or not self.target.tokens:
            return False
        if arguments.get("use_beta_sigmoid_in_kernel") or arguments.get("cp_group"):
            return False
        rows = npu_ops.explain(self.case["function"], **arguments)
        chosen = [row.implementation for row in rows if row.why_not is None]
        return chosen != ["reference"] and not self.case["settings"].get("before")

    def compare_with_alone(self, actual: dict) -> None:
        """Raise Wrong unless each sequence has the bits of a call with this sequence alone.

        Outputs and final states are compared.
        """
        arguments = {
            n: x.detach() if isinstance(x, torch.Tensor) else x for n, x in self.arguments().items()
        }
        outputs = [actual[name] for name in sorted(actual) if name.startswith("output")]
        starts = arguments["cu_seqlens"].tolist()
        for n, (begin, end) in enumerate(zip(starts, starts[1:], strict=False)):
            if begin == end:
                continue
            few = arguments | {"cu_seqlens": None}
            for name in self.target.tokens:
                few[name] = few.get(name) if few.get(name) is None else few[name][:, begin:end]
            for name in self.target.states:
                few[name] = few.get(name) if few.get(name) is None else few[name][n : n + 1]
            for i, out in enumerate(ways.listed(self.function(**few))):
                if out is None:
                    continue
                state = arguments["output_final_state"] and i == len(outputs) - 1
                whole = outputs[i][n : n + 1] if state else outputs[i][:, begin:end]
                if not torch.equal(memory.bits(out), memory.bits(whole.detach())):
                    raise Wrong(f"output {i} of sequence {n} has other bits alone")

    # The call

    def call(self) -> None:
        case, refusal = self.case, self.refusal()
        may_raise = refusal is not None or bool(case["malformed"])
        if case["way"] in ways.TRANSFORMS:
            if not may_raise:
                self.transform()
            return
        if not hasattr(self, "caller"):
            self.caller = ways.caller(self.function, case["way"], case["seed"], refused=may_raise)
        try:
            actual, seeds = self.results(rewritten=case["rewrite"] and not may_raise)
        except files.Taken as error:
            raise Wrong(str(error)) from error
        except Exception as error:
            self.check_refusal(error, refusal)
            return
        if refusal is not None and not self.follows_none(actual):
            raise Wrong(f"accepted, though {refusal} has no meaning")
        self.check_memory(self.writes)
        if refusal is None:
            self.compare(actual, seeds)
        if not may_raise and case["way"] == "alone" and self.promises_bits():
            self.compare_with_alone(actual)

    def follows_none(self, actual: dict) -> bool:
        """Return whether a call with invalid arguments did nothing: outputs empty, nothing written.

        False for eager calls, which must raise.
        """
        outputs = [x for name, x in actual.items() if name.startswith("output")]
        same = all(
            torch.equal(memory.bits(actual[name]), memory.bits(self.before[name]))
            for name in self.writes
        )
        return same and not any(x.numel() for x in outputs) and self.case["way"] != "eager"

    def results(self, rewritten: bool) -> tuple[dict, list]:
        """Return the results by name, and the gradients of the outputs that were used."""
        if rewritten:
            self.call_with_other_numbers()
        for each in self.memories:
            each.remember()
        before = {name: x.clone() for name, x in self.tensors.items()}
        arguments = self.arguments()
        with ways.defaults(*self.case["defaults"]):
            outputs = ways.listed(self.caller(**arguments))
            seeds = self.seeds(outputs)
            leaves = {name: arguments[name] for name in self.wrt}
            grads = ways.gradients(outputs, leaves, seeds) if leaves else {}
        self.results_dtypes = [out.dtype for out in outputs if out is not None]
        actual = {f"output {i}": out for i, out in enumerate(outputs) if out is not None}
        actual |= {name: self.tensors[name] for name in self.writes}
        actual |= {f"gradient of {name}": grad for name, grad in grads.items()}
        self.keep = None
        if self.target.drops:
            wide = {n: x.double() if x.is_floating_point() else x for n, x in before.items()}
            self.keep = self.target.drops(self.plain | wide, outputs)
        self.before = before
        return actual, seeds

    def call_with_other_numbers(self) -> None:
        """Call with other values in the same memory, then write this case's values by `rewrite`."""
        other = self.make(self.case["seed"] + 1)
        for name, x in _tensors(other):
            memory.rewrite(self.tensors[name], x, "data")
        with ways.defaults(*self.case["defaults"]):
            self.caller(**self.arguments())
        for name, x in self.wanted.items():
            memory.rewrite(self.tensors[name], x, self.case["rewrite"])

    def seeds(self, outputs) -> list:
        """Return a gradient for each output, 0 where its elements are not specified."""
        draw, known = Draw(self.case["seed"] + 77), [*self.known, *[None] * len(outputs)]
        return [
            None if out is None else multiplier(draw, out, out.dtype, part)
            for out, part in zip(outputs, known, strict=False)
        ]

    # Verdicts

    def compare(self, actual: dict, seeds: list) -> None:
        after = {name: x.clone() for name, x in self.tensors.items()}
        for name, x in self.before.items():
            if name in self.writes:
                self.tensors[name].copy_(x)
        right, limits, known = self.expected(self.keep, seeds)
        actual = actual | {name: after[name] for name in self.writes}
        for name, value in right.items():
            if name not in actual:
                raise Wrong(f"{name} is missing")
            compare(name, actual[name], value, limits[name], known[name])
        for name in actual.keys() - right.keys():
            if not (name.startswith("output") and self.writes):
                raise Wrong(f"{name}: there is one, expected none")

    def check_refusal(self, error, refusal) -> None:
        check_message(self.case["function"], error)
        if refusal is None:
            raise Wrong(f"refused, though it has an answer: {type(error).__name__}: {_line(error)}")
        self.check_memory(())

    def check_memory(self, writes) -> None:
        for each in self.memories:
            if text := each.touched(writes):
                raise Wrong(text)

    # Transforms

    def transform(self) -> None:
        """Compare a transform of the function with that of the formula.

        A function may refuse a transform with an error that names an argument.
        """
        wrt = tuple(n for n in self.target.wrt if n in self.tensors)
        if self.target.inference(self.case["settings"]):
            return
        if not wrt or self.writes or self.plain.get("p") or self.plain.get("dropout_p"):
            return
        # torch's dual tensors reject expanded memory, see
        # test_torch_makes_no_dual_of_expanded_memory.
        self.tensors = {
            name: x.clone() if memory.is_expanded(x) else x for name, x in self.tensors.items()
        }
        arguments = self.arguments()
        outs = self.formula(**self.arguments(wide=torch.float64))
        plain = [out.value for out in outs]
        known = [out.known for out in outs if out.value is not None]
        draw = Draw(self.case["seed"] + 77)
        directions = {name: draw.normal(*self.tensors[name].shape, dtype="float64") for name in wrt}
        how = self.case["way"]
        with torch.no_grad():
            results = ways.listed(self.function(**arguments))
        self.results_dtypes = [x.dtype for x in results if x is not None]
        directions["seeds"] = [
            multiplier(draw, out, dtype, part).double()
            for out, dtype, part in zip(
                (x for x in plain if x is not None), self.results_dtypes, known, strict=True
            )
        ]
        try:
            if how == "twice":
                self.twice(arguments, wrt, directions["seeds"])
                return
            actual = ways.transformed(self.function, arguments, wrt, how, directions)
        except Exception as error:
            check_message(self.case["function"], error)
            return

        def formula(**arguments):
            return tuple(out.value for out in self.formula(**arguments))

        cancelled = {}
        if how == "func.vmap":
            right = {f"output {i}": x for i, x in enumerate(x for x in plain if x is not None)}
        else:
            same = how if how == "func.grad" else "func.jvp"
            right, narrow = (
                ways.transformed(formula, self.arguments(wide=dtype), wrt, same, directions)
                for dtype in (torch.float64, torch.float32)
            )
            cancelled = {name: _largest(narrow[name] - right[name]) for name in right}
        limit = max(self.unit * self.target.roundings, 16 * self.lowest()) * 4
        parts = {} if how == "func.grad" else dict(zip(right, known, strict=True))
        for name, value in right.items():
            if actual[name] is None:
                raise Wrong(f"{name}: none")
            off = limit * max(1.0, _largest(value), cancelled.get(name, 0.0) / FP32)
            compare(name, actual[name], value, off, parts.get(name))

    def lowest(self) -> float:
        given = [x.dtype for x in self.tensors.values() if x.is_floating_point()]
        return max(torch.finfo(dtype).eps for dtype in given + self.results_dtypes)

    def twice(self, arguments, wrt, seeds) -> None:
        """Compare second derivatives. A missing one must be refused by an error, not be None."""
        leaves = {name: arguments[name].requires_grad_() for name in wrt}
        outputs = [out for out in ways.listed(self.function(**arguments)) if out is not None]
        pairs = [(o, s.to(o.dtype)) for o, s in zip(outputs, seeds, strict=True) if o.requires_grad]
        if not pairs:
            return
        outs, grads = zip(*pairs, strict=True)
        first = torch.autograd.grad(
            outs, list(leaves.values()), grads, create_graph=True, allow_unused=True
        )
        total = sum((g.double() ** 2).sum() for g in first if g is not None and g.requires_grad)
        if not isinstance(total, torch.Tensor):
            return
        second = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)

        wide = self.arguments(wide=torch.float64)
        leaves = {name: wide[name].requires_grad_() for name in wrt}
        outputs = [out.value for out in self.formula(**wide) if out.value is not None]
        first = torch.autograd.grad(
            outputs, list(leaves.values()), [s.double() for s in seeds], create_graph=True,
            allow_unused=True,
        )  # fmt: skip
        total = sum((g**2).sum() for g in first if g is not None)
        right = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
        for name, a, b in zip(wrt, second, right, strict=True):
            if b is not None and _largest(b) and a is not None:
                limit = 64 * self.lowest() * max(1.0, _largest(b))
                compare(f"second gradient of {name}", a, b, limit, None)
            elif b is not None and _largest(b):
                raise Wrong(f"second gradient of {name}: none")


def compare(name: str, actual, right: torch.Tensor, limit: float, known) -> None:
    """Raise Wrong unless `actual` is `right`, rounded to its dtype, within `limit`."""
    if not isinstance(actual, torch.Tensor):
        raise Wrong(f"{name}: got {type(actual).__name__}")
    if actual.device.type != "cpu":
        raise Wrong(f"{name}: on {actual.device}")
    if actual.shape != right.shape:
        raise Wrong(f"{name}: shape {list(actual.shape)}, expected {list(right.shape)}")
    if not right.numel():
        return
    right = right.detach()
    known = torch.ones_like(right, dtype=torch.bool) if known is None else known.expand(right.shape)
    rounded = right.to(actual.dtype)  # infinite where it overflows
    same = (actual == rounded) | (actual.isnan() & right.isnan())
    info = torch.finfo(actual.dtype)
    error = (actual.detach().double() - right).abs()
    near = error <= limit + right.abs() * (info.eps / 2) + info.smallest_normal
    bad = known & ~(same | near)
    if not bad.any():
        return
    if (bad & actual.isnan() & ~right.isnan()).any():
        raise Wrong(f"{name}: NaN where the formula has numbers, {int(bad.sum())} of {bad.numel()}")
    worst = float(torch.where(bad, error, 0).nan_to_num(posinf=1e300).max())
    raise Wrong(f"{name}: off by {worst:.3g}, {int(bad.sum())} of {bad.numel()} elements, "
                f"at most {limit:.3g} and a rounding allowed")  # fmt: skip


def check_message(function: str, error: Exception) -> None:
    """Raise Wrong unless an error is a refusal that names an argument.

    A kernel that finds a wrong index value can only raise a RuntimeError, as torch's assertions do.
    Its text is like ours, after the source location that torch puts first.
    """
    names = {*inspect.signature(getattr(npu_ops, function)).parameters, *MORE_NAMES}
    operators = {function, *(op.name for op in pkgutil.iter_modules(npu_ops.ops.__path__))}
    names |= operators | {f"{op}_backward" for op in operators}
    text = str(error)
    if type(error).__name__ == "TorchRuntimeError":  # Dynamo wraps an error from a fake kernel
        inner = re.search(r"got (\w+)\('(.*)'\)$", text, re.MULTILINE)
        named = {allowed.__name__: allowed for allowed in ALLOWED}
        if inner and inner[1] in named:
            error, text = named[inner[1]](inner[2]), inner[2]
    if type(error) in ALLOWED:
        name = re.match(r"([\w.]+): ", text)
        if name and name[1] in names:
            return
        raise Wrong(f"{type(error).__name__} that names no argument: {_line(error)}")
    kernels = type(error) is RuntimeError and re.search(r"(?:csrc/\S+, |^)(\w+): .*needs ", text)
    if not kernels or kernels[1] not in names:
        raise Wrong(f"{type(error).__name__}: {_line(error)}")


def multiplier(draw: Draw, out: torch.Tensor, dtype: torch.dtype, known) -> torch.Tensor:
    """Return random numbers in `dtype`, 0 where the output is not specified."""
    seed = draw.normal(*out.shape, dtype="float64").to(dtype)
    return seed if known is None else seed * known


def malformed(x: torch.Tensor, how: str) -> torch.Tensor:
    """Return index values that are usually invalid; the formula decides."""
    x, info = x.clone(), torch.iinfo(x.dtype)
    flat = x.view(-1)
    middle = flat.numel() // 2
    match how:
        case "negative":
            flat[middle] = -1
        case "smallest":
            flat[middle] = info.min
        case "huge":
            flat[middle] = info.max
        case "decreasing":
            flat.copy_(flat.flip(0))
        case "short":
            flat[-1] -= 1
        case "long":
            flat[-1] += 7
        case "first":
            flat[0] += 1
        case "above":
            flat[middle] = flat.max() + 1
        case "twice":
            flat.fill_(int(flat[0]))
    return x


def _has_tensors(x) -> bool:
    return isinstance(x, torch.Tensor) or isinstance(x, tuple) and any(map(_has_tensors, x))


def _tensors(arguments: dict):
    """Yield (name, tensor), also for the parts of a tuple."""
    for name, x in arguments.items():
        if isinstance(x, torch.Tensor):
            yield name, x
        elif _has_tensors(x):
            yield from ((f"{name}.{i}", part) for i, part in enumerate(x))


def _largest(x: torch.Tensor) -> float:
    x = x[x.isfinite()]
    return float(x.abs().max()) if x.numel() else 0.0


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
