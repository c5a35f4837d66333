"""Converts MindSpeed's arguments (a dict or Namespace) to a Namespace, and adds missing ones."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from npu_ops_adapters.mindspeed import VERSIONS
from npu_ops_adapters.patching import Patch


def patches() -> Iterable[Patch]:
    """Patch `repatch`, which takes a dict in some versions and a Namespace in others."""
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
    """Return `args` as a Namespace with all attributes that the features read.

    An object is completed in place. Missing attributes get the default that a feature declares for
    MindSpeed's parser.
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
        except Exception:  # the feature changes an option of Megatron's, which this parser lacks
            continue
    actions = parser._actions
    return {a.dest: a.default for a in actions if a.default is not argparse.SUPPRESS}


class _Both(argparse.Namespace):
    """A Namespace that also has `items()`, so both `vars(args).items()` and `args.items()` work."""

    def items(self):
        return vars(self).items()


def _replace_repatch(original: Callable) -> Callable:
    @functools.wraps(original, assigned=(), updated=())
    def npu_ops_repatch(args):
        return original(_Both(**(args if isinstance(args, Mapping) else vars(args))))

    return npu_ops_repatch
