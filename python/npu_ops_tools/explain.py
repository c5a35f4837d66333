"""`npu-ops explain`: shows which NPU operator computes an attention call, and with which arguments.

Example: `npu-ops explain attention layout=TND keys=packed heads=16`.
"""

from __future__ import annotations

import ast
import dataclasses

import npu_ops


def explain(op: str, settings: list[str]) -> npu_ops.AttentionPlan:
    """Return the plan of an attention call: the NPU operator that computes it, and its arguments.

    op: "attention". settings: fields of `AttentionSpec`, each as "name=value".

    Raises:
        ValueError: another op, an unknown field, or a value that the spec rejects.
    """
    if op != "attention":
        raise ValueError(f"op: got {op!r}, needs 'attention', the only op with a plan")
    fields = {field.name: field for field in dataclasses.fields(npu_ops.AttentionSpec)}
    given = {}
    for setting in settings:
        name, separator, text = setting.partition("=")
        if not separator or name not in fields:
            raise ValueError(f"setting: got {setting!r}, needs one of {', '.join(fields)} and =")
        given[name] = _value(name, text, fields[name].type)
    return npu_ops.plan_attention(npu_ops.AttentionSpec(**given))


def _value(name: str, text: str, kind: str):
    """Convert `text` to the field's type."""
    if kind == "str":
        return text
    flags = {"true": True, "1": True, "false": False, "0": False}
    if kind == "bool" and text.lower() in flags:
        return flags[text.lower()]
    if kind.startswith("tuple[str"):
        return tuple(filter(None, text.split(",")))
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        value = None
    wanted = tuple if kind.startswith("tuple") else int
    if kind == "bool" or type(value) is not wanted:
        needs = {"bool": "true or false"}.get(kind, kind.removesuffix(" | None"))
        raise ValueError(f"{name}: got {text!r}, needs {needs}")
    return value
