"""Test Megatron's core attention on ranks that share each sequence; see cp_ranks.py."""

import sys
import types

import cp_ranks
import processes
import pytest
import torch
from npu_ops_adapters import context_parallel

CALLS = {"causal": 2, "causal mask": 2}  # one per chunk of the rank; all others need one call


@pytest.mark.parametrize(
    "ranks, version",
    [pytest.param(2, "0.19.2", marks=pytest.mark.slow), (4, "0.16.1")],
)
def test_they_equal_one_in_outputs_and_gradients(tmp_path, ranks, version):
    for found in processes.ranks("cp_ranks.py", tmp_path / "store", ranks, version):
        assert found.keys() == cp_ranks.CASES.keys()
        for case, values in found.items():
            assert values.pop("calls") == CALLS.get(case, 1), case
            assert len(values) == 4 and max(values.values()) < 1e-6, found


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("causal", [True, False])
def test_the_keys_of_packed_chunks(ranks, causal):
    """`Packed.rows` selects, from all ranks' gathered tokens, those that a chunk may attend to."""
    starts = torch.tensor([0, 6 * ranks, 8 * ranks, 8 * ranks, 18 * ranks])
    gathered = torch.cat([cp_ranks.dealt(starts.tolist(), r, ranks) for r in range(ranks)])
    for rank in range(ranks):
        group = types.SimpleNamespace(size=lambda: ranks, rank=lambda rank=rank: rank)
        found = context_parallel.packed(starts, group, causal)
        own = cp_ranks.dealt(starts.tolist(), rank, ranks)
        assert found.queries[-1] == len(own)
        for i in range(len(found.queries) - 1):
            queries = own[found.queries[i] : found.queries[i + 1]]
            start, stop = starts[i // 2], starts[i // 2 + 1]
            end = queries[-1] + 1 if causal and len(queries) else stop if len(queries) else start
            seen = gathered[found.rows[found.keys[i] : found.keys[i + 1]]]
            assert seen.tolist() == list(range(start, end))


def test_what_is_not_whole_chunks_is_left():
    group = types.SimpleNamespace(size=lambda: 2, rank=lambda: 0)
    assert context_parallel.packed(torch.tensor([0, 8, 14]), group, True) is None


def test_what_keeps_megatrons_attention(monkeypatch):
    shared = types.SimpleNamespace(context_parallel_size=2, window_size=None)
    assert context_parallel.why_not(shared) is None
    windowed = types.SimpleNamespace(context_parallel_size=2, window_size=(8, 0))
    assert "got 2 with window_size" in context_parallel.why_not(windowed)
    monkeypatch.setitem(sys.modules, "mindspeed", types.ModuleType("mindspeed"))
    assert "MindSpeed redistributes sequences" in context_parallel.why_not(shared)
