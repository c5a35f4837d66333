"""Lets Megatron build its Gated Delta Net without flash-linear-attention (fla).

The module takes `chunk_gated_delta_rule`, `l2norm` and the convolution from fla; other patches
replace these. Without fla the module refuses to build a layer, whatever the configuration. In
deterministic mode the module still computes the delta rule and the convolution with its own
functions.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable

from npu_ops_adapters.patching import Names, Patch
from npu_ops_adapters.patching.signatures import is_ours

MODULE = "megatron.core.ssm.gated_delta_net"
VERSIONS = "Megatron-Core 0.16 to 0.19"


def patches() -> Iterable[Patch]:
    """Patch `HAVE_FLA`, which every layer checks."""
    yield from replaced(
        "HAVE_FLA",
        "gated_delta_net",
        _replace,
        why="without fla Megatron-Core builds no layer, though npu-ops has all functions it needs",
        signatures=(),  # not checked: it is a bool
        remove_when="Megatron-Core checks for the functions instead of for fla",
    )


def replaced(
    name: str, op: str, make: Callable, signatures, module: str | None = None, **changes
) -> Iterable[Patch]:
    """Yield a patch of `name` in the module where layers look it up, if that module is imported.

    module: the module; the default is `home()`. Without fla, `name` is None or missing there. In
    modules that imported it by value, it is None.
    """
    module = module or home()
    if module not in sys.modules:
        return
    settings = {
        "why": (
            "the function is fla's, which is another stack on NPUs; without fla no layer is built"
        ),
        "remove_when": "Megatron-Core calls an operator here that has an NPU kernel",
    }
    yield Patch(
        target=f"{module}:{name}",
        op=op,
        make=make,
        signatures=signatures,
        versions=VERSIONS,
        rebind=False,  # do not rebind it in fla's own modules; `also` lists Megatron's importers
        **(settings | changes),
    )


def method(name: str, op: str, make: Callable, parameters: Names, why: str) -> Iterable[Patch]:
    """Yield a patch of a layer's method, in each class that defines it (none in some versions)."""
    for module, owner, layer in layers():
        if name in vars(layer) and not _is_abstract(vars(layer)[name]):
            target, signatures = f"{owner}.{name}", (("self", *parameters),)
            yield from replaced(target, op, make, signatures, module=module, why=why)


def layers() -> Iterable[tuple[str, str, type]]:
    """Yield (module, name, class) for each class in the modules that define Gated Delta Net."""
    for module in dict.fromkeys((home(), *importers())):
        for name, value in list(vars(sys.modules.get(module, sys)).items()):
            at_home = module == home() or getattr(value, "__module__", None) == module
            if issubclass(type(value), type) and at_home:
                yield module, name, value


def _is_abstract(function) -> bool:
    """Return whether a function only raises NotImplementedError."""
    names = getattr(inspect.unwrap(function), "__code__", None)
    return names is not None and names.co_names == ("NotImplementedError",)


def for_decoding(name: str, op: str, ours: Callable) -> Iterable[Patch]:
    """Yield a patch of fla's function `name` in Megatron's decoding module, if fla is missing.

    The module, only in Megatron's main branch, then sets `name` to None. If fla is installed,
    npu-ops' adapter for fla replaces the function instead.

    ours: takes fla's arguments and returns a function that computes the result.
    """
    decoding = f"{MODULE}.gdn"
    held = vars(sys.modules.get(decoding, sys)).get(name, sys)
    if held is None or is_ours(held):
        yield from replaced(
            name,
            op,
            lambda original: _called(ours),
            (None,),
            module=decoding,
            why="without fla decoding ends in an AssertionError",
        )


def _called(ours: Callable) -> Callable:
    def npu_ops_decoding(*args, **kwargs):
        return ours(*args, **kwargs)()

    return npu_ops_decoding


def home() -> str:
    """Return the module in which layers look up fla's functions.

    From Megatron-Core 0.19 on, gated_delta_net is a package, and they are in its module `common`.
    """
    common = f"{MODULE}.common"
    return common if common in sys.modules else MODULE


def importers() -> Names:
    """Return the modules of the package that import from `common` by value; () without `common`."""
    return (MODULE, f"{MODULE}.gdn") if home() != MODULE else ()


def _replace(original: bool) -> bool:
    missing = [name for name in _needed() if vars(sys.modules[home()]).get(name) is None]
    if missing:
        raise ValueError(f"{', '.join(missing)}: got None, needs the function of npu-ops or fla")
    return True


def _needed() -> Names:
    """Return the names a layer needs. Before Megatron-Core 0.18 causal_conv1d is not needed."""
    convolution = ("causal_conv1d",) if convolution_name() == "causal_conv1d" else ()
    return ("chunk_gated_delta_rule", "l2norm", *convolution)


def convolution_name() -> str:
    """Return the name of fla's convolution, or up to 0.17 that of the package causal-conv1d."""
    known = vars(sys.modules.get(home(), sys))
    return "causal_conv1d_fn" if "causal_conv1d_fn" in known else "causal_conv1d"
