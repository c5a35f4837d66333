"""NPU graphs: a captured call, replayed with other inputs, gives the results of the call.

A capture fails if the host reads, copies or waits. Servers decode by graphs, so decoding must do
none of these. Training and prefill may need lengths on the host.
"""

import concurrent.futures
import time

import pytest
import torch
from npu_ops_tools.where import ops
from support import forced, implementations, on_npu

from npu_ops.core import cases
from npu_ops.core.registry import Table


def captured(function, inputs):
    """Capture a call; return the graph and its outputs, which a replay fills."""
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        outputs = function(**inputs)
    return graph, listed(outputs)


def listed(outputs) -> list:
    return [x for x in (outputs if isinstance(outputs, tuple) else [outputs]) if x is not None]


def tensors(inputs) -> dict:
    return {name: x for name, x in inputs.items() if isinstance(x, torch.Tensor)}


def chosen():
    """Yield (op, case, implementation, device) for NPUs.

    Left out are dropout, whose seeds the host draws, and the vendor's attention, which takes few of
    these calls.
    """
    for op in ops():
        for case in cases.of(op).CASES:
            if case.name not in cases.of(op).REPRESENTATIVE or case.name == "dropout":
                continue
            for one in implementations(Table.tables[op]):
                name = f"{op}-{case.name}-{'-'.join(one.values)}"
                if one.values[1] == "npu" and one.values[0] != "aclnn":
                    yield pytest.param(op, case, *one.values, id=name, marks=one.marks)


@pytest.mark.parametrize("op, case, implementation, device", chosen())
def test_a_replay_is_the_call(op, case, implementation, device):
    function, dtype = cases.function(op, case), torch.bfloat16

    def drawn(seed):
        inputs = case.inputs(dtype, device, seed)
        return inputs | ({"training": False} if "training" in inputs else {})

    with torch.no_grad(), forced(implementation, op):
        function(**drawn(0))  # compiles kernels and builds tables
        given, other, expected = drawn(0), drawn(1), drawn(1)
        results = listed(function(**expected))
        graph, outputs = captured(function, given)
        for name, x in tensors(given).items():
            x.copy_(other[name])
        graph.replay()
    for found, right in zip(outputs, results, strict=True):
        assert torch.equal(found, right)
    for name, x in tensors(given).items():  # also tensors written in place
        assert torch.equal(x, expected[name]), name


@pytest.mark.parametrize(
    "of_host",
    [
        lambda x: x.sum().item(), lambda x: x.cpu(), lambda x: torch.npu.synchronize(),
        lambda x: torch.tensor([1.0, 2.0], device="npu"),
    ],
    ids=["a read", "a copy", "a wait", "a new tensor of numbers"],
)  # fmt: skip
def a_capture_refuses(of_host, device):
    x = torch.zeros(3, device=device)
    with pytest.raises(RuntimeError, match="a stream is being captured"):
        captured(of_host, {"x": x})
    graph, (y,) = captured(lambda x: x + 1, {"x": x})  # a capture after a refused one works
    x.fill_(4)
    graph.replay()
    assert y.tolist() == [5, 5, 5]


test_a_capture_refuses = on_npu(a_capture_refuses)


def decoding(device):
    """Return a graph of attention with lengths from the host, its output, and the eager call."""
    q = torch.randn(2, 1, 64, device=device, dtype=torch.float16)
    cache = torch.randn(4, 128, 64, device=device, dtype=torch.float16)
    settings = {
        "num_heads": 4, "num_key_value_heads": 4, "input_layout": "BSH", "scale": 0.25,
        "block_size": 128,
        "block_table": torch.tensor([[1], [3]], device=device, dtype=torch.int32),
    }  # fmt: skip
    operator = torch.ops.npu.npu_fused_infer_attention_score
    out, logs = torch.empty_like(q), q.new_empty(1)
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph, auto_dispatch_capture=True):
        operator.out(
            q, cache, cache, actual_seq_lengths_kv=[0, 0], **settings,
            workspace=q.new_empty(1), out=[out, logs],
        )  # fmt: skip
    return graph, out, lambda n: operator(q, cache, cache, actual_seq_lengths_kv=n, **settings)[0]


def update(graph, lengths, after=0.0):
    time.sleep(after)
    graph.update(cpu_update_input=[{"actual_seq_lengths_kv": lengths}])


def a_replay_waits_for_lengths_that_another_thread_gives(device):
    """As in SGLang, another thread sets the lengths while the graph runs."""
    graph, out, attended = decoding(device)
    for lengths in ([5, 0], [9, 100]):
        with concurrent.futures.ThreadPoolExecutor() as pool:
            updated = pool.submit(update, graph, lengths, 0.2)
            graph.replay()
            updated.result()
        assert torch.equal(out, attended(lengths)), lengths
    assert not out.isnan().any()


test_a_replay_waits_for_lengths = on_npu(a_replay_waits_for_lengths_that_another_thread_gives)


def a_replay_waits_for_lengths_that_the_same_thread_gives(device):
    """As in vLLM, replay returns at once, and then the same thread sets the lengths."""
    graph, out, attended = decoding(device)
    for lengths in ([5, 0], [9, 100]):
        graph.replay()
        update(graph, lengths)
        copied = out.clone()  # later work on the stream waits for the replay
        assert torch.equal(copied, attended(lengths)), lengths


test_lengths_after_a_replay = on_npu(a_replay_waits_for_lengths_that_the_same_thread_gives)
