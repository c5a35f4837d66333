"""Skips MindSpeed's command-line options that Relax has defined; argparse rejects duplicates."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Iterable
from typing import Any

from npu_ops_adapters.patching import Patch

_MODULE = "mindspeed.features_manager.functional.profile"


def patches() -> Iterable[Patch]:
    """Patch MindSpeed's method that adds profiler options; Relax has already added some of them."""
    yield Patch(
        target=f"{_MODULE}:ProfileFeature.register_args",
        op="relax_arguments",
        make=_add_missing,
        why="Relax also adds --profile-with-stack and --profile-with-memory: a conflict",
        signatures=(("self", "parser"),),
        versions="Relax 36a3e048, MindSpeed core_r0.16.0",
        remove_when="MindSpeed checks whether an option exists",
    )


def _add_missing(original: Callable) -> Callable:
    @functools.wraps(original)
    def npu_ops_register(self, parser):
        return original(self, _Parser(parser))

    return npu_ops_register


class _Parser:
    """Wraps a parser of argparse or an argument group; skips store_true options that exist."""

    def __init__(self, target: Any):
        self._target = target

    def __getattr__(self, name):
        return getattr(self._target, name)

    def add_argument_group(self, *args, **kwargs):
        return _Parser(self._target.add_argument_group(*args, **kwargs))

    def add_argument(self, *names, **options):
        there = self._target._option_string_actions.get(names[0])
        if type(there) is argparse._StoreTrueAction and options.get("action") == "store_true":
            return there
        return self._target.add_argument(*names, **options)
