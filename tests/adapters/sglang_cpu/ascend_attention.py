"""Check SGLang's NPU attention backend on CPU tensors; `ascend` runs these checks.

The real class's hooked methods get the few attributes of a backend that they need. The expected
result is computed one sequence at a time in fp64.
"""

import sys
import types

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sglang_cpu.checks import calls_of, close, rows

MODULE = "sglang.srt.hardware_backend.npu.attention.ascend_backend"
HEADS, KV_HEADS, DIM, VALUE_DIM, SIZE, DRAFTED = 4, 2, 32, 32, 16, 3
LENGTHS = (21, 40, 3)  # keys of each sequence
RULES = (
    {},
    {"sliding_window_size": 5},
    {"logit_cap": 3.0},
    {"sinks": rows(HEADS, seed=9)},
    {"sliding_window_size": 0, "logit_cap": 2.0, "sinks": rows(HEADS, seed=9)},
)
CHECKS = []


def check(function):
    CHECKS.append(function)
    return function


def backend_class():
    return sys.modules[MODULE].AscendAttnBackend


class Pool:
    """Blocks of keys and values; it records what is written."""

    def __init__(self):
        self.keys = rows(12, SIZE, KV_HEADS, DIM, seed=1)
        self.values = rows(12, SIZE, KV_HEADS, VALUE_DIM, seed=2)
        self.written = []

    def get_key_buffer(self, layer_id):
        return self.keys

    def get_value_buffer(self, layer_id):
        return self.values

    def set_kv_buffer(self, layer, place, k, v):
        self.written.append(place.loc)
        for cache, new in ((self.keys, k), (self.values, v)):
            cache.view(-1, *cache.shape[2:])[place.loc] = new.view(-1, *cache.shape[2:])


