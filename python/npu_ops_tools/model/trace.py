"""Writes predicted timelines as a Chrome trace, for chrome://tracing or ui.perfetto.dev."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterable

from npu_ops_tools.model.prediction import LABEL, Prediction


def write(path: pathlib.Path, predictions: Iterable[Prediction]) -> None:
    """Write a trace of one program of each kernel. Times are in microseconds.

    Each kernel is shown as a process, and each pipe of a core as a thread.
    """
    events = []
    for number, prediction in enumerate(predictions):
        events.append(
            _name(number, f"{prediction.kernel} ({LABEL}, {prediction.soc}, one program)")
        )
        threads = [(core, span) for core, spans in prediction.spans.items() for span in spans]
        events.extend(_event(number, core, span) for core, span in threads)
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ns"}))


def _name(process: int, name: str) -> dict:
    return {"ph": "M", "name": "process_name", "pid": process, "args": {"name": name}}


def _event(process: int, core: str, span) -> dict:
    return {
        "ph": "X", "pid": process, "tid": f"{core}.{span.pipe}", "name": span.name,
        "ts": span.start, "dur": span.end - span.start,
    }  # fmt: skip
