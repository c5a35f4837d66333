"""Lets slime roll out with an SGLang newer than slime expects; slime fails with it on GPUs, too.

1. From 0.5.20 on, SGLang's arguments are no longer a dataclass, but slime reads them as one.
2. SGLang 0.5.23 takes new weights only between two requests that begin and end the update. slime
   sends neither.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import sys
import types
from collections.abc import Callable, Iterable
from typing import Any

from npu_ops_adapters.patching import Patch

_HOME = "slime.backends.sglang_utils.sglang_engine"
_ENGINE = f"{_HOME}:SGLangEngine"
_FIELDS = "sglang.srt.arg_groups.arg_utils"
# Attribute of slime's engine object: absent between updates, "open" during an update, or "none" if
# this SGLang does not know the two requests.
_SESSION = "_npu_ops_session"
_NOT_FOUND = 404


def patches() -> Iterable[Patch]:
    """Patch the places where slime reads SGLang's arguments and sends weights to a server."""
    if not _is_dataclass():
        yield _patch(f"{_HOME}:dataclasses", _with_records, (), why_not=_why_no_records)
    tensors = "self", "serialized_named_tensors", "load_format", "flush_cache", "weight_version"
    parts = "self", "names", "dtypes", "shapes", "group_name", "flush_cache", "weight_version"
    yield _patch(f"{_ENGINE}.update_weights_from_tensor", _begin_first, (tensors,))
    yield _patch(
        f"{_ENGINE}.update_weights_from_distributed",
        _begin_first,
        (parts, (*parts, "load_format")),  # v0.2.2, 624b824a
    )
    yield _patch(f"{_ENGINE}.continue_generation", _end_first, (("self",),))


def _patch(target: str, make: Callable, signatures: tuple, why_not=None) -> Patch:
    return Patch(
        target=target,
        op="slime_engine",
        make=make,
        why="slime calls the API of an earlier SGLang",
        signatures=signatures,
        versions="slime 624b824a with SGLang 0.5.23",
        remove_when="slime supports SGLang 0.5.23",
        rebind=False,
        why_not=why_not,
    )


def _is_dataclass() -> bool:
    return dataclasses.is_dataclass(getattr(sys.modules.get(_HOME), "ServerArgs", None))


def _record_fields() -> Callable | None:
    try:
        return getattr(importlib.import_module(_FIELDS), "record_fields", None)
    except ImportError:
        return None


def _why_no_records(_) -> str | None:
    return None if _record_fields() else f"{_FIELDS}: has no record_fields"


def _with_records(original: Any) -> Any:
    return types.SimpleNamespace(**vars(original) | {"fields": _record_fields()})


def _begin_first(original: Callable) -> Callable:
    @functools.wraps(original)
    def npu_ops_update(self, *args, **kwargs):
        if not hasattr(self, _SESSION):
            setattr(self, _SESSION, "open" if _begin(self) else "none")
        return original(self, *args, **kwargs)

    return npu_ops_update


def _begin(engine: Any) -> bool:
    """Begin an update. Return False if the server does not know this request."""
    try:
        engine._make_request("begin_weight_update")
    except sys.modules[_HOME].requests.exceptions.HTTPError as error:
        if error.response.status_code != _NOT_FOUND:
            raise
        return False
    return True


def _end_first(original: Callable) -> Callable:
    @functools.wraps(original)
    def npu_ops_continue(self):
        if getattr(self, _SESSION, None) == "open":
            self._make_request("end_weight_update")
            delattr(self, _SESSION)
        return original(self)

    return npu_ops_continue
