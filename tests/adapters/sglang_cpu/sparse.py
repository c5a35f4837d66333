"""Check Qwen4-Exp's sparse attention on CPU tensors; print a line of JSON for each check.

python -m sglang_cpu.each sparse

Our functions are compared with SGLang's own PyTorch functions, which the hooks wrap.
"""

import importlib
import types
from unittest import mock

import torch
from outcomes import error_of

from npu_ops.core import env
from sglang_cpu.checks import ROPE, calls_of, close, embedding, rows

QSA = "sglang.srt.layers.attention.qsa"
CHECKS = []


def check(function):
    CHECKS.append(function)
    return function


def indexer(rotary):
    """Return the indexer's class, and an object with the attributes that its methods read."""
    cls = importlib.import_module(f"{QSA}.qsa_indexer").QSAIndexer
    return cls, types.SimpleNamespace(rotary_emb=rotary)


@check
def the_indexer_leaves_the_tables_of_other_layers():
    """On NPUs a decoding step fills these tables once, in its first attention layer."""
    rotary = embedding(
        "MRotaryEmbedding", 64, 16, torch.float32, mrope_section=[4, 2, 2], mrope_interleaved=True
    )
    cls, self = indexer(rotary)
    tensor = rows(9, 4, 32)
    for positions in (torch.randint(512, (3, 9)), torch.arange(9)):
        with calls_of("rope", "mrope") as counted:
            rotary.position_cos = rotary.position_sin = "of the attention layers"
            ours = cls.apply_rope(self, positions, tensor)
        assert len(counted) == 1, counted
        assert rotary.position_cos == rotary.position_sin == "of the attention layers"
        with mock.patch(f"{ROPE}.mrope.attention_backends", lambda: ("torch_native",) * 2):
            close(ours, unwrapped(cls.apply_rope)(self, positions, tensor))
        assert rotary.position_cos != "of the attention layers"


def unwrapped(function):
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return function


class Pool:
    """A cache of 64 slots, in blocks of 8 as on NPUs or without blocks."""

    def __init__(self, shape):
        self.shape, self.written = shape, []
        self.keys, self.values = rows(64, 2, 16, seed=1), rows(64, 2, 16, seed=2)

    def set_kv_buffer(self, layer, place, k, v):
        self.written.append((place, k, v))

    def get_key_buffer(self, layer_id):
        return self.keys.view(self.shape)

    def get_value_buffer(self, layer_id):
        return self.values.view(self.shape)


LAYER = types.SimpleNamespace(
    layer_id=3, tp_q_head_num=4, tp_k_head_num=2, head_dim=16, scaling=0.3
)


def attended(way, lengths, sequences, chosen, q, shape):
    """Return the backend's output, and that of SGLang's reference for the same slots."""
    home = importlib.import_module("sglang.srt.layers.attention.qwen_sparse_attn_backend")
    table = torch.randperm(64, generator=torch.Generator().manual_seed(5)).view(2, 32).int()
    metadata = types.SimpleNamespace(
        sequence_lengths=torch.tensor(lengths, dtype=torch.int32), token_slot_table=table,
        token_to_batch_idx=torch.tensor(sequences, dtype=torch.int32), is_cuda_graph=False,
    )  # fmt: skip
    backend = home.QwenSparseAttnBackend
    self = types.SimpleNamespace(
        token_to_kv_pool=Pool(shape), _resolve_metadata=lambda batch: metadata,
        _expand_block_indices=lambda indices, metadata: indices,
    )  # fmt: skip
    decodes = way == "forward_decode"
    mode = types.SimpleNamespace(is_decode=lambda: decodes)
    batch = types.SimpleNamespace(forward_mode=mode, out_cache_loc="slots")
    with calls_of("attention") as counted:
        out = getattr(backend, way)(self, q, "k", "v", LAYER, batch, topk_indices=chosen)
    assert set(counted) == {"attention"}
    assert self.token_to_kv_pool.written == [("slots", "k", "v")]
    slots = backend._logical_to_physical(chosen, metadata)
    cache = (x.view(64, 2, 16) for x in (self.token_to_kv_pool.keys, self.token_to_kv_pool.values))
    right = home.qsa_sparse_attention(q[: len(chosen)].view(-1, 4, 16), *cache, slots, 0.3)
    return out, right.flatten(1)