class Case:
    """A step of three sequences, each with `new` tokens at its end."""

    def __init__(self, new, padding=0, sinks=None, hybrid=False, graph=False, mode="", **rule):
        self.new, self.sinks = new, sinks
        self.blocks = torch.tensor([[3, 7, 0], [5, 1, 8], [10, 0, 0]], dtype=torch.int32)
        slots = self.blocks[..., None] * SIZE + torch.arange(SIZE)
        self.slots = slots.flatten(1).long()
        self.tokens = sum(new)
        q = rows(self.tokens + padding, HEADS * DIM, seed=3)
        k, v = (rows(len(q), KV_HEADS * n, seed=4 + n) for n in (DIM, VALUE_DIM))
        self.qkv = q, k[: self.tokens], v[: self.tokens]
        places = [s[n - m : n] for s, n, m in zip(self.slots, LENGTHS, new, strict=True)]
        self.batch = types.SimpleNamespace(
            forward_mode=Mode(mode), extend_seq_lens_cpu=list(new), encoder_lens=None,
            attn_cp_metadata=None, out_cache_loc=torch.cat(places), spec_info=None,
            global_num_token_non_padded_cpu=self.tokens,
        )  # fmt: skip
        if mode:
            self.batch.spec_info = types.SimpleNamespace(topk=1, draft_token_num=DRAFTED)
        self.layer = types.SimpleNamespace(
            layer_id=0, tp_q_head_num=HEADS, tp_k_head_num=KV_HEADS, tp_v_head_num=KV_HEADS,
            qk_head_dim=DIM, v_head_dim=VALUE_DIM, scaling=0.3, sliding_window_size=-1,
            logit_cap=0.0, logit_capping_method="tanh", is_cross_attention=False,
            attn_type=types.SimpleNamespace(value="decoder"),
        )  # fmt: skip
        vars(self.layer).update(rule)
        lengths = torch.tensor(LENGTHS, dtype=torch.int32)
        other = torch.zeros_like(self.blocks)
        self.metadata = types.SimpleNamespace(
            block_tables=other if hybrid else self.blocks,
            block_tables_swa=self.blocks if hybrid else other,
            seq_lens_cpu_int=None if graph else lengths,
            seq_lens_cpu_list=[1, 1, 1],  # the lengths during capture
            seq_lens=lengths if graph else lengths - 1,
            actual_seq_lengths_q=torch.tensor(new).cumsum(0).to(torch.int32),
            swa_out_cache_loc=None,
        )
        self.pool = Pool()
        self.backend = object.__new__(backend_class())
        vars(self.backend).update(
            forward_metadata=self.metadata, token_to_kv_pool=self.pool, page_size=SIZE,
            use_mla=False, use_alibi=False, is_dllm_model=False, graph_mode=graph,
            enable_torch_compile=False, is_hybrid_swa=hybrid, speculative_num_draft_tokens=DRAFTED,
        )  # fmt: skip

    def run(self, name, **options):
        """Call the method, check that it runs npu-ops, and return the result."""
        if name == "forward_mtp":
            options["save_kv_cache"] = True
        if self.sinks is not None:
            options["sinks"] = self.sinks
        with calls_of("attention") as counted:
            out = getattr(self.backend, name)(*self.qkv, self.layer, self.batch, **options)
        assert counted == ["attention"], counted
        return out

    def right(self, causal=True):
        """Return the expected result, computed one sequence at a time."""
        out, start, layer = [], 0, self.layer
        q = self.qkv[0].double().unflatten(1, (HEADS, DIM))
        for slots, length, new in zip(self.slots, LENGTHS, self.new, strict=True):
            seen = slots[:length]
            k, v = (
                cache.flatten(0, 1)[seen].double().repeat_interleave(HEADS // KV_HEADS, dim=1)
                for cache in (self.pool.keys, self.pool.values)
            )
            scores = torch.einsum("qhd,khd->hqk", q[start : start + new], k) * layer.scaling
            if layer.logit_cap:
                scores = layer.logit_cap * (scores / layer.logit_cap).tanh()
            at = torch.arange(length - new, length)[:, None] - torch.arange(length)
            hidden = at < 0 if causal else torch.zeros_like(at, dtype=torch.bool)
            if layer.sliding_window_size >= 0:
                hidden |= at > layer.sliding_window_size
            scores = scores.masked_fill(hidden, -torch.inf)
            if self.sinks is not None:
                more = self.sinks.double()[:, None, None].expand(-1, new, 1)
                scores = torch.cat((scores, more), dim=-1)
            weights = scores.softmax(-1)[..., :length]
            out.append(torch.einsum("hqk,khd->qhd", weights, v).flatten(1))
            start += new
        padding = self.qkv[0].new_zeros(len(q) - start, HEADS * VALUE_DIM).double()
        return torch.cat((*out, padding)).float()

    def holds(self, name, causal=True, **options):
        """Check the result, and that the new keys were written exactly once."""
        close(self.run(name, **options), self.right(causal), 1e-4)
        assert [len(place) for place in self.pool.written] == [self.tokens]


class Mode:
    """The methods of ForwardMode that are called."""

    def __init__(self, name):
        self._name = name

    def is_target_verify(self):
        return self._name == "verify"

    def is_draft_extend_v2(self):
        return self._name == "draft"


@check
def a_prefill_behind_cached_prefixes():
    for rule in RULES:
        Case((4, 40, 1), padding=3, **rule).holds("forward_extend")


@check
def a_prefill_of_an_encoder_sees_all():
    encoder = types.SimpleNamespace(value="encoder_only")
    case = Case((21, 40, 3), attn_type=encoder)
    case.holds("forward_extend", causal=False)


@check
def prefills_and_decoding_steps_in_one_batch():
    Case((4, 1, 1)).holds("forward_mixed")


@check
def a_layer_with_a_window_has_a_cache_of_its_own():
    for new, name in (((4, 40, 1), "forward_extend"), ((1, 1, 1), "forward_decode")):
        Case(new, hybrid=True, sliding_window_size=5).holds(name)


@check
def a_decoding_step():
    for rule in RULES:
        Case((1, 1, 1), padding=2, **rule).holds("forward_decode")


@check
def a_decoding_step_whose_lengths_the_device_alone_knows():
    case = Case((1, 1, 1))
    case.metadata.seq_lens, case.metadata.seq_lens_cpu_int = case.metadata.seq_lens + 1, None
    case.holds("forward_decode")


@check
def a_verification_of_drafted_tokens():
    for rule in RULES:
        Case((DRAFTED,) * 3, padding=4, mode="verify", **rule).holds("forward_mtp")
    through = Case((DRAFTED,) * 3, mode="verify")
    through.holds("forward_extend")  # calls forward_mtp


@check
def what_a_draft_model_reads_again():
    Case((3, 1, 2), padding=2, mode="draft").holds("forward_mtp")


@check
def a_captured_step_reads_its_lengths_from_the_device():
    """torch_npu updates lengths in captured calls by argument name, but only of its operators."""
    for rule in RULES[1:]:
        Case((1, 1, 1), graph=True, **rule).holds("forward_decode_graph")
        Case((1, 1, 1), graph=True, **rule).holds("forward_decode")  # calls forward_decode_graph
        case = Case((DRAFTED,) * 3, graph=True, mode="verify", **rule)
        case.holds("forward_mtp")


@check
def a_captured_call_that_is_updated_by_name_stays():
    """A call that the plan gives to a vendor operator stays SGLang's, which can
    update its lengths."""
    for name, new, mode in (
        ("forward_decode_graph", (1, 1, 1), ""), ("forward_mtp", (DRAFTED,) * 3, "verify"),
    ):  # fmt: skip
        case = Case(new, graph=True, mode=mode, qk_head_dim=64, v_head_dim=64)
        case.pool.keys, case.pool.values = (rows(12, SIZE, KV_HEADS, 64).half() for _ in range(2))
        q = rows(case.tokens, HEADS * 64).half()
        k = v = rows(case.tokens, KV_HEADS * 64).half()
        case.qkv = q, k, v
        reason = left(name, case)
        assert "actual_seq_lengths_kv of npu_fused_infer_attention_score" in reason, reason


@check
def a_mode_over_dispatch_sees_ours_and_nothing_inside():
    """torch_npu uses a dispatch mode to find operators whose lengths a replay may change."""
    seen = []

    class Recorded(TorchDispatchMode):
        def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
            seen.append(str(operator))
            return operator(*args, **kwargs or {})

    case = Case((1, 1, 1), graph=True, logit_cap=2.0)
    with torch.inference_mode(), Recorded():
        case.run("forward_decode_graph")
    inside = [name for name in seen if "attention" in name or "softmax" in name]
    assert inside == ["npu_ops.attention.default"], seen


@check
def what_is_not_ours_is_left_before_anything_is_written():
    for change, named in (
        (lambda case: setattr(case.backend, "use_mla", True), "latent"),
        (lambda case: setattr(case.backend, "use_alibi", True), "use_alibi"),
        (lambda case: setattr(case.layer, "is_cross_attention", True), "is_cross_attention"),
        (lambda case: setattr(case.batch, "encoder_lens", torch.ones(3)), "encoder_lens"),
        (lambda case: setattr(case.layer, "use_irope", True), "use_irope"),
        (lambda case: setattr(case.layer, "xai_temperature_len", 8), "xai_temperature_len"),
        (lambda case: setattr(case.batch, "attn_cp_metadata", object()), "attn_cp_metadata"),
        (lambda case: setattr(case.pool, "keys", case.pool.keys.to(torch.float8_e5m2)), "cache"),
        (lambda case: setattr(case.layer, "logit_capping_method", "sigmoid"), "sigmoid"),
    ):
        case = Case((4, 40, 1), logit_cap=1.0)
        change(case)
        reason = left("forward_extend", case)
        assert named in reason, reason
    branching = Case((DRAFTED,) * 3, mode="verify")
    branching.batch.spec_info.topk = 2
    assert "topk" in left("forward_mtp", branching)


def left(name, case) -> str:
    """Return why npu-ops declines, before it writes; the hook then calls SGLang's own function."""
    from npu_ops_adapters.sglang import ascend_attention

    ours = {
        "forward_extend": ascend_attention.extend,
        "forward_mtp": ascend_attention.verify,
        "forward_decode_graph": ascend_attention.decode_graph,
    }
    try:
        ours[name](case.backend, *case.qkv, case.layer, case.batch, True)
    except ValueError as reason:
        assert case.pool.written == []
        return str(reason)
    raise AssertionError(f"{name} took it")
