"""Gated Delta Net: Megatron's module builds without flash-linear-attention once its names are ours.

It takes `chunk_gated_delta_rule`, `l2norm` and the convolution from fla, each its own patch, and
without fla refuses to build a layer, whatever the configuration. In deterministic mode it goes on
to compute the delta rule and the convolution by its own functions.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable

from npu_ops_adapters.patching import Names, Patch

MODULE = "megatron.core.ssm.gated_delta_net"
VERSIONS = "Megatron-Core 0.16 to 0.19"


def patches() -> Iterable[Patch]:
    """`HAVE_FLA`, which every layer asks."""
    yield from replaced(
        "HAVE_FLA",
        "gated_delta_net",
        _replace,
        why="without fla no layer is built, though all that it needs of fla is here",
        signatures=(),  # a bool
        remove_when="Megatron-Core asks for functions instead of for fla",
    )


def replaced(name: str, op: str, make: Callable, signatures, **changes) -> Iterable[Patch]:
    """A patch of `name` where the layers look it up, once that is imported.

    Without fla it is None there, or was never set, and modules that imported it hold None.
    """
    if home() not in sys.modules:
        return
    settings = {
        "why": "it is fla's: on NPUs another stack, and without it no layer is built",
        "remove_when": "Megatron-Core calls an operator here that has an NPU kernel",
    }
    yield Patch(
        target=f"{home()}:{name}",
        op=op,
        make=make,
        signatures=signatures,
        versions=VERSIONS,
        rebind=False,  # fla's own modules have it too; `also` says who else of Megatron's
        **(settings | changes),
    )


def method(name: str, op: str, make: Callable, parameters: Names, why: str) -> Iterable[Patch]:
    """A patch of a method of the layer, in the class that defines it; some versions have it not."""
    module = sys.modules.get(home())
    for owner, value in list(vars(module).items()) if module else ():
        if issubclass(type(value), type) and name in vars(value):
            yield from replaced(f"{owner}.{name}", op, make, (("self", *parameters),), why=why)


def home() -> str:
    """Where the names are looked up: `common`, where GatedDeltaNet is a package (from 0.19 on)."""
    common = f"{MODULE}.common"
    return common if common in sys.modules else MODULE


def importers() -> Names:
    """The modules of that package that import from `common` by value."""
    return (MODULE, f"{MODULE}.gdn") if home() != MODULE else ()


def _replace(original: bool) -> bool:
    missing = [name for name in _needed() if vars(sys.modules[home()]).get(name) is None]
    if missing:
        raise ValueError(f"{', '.join(missing)}: got None, needs ours or fla's")
    return True


def _needed() -> Names:
    """causal_conv1d is fla's from 0.18 on; before, layers do without the other package's."""
    convolution = ("causal_conv1d",) if convolution_name() == "causal_conv1d" else ()
    return ("chunk_gated_delta_rule", "l2norm", *convolution)


def convolution_name() -> str:
    """fla's, or that of the package causal-conv1d (up to 0.17)."""
    known = vars(sys.modules.get(home(), sys))
    return "causal_conv1d_fn" if "causal_conv1d_fn" in known else "causal_conv1d"
