"""MindSpeed's arguments: whole ones, whether a program has a Namespace, a dict or parts of them."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from npu_ops_adapters.mindspeed import VERSIONS
from npu_ops_adapters.patching import Patch


def patches() -> Iterable[Patch]:
    """`repatch`, which takes a dict in some versions and a Namespace in others."""
    yield Patch(
        target="mindspeed.megatron_adaptor:repatch",
        op="mindspeed",
        make=_replace_repatch,
        why="verl passes a dict and slime a Namespace; each version takes one of them",
        signatures=(("args",),),
        versions=VERSIONS,
        remove_when="MindSpeed's repatch takes both",
    )


def complete(args: Any, features: Iterable[Any]) -> Any:
    """`args` as a Namespace, in place if it is an object, with all that the features read.

    What is missing gets the default that the features declare for it, as from MindSpeed's parser.
    """
    if isinstance(args, Mapping):
        args = argparse.Namespace(**args)
    for name, value in _declared(features).items():
        if not hasattr(args, name):
            setattr(args, name, value)
    return args


def _declared(features: Iterable[Any]) -> dict[str, Any]:
    parser = argparse.ArgumentParser(add_help=False, conflict_handler="resolve")
    for feature in features:
        try:
            feature.register_args(parser)
        except Exception:  # it extends an argument that Megatron's parser has, and this one not
            continue
    actions = parser._actions
    return {a.dest: a.default for a in actions if a.default is not argparse.SUPPRESS}


class _Both(argparse.Namespace):
    """What `vars(args).items()` and `args.items()` both read."""

    def items(self):
        return vars(self).items()


def _replace_repatch(original: Callable) -> Callable:
    @functools.wraps(original, assigned=(), updated=())
    def npu_ops_repatch(args):
        return original(_Both(**(args if isinstance(args, Mapping) else vars(args))))

    return npu_ops_repatch
