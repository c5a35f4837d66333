"""Reports captures and replays of graphs, for tests to count."""

from __future__ import annotations

import collections
import json
import sys

import torch

replays: collections.Counter = collections.Counter()  # key: (rows of the graph, tokens of the step)


def watch() -> None:
    """Print "capture begins" and "capture ends" to stderr, and count replays from now on."""
    graph = torch.npu.NPUGraph
    begin, end, replay = graph.capture_begin, graph.capture_end, graph.replay

    def said_begin(self, *args, **kwargs):
        print("capture begins", file=sys.stderr, flush=True)
        begin(self, *args, **kwargs)

    def said_end(self, *args, **kwargs):
        end(self, *args, **kwargs)
        print("capture ends", file=sys.stderr, flush=True)

    def counted(self, *args, **kwargs):
        from vllm.forward_context import get_forward_context

        context = get_forward_context()
        metadata = context.attn_metadata or {}  # none while vLLM warms up
        tokens = {step.num_actual_tokens for step in metadata.values()}
        replays[context.batch_descriptor.num_tokens, max(tokens, default=0)] += 1
        replay(self, *args, **kwargs)

    graph.capture_begin, graph.capture_end, graph.replay = said_begin, said_end, counted


def report() -> None:
    """Print a line of JSON for each kind of replay: ["replayed", rows, tokens, count]."""
    for kind, count in sorted(replays.items()):
        print(json.dumps(["replayed", *kind, count]), flush=True)