CHOSEN = torch.tensor([[2, 0, -1], [4, 1, 3], [0, -1, -1], [5, 9, 8]], dtype=torch.int32)


@check
def a_prompt_attends_to_its_chosen_keys():
    """Rows of q past the indexer's rows are padding."""
    for shape in ((64, 2, 16), (8, 8, 2, 16)):
        for consistent in ("", "tokens"):
            with env.override(consistent=consistent):
                given = ([5, 10], [0, 0, 1, 1], CHOSEN, rows(5, 64), shape)
                out, right = attended("forward_extend", *given)
            close(out[:4], right)
            assert out.shape == (5, 64) and not out[4].any()


@check
def so_does_a_decoding_step():
    for consistent in ("", "tokens"):
        with env.override(consistent=consistent):
            given = ([5, 10], [0, 1], CHOSEN[1::2], rows(2, 64), (8, 8, 2, 16))
            out, right = attended("forward_decode", *given)
        close(out, right)


@check
def the_largest_scores_of_each_query():
    """The expected result is from SGLang's function for CPUs; ours replaces the one for NPUs."""
    from npu_ops_adapters.sglang import sparse_attention

    kernel = importlib.import_module(f"{QSA}.kernel")
    scores = torch.randint(0, 50, (4, 40), generator=torch.Generator().manual_seed(0)).float()
    starts, ends = torch.tensor([0, 5, 7, 30]), torch.tensor([40, 9, 7, 40])
    right = kernel.qsa_fast_topk(scores, starts, ends, 8)
    for consistent in ("", "tokens"):
        with env.override(consistent=consistent):
            ours = sparse_attention.largest_of_spans(scores, starts, ends, 8)
        assert ours.dtype == torch.int32 and ours.shape == (4, 8)
        assert (ours < 0).equal(right < 0)
        for row, (mine, other) in enumerate(zip(ours.long(), right.long(), strict=True)):
            of_row = scores[row, starts[row] :]
            assert of_row[mine[mine >= 0]].equal(of_row[other[other >= 0]])


@check
def scores_with_the_products_of_training():
    from npu_ops_adapters.sglang import sparse_attention

    mqa = importlib.import_module(f"{QSA}.mqa")
    q, k = rows(4, 3, 16), rows(20, 1, 16, seed=1)
    spans = torch.tensor([0, 0, 7, 7]), torch.tensor([3, 7, 9, 20])
    close(sparse_attention.score_prompts(q, k, *spans), mqa.torch_qsa_mqa_prefill(q, k, *spans))
    cache, pages = rows(6, 4, 1, 16, seed=2), torch.tensor([[3, 1], [0, 5], [2, 2], [4, 0]])
    given = q, cache, pages, torch.tensor([8, 5, 0, 1]), 8
    close(sparse_attention.score_steps(*given), mqa.torch_qsa_mqa_decode(*given))


@check
def streams_are_normalised_by_groups():
    home = importlib.import_module("sglang.srt.layers.hyperconnection")
    ple = importlib.import_module("sglang.srt.models.qwen4_exp").Qwen4ExpPLEGroupedNorm
    for cls in (home.GroupedGemmaRMSNorm, ple):
        for group in (None, 16):
            norm = cls(48, group_size=group)
            norm.weight.data.copy_(rows(48, seed=3))
            with calls_of("rms_norm") as counted, torch.no_grad():
                ours = norm(rows(5, 48))
            assert len(counted) == (3 if group else 1), counted
            close(ours, unwrapped(cls.forward)(norm, rows(5, 48)))


@check
def streams_are_mixed_by_no_kernel_for_cuda():
    from npu_ops_adapters.sglang import hyper_connection

    home = importlib.import_module("sglang.srt.layers.hyperconnection")
    made = home.GatedResidual.__new__(home.GatedResidual)
    config = home.HyperConnectionConfig(
        hc_count=4, hidden_size=512, hc_lowrank=16, hc_per_branch_norm=True
    )
    with env.override(consistent="tokens"):
        hyper_connection.with_plain_functions(home.GatedResidual.__init__)(made, config)
    assert made._jit_combine_ok is False
    assert made._mix_compute.__qualname__.endswith("_mix_compute")
    assert not hasattr(made._mix_compute, "_torchdynamo_orig_callable")


def run():
    importlib.import_module("sglang.srt.plugins").load_plugins()
    for function in CHECKS:
        yield function.__name__, error_of(function)
