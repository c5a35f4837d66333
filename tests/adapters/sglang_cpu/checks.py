"""Check npu-ops's hooks in SGLang in one process; print a line of JSON per check, [name, error].

python -m sglang_cpu.each checks

Our functions are compared, in fp32 or fp64, with SGLang's own, which the hooks wrap.
"""

import importlib
import pkgutil
import types

import torch
from outcomes import error_of
from writes import WRITES

import npu_ops
from npu_ops.core import log
from sglang_cpu.layers import LAYERS, MODELS, attention

ROPE = "sglang.srt.layers.rotary_embedding"
GDN = "sglang.srt.layers.attention.linear.gdn_backend"
DECODE = (
    "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend"
    "._run_sdpa_forward_decode"
)
VISION = "sglang.srt.layers.attention.vision"
CHECKS = []


def check(function):
    CHECKS.append(function)
    return function


def rows(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def theirs(dotted):
    """Return the function that our hook wraps, and check that the hook is in place."""
    function = pkgutil.resolve_name(dotted)
    assert "npu_ops_hook" in [getattr(held, "__name__", "") for held in closed_over(function)]
    return function.__wrapped__


def closed_over(function):
    return [cell.cell_contents for cell in function.__closure__]


def close(ours, other, tolerance=1e-5):
    torch.testing.assert_close(ours, other, atol=tolerance, rtol=tolerance)


# Patches: applied and reverted


@check
def every_hook_is_in_force():
    found = states()
    assert set(found.values()) == {"applied"}, found
    assert len(found) >= 14, found


def states(rows=None):
    import npu_ops_adapters

    rows = {
        (row.target, row.op): row.sentence
        for row in rows or (*npu_ops_adapters.plan(), *npu_ops_adapters.verify())
    }
    return {key: state for key, state in rows.items() if key[0].startswith("sglang.")}


@check
def a_hook_of_another_plugin_leaves_ours_in_force():
    """By SGLang's order of hooks, npu-ops falls back to the other plugin's function."""
    assert theirs_of_another_plugin in closed_over(theirs(DECODE))


# Rotary embeddings


def embedding(kind, head_dim, rotary_dim, dtype, *arguments, **options):
    module = importlib.import_module(f"{ROPE}.{'mrope' if options else 'base'}")
    made = getattr(module, kind)(
        head_dim, rotary_dim, 512, 10000, True, dtype, *arguments, **options
    )
    made.cos_sin_cache = made._compute_cos_sin_cache()  # fp32, as SGLANG_ROPE_CACHE_FP32 keeps it
    return made


def error(module, method, positions, q, k):
    """Return the errors of ours and of SGLang's function in bf16, against SGLang's in fp64."""
    name = type(module).__name__
    home = "mrope" if name == "MRotaryEmbedding" else "base"
    original = theirs(f"{ROPE}.{home}.{name}.forward_native")
    wide = types.SimpleNamespace(**vars(module))
    wide.cos_sin_cache = module.cos_sin_cache.double()
    right = original(wide, positions, q.double(), k.double())
    ours = getattr(module, method)(positions, q, k)
    own = original(module, positions, q, k)
    assert [x.dtype for x in ours] == [q.dtype] * 2
    return [
        max((x.double() - y).abs().max().item() for x, y in zip(pair, right, strict=True))
        for pair in (ours, own)
    ]


@check
def rope_is_rounded_once():
    module = embedding("RotaryEmbedding", 64, 32, torch.bfloat16)
    positions = torch.randint(512, (9,))
    q, k = rows(9, 4 * 64, dtype=torch.bfloat16), rows(9, 2 * 64, dtype=torch.bfloat16, seed=1)
    for method in ("forward_npu", "forward_native"):
        ours, own = error(module, method, positions, q, k)
        assert ours < 0.02 and ours <= own, (method, ours, own)


@check
def images_are_rotated_by_three_axes():
    for head, width, section, interleaved in (
        (128, 128, [24, 20, 20], True),  # Qwen3-VL
        (128, 128, [16, 24, 24], False),  # Qwen2-VL
        (256, 64, [11, 11, 10], True),  # Qwen3.5
    ):
        module = embedding(
            "MRotaryEmbedding", head, width, torch.bfloat16, mrope_section=section,
            mrope_interleaved=interleaved,
        )  # fmt: skip
        positions = torch.randint(512, (3, 9))
        q, k = rows(9, 4 * head, dtype=torch.bfloat16), rows(9, head, dtype=torch.bfloat16)
        for method in ("forward_npu", "forward_native"):
            ours, own = error(module, method, positions, q, k)
            assert ours < 0.02 and ours <= own, (section, method, ours, own)


@check
def text_in_a_multimodal_model_is_rotated_by_one():
    module = embedding(
        "MRotaryEmbedding", 64, 64, torch.float32, mrope_section=[12, 10, 10],
        mrope_interleaved=True,
    )  # fmt: skip
    positions, q, k = torch.arange(9), rows(9, 128), rows(9, 64)
    for x, y in zip(
        module.forward_npu(positions, q, k), module.forward_npu(positions.expand(3, 9), q, k),
        strict=True,
    ):  # fmt: skip
        close(x, y, 0)


# Norms, rotary embeddings and projections before attention


def rotaries():
    """Yield rotary embeddings, each with positions of nine tokens."""
    of_axes = embedding(
        "MRotaryEmbedding", 64, 32, torch.float32, mrope_section=[6, 5, 5], mrope_interleaved=True
    )
    yield embedding("RotaryEmbedding", 64, 64, torch.float32), torch.arange(9)
    yield of_axes, torch.randint(512, (3, 9))
    yield of_axes, torch.arange(9)


@check
def heads_are_normalised_and_rotated_in_one_launch():
    for layer, (norm, gated) in LAYERS.items():
        dotted = f"{MODELS}.{layer}.forward_prepare_native"
        for rotary, positions in rotaries():
            made, x = attention(layer, norm, gated, rotary), rows(9, (8 + 4 * gated) * 64)
            right = theirs(dotted)(made, positions, x)
            with calls_of("qk_norm_rope", "rope", "mrope") as counted:
                found = pkgutil.resolve_name(dotted)(made, positions, x)
            assert counted == ["qk_norm_rope"], (layer, counted)
            assert len(found) == len(right)
            for one, other in zip(found, right, strict=True):
                close(one, other)


@check
def so_are_those_of_experts():
    dotted = f"{MODELS}.qwen3_moe.Qwen3MoeAttention.apply_qk_norm_rope"
    for rotary, positions in rotaries():
        made, x = attention("qwen3_moe", "RMSNorm", False, rotary), rows(9, 8 * 64)
        with calls_of("qk_norm_rope") as counted:
            found = pkgutil.resolve_name(dotted)(made, x, positions, None)
        assert counted == ["qk_norm_rope"] and not made._used_fused_qk_norm_rope_last_call
        right = theirs(f"{MODELS}.qwen3.Qwen3Attention.forward_prepare_native")(made, positions, x)
        for one, other in zip(found, right, strict=True):
            close(one, other)


@check
def a_norm_of_another_kind_is_sglangs():
    layer = "qwen3.Qwen3Attention"
    dotted = f"{MODELS}.{layer}.forward_prepare_native"
    rotary, positions = next(rotaries())
    made, x = attention(layer, "RMSNorm", False, rotary), rows(9, 8 * 64)
    made.q_norm.cast_x_before_out_mul = True  # SGLang's policy for reinforcement learning
    right = theirs(dotted)(made, positions, x)
    with calls_of("qk_norm_rope") as counted:
        found = pkgutil.resolve_name(dotted)(made, positions, x)
    assert counted == [] and all(map(torch.equal, found, right))


@check
def a_class_that_rotates_in_its_own_way_does():
    module = importlib.import_module(f"{ROPE}.mrope")
    with calls_of("mrope", "rope") as counted:
        made = module.Ernie4_5_VLRotaryEmbedding(
            64, 64, 512, 10000, True, torch.float32, mrope_section=[12, 12, 8]
        )
        made.forward_native(torch.randint(512, (3, 5)), rows(5, 128), rows(5, 64))
    assert counted == [], counted


class calls_of:
    """Records the calls of some npu_ops operators within a block."""

    def __init__(self, *names):
        from npu_ops.core.registry import Table

        self._tables = [Table.tables[name] for name in names]

    def __enter__(self):
        seen = []
        for table in self._tables:
            table.launch = lambda *args, launch=table.launch, op=table.op: (
                seen.append(op),
                launch(*args),
            )
        return seen

    def __exit__(self, *error):
        for table in self._tables:
            del table.launch


# Gated Delta Net


def pool(slots=6, heads=4, width=32, dtype=torch.float32):
    return rows(slots, heads, width, width, dtype=dtype, seed=7) / width


def prefill(lengths=(70, 0, 150, 64)):
    tokens = sum(lengths)
    q, k = rows(1, tokens, 2, 32), rows(1, tokens, 2, 32, seed=1)
    v, g = rows(1, tokens, 4, 32, seed=2), -rows(1, tokens, 4, seed=3).abs()
    starts = torch.tensor((0, *lengths)).cumsum(0).to(torch.int32)
    return (q, k, v, g, rows(1, tokens, 4, seed=4).sigmoid()), starts


def kernel():
    """Return our kernel from SGLang's dispatcher."""
    utils = importlib.import_module("sglang.srt.layers.attention.linear.utils")
    triton = utils.LinearAttnKernelBackend("triton")
    dispatcher = importlib.import_module(GDN).GDNKernelDispatcher(triton, triton)
    kernels = dispatcher.decode_kernel, dispatcher.extend_kernel, dispatcher.verify_kernel
    assert {type(kernel).__name__ for kernel in kernels} == {"Kernel"}, kernels
    assert dispatcher.supports_packed_decode
    return dispatcher.extend_kernel


def token_by_token(inputs, state, first, last):
    """Return o and the state after tokens `first` to `last`, by the recurrent rule."""
    span = [x[:, first:last] for x in inputs]
    q, k, v, g, beta = span
    return npu_ops.fused_recurrent_gated_delta_rule(
        q, k, v, g=g, beta=beta, initial_state=state[None], output_final_state=True,
        use_qk_l2norm_in_kernel=True, state_v_first=True,
    )  # fmt: skip


@check
def a_prefill_updates_the_pool_and_knows_the_states_between_chunks():
    inputs, starts = prefill()
    states, slots = pool(), torch.tensor([3, -1, 0, 5], dtype=torch.int32)
    before = states.clone()
    o, last, between = kernel().extend(
        *inputs, ssm_states=states, cache_indices=slots, query_start_loc=starts
    )
    assert last is None
    for n, slot in enumerate(slots.tolist()):
        if slot >= 0:
            first, end = starts[n].item(), starts[n + 1].item()
            right, after = token_by_token(inputs, before[slot], first, end)
            close(o[:, first:end], right, 2e-4)
            close(states[slot], after[0], 2e-4)
    untouched = [1, 2, 4]
    assert states[untouched].equal(before[untouched])
    # Chunks for 70, 0, 150 and 64 tokens: 2 + 0 + 3 + 1. Row 4 is the state of the third sequence
    # after 128 tokens.
    found = between.squeeze(0)[torch.tensor([1, 4])]
    _, after = token_by_token(inputs, before[3], 0, 64)
    close(found[0], after[0], 2e-4)
    _, after = token_by_token(inputs, before[0], 70, 70 + 128)
    close(found[1], after[0], 2e-4)


@check
def a_prefill_for_scoring_leaves_the_pool():
    inputs, starts = prefill((5, 3))
    states = pool()
    before = states.clone()
    kernel().extend(
        *inputs, ssm_states=states, cache_indices=torch.tensor([1, 2]), query_start_loc=starts,
        inplace_update=False,
    )  # fmt: skip
    assert states.equal(before)


@check
def drafted_tokens_are_verified_and_their_states_kept():
    sequences, drafted = 3, 4
    tokens = sequences * drafted
    q, k, v = rows(1, tokens, 2, 32), rows(1, tokens, 2, 32, seed=1), rows(1, tokens, 4, 32, seed=2)
    a, b = rows(tokens, 4, seed=3), rows(tokens, 4, seed=4)
    parameters = {"A_log": rows(4, seed=5), "dt_bias": rows(4, seed=6)}
    states, slots = pool(), torch.tensor([3, 0, 5], dtype=torch.int32)
    before = states.clone()
    kept = torch.zeros(sequences, drafted, 4, 32, 32)
    starts = torch.arange(0, tokens + 1, drafted, dtype=torch.int32)
    o = kernel().target_verify(
        q=q, k=k, v=v, a=a, b=b, **parameters, ssm_states=states, cache_indices=slots,
        query_start_loc=starts, intermediate_states_buffer=kept,
        intermediate_state_indices=torch.tensor([2, 0, 1], dtype=torch.int32),
        cache_steps=drafted, retrieve_parent_token=None, stable_rows=False,
    )  # fmt: skip
    assert states.equal(before)
    g, beta = npu_ops.gdn_gate(a[None], parameters["A_log"], parameters["dt_bias"], b[None])
    for n, row in enumerate((2, 0, 1)):
        for m in range(1, drafted + 1):
            first = n * drafted
            right, after = token_by_token((q, k, v, g, beta), before[slots[n]], first, first + m)
            close(o[:, first : first + m], right, 2e-4)
            close(kept[row, m - 1], after[0], 2e-4)


@check
def a_decoding_step_packed_and_not():
    tokens = 3
    q, k, v = (rows(1, tokens, n, 32, seed=n) for n in (2, 2, 4))
    a, b = rows(tokens, 4, seed=3), rows(tokens, 4, seed=4)
    parameters = {"A_log": rows(4, seed=5), "dt_bias": rows(4, seed=6)}
    slots = torch.tensor([3, -1, 5], dtype=torch.int32)
    packed, apart = pool(dtype=torch.bfloat16), pool(dtype=torch.bfloat16)
    one = kernel().packed_decode(
        torch.cat([x[0].flatten(1) for x in (q, k, v)], dim=1), a, b, **parameters,
        scale=32**-0.5, ssm_states=packed, cache_indices=slots, num_v_heads=4, head_v_dim=32,
        replayssm_d=None, replayssm_write_pos=None,
    )  # fmt: skip
    other = kernel().decode(
        q,
        k,
        v,
        a,
        b,
        **parameters,
        ssm_states=apart,
        cache_indices=slots,
        query_start_loc=torch.arange(tokens + 1, dtype=torch.int32),
    )
    assert one.shape == (1, tokens, 4, 32) and one.equal(other) and packed.equal(apart)
    assert not one[0, 1].any() and one[0, 0].any()


@check
def the_convolution_of_a_prefill():
    lengths, width = (5, 0, 2, 9), 4
    x, weight = rows(sum(lengths), 8), rows(8, width, seed=1)
    starts = torch.tensor((0, *lengths)).cumsum(0).to(torch.int32)
    states = rows(6, 8, width - 1, seed=2)
    before = states.clone()
    slots = torch.tensor([3, 1, -1, 0], dtype=torch.int32)
    known = torch.tensor([True, True, False, False])
    y = importlib.import_module(GDN).causal_conv1d_fn(
        x.T, weight, None, activation="silu", conv_states=states, has_initial_state=known,
        cache_indices=slots, query_start_loc=starts, seq_lens_cpu=list(lengths),
    )  # fmt: skip
    for n, length in enumerate(lengths):
        history = before[slots[n]] if known[n] else torch.zeros(8, width - 1)
        seen = torch.cat((history, x[starts[n] : starts[n + 1]].T), dim=1)
        if length:
            right = torch.nn.functional.conv1d(seen[None], weight[:, None], groups=8)[0]
            close(y[:, starts[n] : starts[n + 1]], torch.nn.functional.silu(right))
        if slots[n] >= 0:
            assert states[slots[n]].equal(seen[:, length:]), n
    assert states[[2, 4, 5]].equal(before[[2, 4, 5]])


@check
def the_convolution_of_drafted_tokens_keeps_windows_that_overlap():
    """SGLang's windows share memory: each is the previous one, shifted by one token."""
    width, drafted = 4, 3
    x, weight = rows(2, 8, drafted), rows(8, width, seed=1)
    states = rows(5, 8, width - 1, seed=2)
    before = states.clone()
    shared = torch.zeros(2, 8, drafted + width - 2)
    windows = shared.as_strided(
        (2, drafted, 8, width - 1), (shared.stride(0), 1, shared.stride(1), 1)
    )
    slots = torch.tensor([4, 1], dtype=torch.int32)
    y = importlib.import_module(GDN).causal_conv1d_update(
        x, states, weight, None, "silu", conv_state_indices=slots,
        intermediate_conv_window=windows,
        intermediate_state_indices=torch.tensor([1, 0], dtype=torch.int32),
    )  # fmt: skip
    for n, row in enumerate((1, 0)):
        seen = torch.cat((before[slots[n]], x[n]), dim=1)
        right = torch.nn.functional.conv1d(seen[None], weight[:, None], groups=8)[0]
        close(y[n], torch.nn.functional.silu(right))
        for m in range(drafted):
            assert windows[row, m].equal(seen[:, m + 1 : m + width]), (n, m)


@check
def the_convolution_of_a_decoding_step_with_a_pool_of_another_dtype():
    x, weight = rows(3, 8), rows(8, 4, seed=1)
    states = rows(5, 8, 3, seed=2, dtype=torch.bfloat16)
    before = states.clone()
    slots = torch.tensor([4, -1, 1], dtype=torch.int32)
    y = importlib.import_module(GDN).causal_conv1d_update(
        x, states, weight, None, "silu", conv_state_indices=slots
    )
    for n in (0, 2):
        seen = torch.cat((before[slots[n]].float(), x[n, :, None]), dim=1)
        close(y[n], torch.nn.functional.silu((seen * weight).sum(1)))
        assert states[slots[n]].equal(seen[:, 1:].bfloat16())
    assert not y[1].any() and states[[0, 2, 3]].equal(before[[0, 2, 3]])


@check
def the_gates_before_a_prefill():
    a, b, A_log, dt_bias = rows(7, 4), rows(7, 4, seed=1), rows(4, seed=2), rows(4, seed=3)
    g, beta = importlib.import_module(GDN).fused_gdn_gating(A_log, a, b, dt_bias)
    assert g.shape == beta.shape == (1, 7, 4) and g.dtype == beta.dtype == torch.float32
    close(g[0], -A_log.exp() * torch.nn.functional.softplus(a + dt_bias))
    close(beta[0], b.sigmoid())


# Attention and vision


@check
def attention_over_the_cache_is_theirs():
    home = "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend"
    keys, values = rows(64, 2, 16, seed=1), rows(64, 2, 16, seed=2)
    table = torch.randperm(64)[:60].view(3, 20)
    common = {"k_cache": keys, "v_cache": values, "req_to_token": table, "scaling": 0.3,
              "req_pool_indices": torch.tensor([2, 0]), "enable_gqa": True}  # fmt: skip
    lengths = torch.tensor([9, 17])
    for window in (None, 4):
        for name, queries, more in (
            ("extend", [6, 17], {"extend_prefix_lens": torch.tensor([3, 0]),
                                 "extend_seq_lens": torch.tensor([6, 17]), "causal": True}),
            ("decode", [1, 1], {"causal": False}),
        ):  # fmt: skip
            q = rows(sum(queries), 4, 16)
            more |= common | {"seq_lens": lengths, "sliding_window_size": window}
            function = pkgutil.resolve_name(f"{home}._run_sdpa_forward_{name}")
            original = function
            while hasattr(original, "__wrapped__"):
                original = original.__wrapped__
            self = types.SimpleNamespace(
                _make_sliding_window_mask=pkgutil.resolve_name(f"{home}._make_sliding_window_mask")
            )
            with calls_of("attention") as counted:
                ours = function(self, q, torch.empty_like(q), **more)
            assert counted == ["attention"], log._said
            close(ours, original(self, q, torch.empty_like(q), **more))


@check
def a_vision_tower_attends_within_its_images():
    vision = importlib.import_module(VISION)
    settings = {"head_dim": 24, "num_heads": 4, "num_kv_heads": 4, "flatten_batch": True}
    ours = vision.QKV_BACKEND_IMPL["ascend_attn"](**settings)
    own = vision.VisionSdpaAttention(**settings)
    q, k, v = (rows(30, 4, 24, seed=n) for n in range(3))
    starts = torch.tensor([0, 8, 30], dtype=torch.int32)
    with calls_of("attention") as counted:
        close(ours(q, k, v, starts, 1, 30), own(q, k, v, 1, starts))
        assert counted == ["attention"]
        mask = torch.ones(1, 1, 30, 30, dtype=torch.bool).tril()
        right = own(q, k, v, 1, starts, attention_mask=mask)
        close(ours(q, k, v, starts, 1, 30, attention_mask=mask), right)
        assert counted == ["attention"]


@check
def a_vision_tower_reads_its_lengths_again():
    """Other code may have written to the memory of the lengths between two calls."""
    vision = importlib.import_module(VISION)
    settings = {"head_dim": 24, "num_heads": 4, "num_kv_heads": 4, "flatten_batch": True}
    tower = vision.QKV_BACKEND_IMPL["ascend_attn"](**settings)
    q, k, v = (rows(30, 4, 24, seed=n) for n in range(3))
    other = torch.tensor([0, 21, 30], dtype=torch.int32)
    for write in WRITES.values():
        starts = torch.tensor([0, 8, 30], dtype=torch.int32)
        first = tower(q, k, v, starts, 1, 30)
        write(starts, other)
        second = tower(q, k, v, starts, 1, 30)
        assert second.equal(tower(q, k, v, other, 1, 30)) and not second.equal(first)
    torch.cpu.is_current_stream_capturing = lambda: True  # no value can be read during a capture
    try:
        with calls_of("attention") as counted:
            assert tower(q, k, v, other, 1, 30).equal(second)
        assert counted == ["attention"]
    finally:
        del torch.cpu.is_current_stream_capturing


@check
def a_vision_tower_rotates_in_fp32():
    utils = importlib.import_module(f"{ROPE}.utils")
    q, k = rows(9, 4, 24, dtype=torch.bfloat16), rows(9, 4, 24, dtype=torch.bfloat16, seed=1)
    angles = rows(9, 12, seed=2).repeat(1, 2)
    cos, sin = angles.cos(), angles.sin()
    right = utils.apply_rotary_pos_emb_native_eager(q, k, cos, sin)
    with calls_of("rope") as counted:
        for x, y in zip(utils.apply_rotary_pos_emb(q, k, cos, sin), right, strict=True):
            close(x, y, 1e-2)
    assert counted == ["rope"]


@check
def positions_of_patches_are_interpolated_in_fp64():
    model = importlib.import_module("sglang.srt.models.qwen3_vl").Qwen3VLMoeVisionModel
    table = torch.nn.Embedding(48 * 48, 8)
    self = types.SimpleNamespace(
        pos_embed=table, num_grid_per_side=48, spatial_merge_size=2, dtype=torch.float32,
        device=torch.device("cpu"), align_corners=True,
    )  # fmt: skip
    grids = [[1, 4, 6], [3, 48, 2], [1, 14, 22]]
    names = [name for name in vars(model) if name.startswith("fast_pos_embed_interpolate")]
    assert len(names) == 3, names
    with torch.no_grad():
        for name in names[:2]:
            ours = getattr(model, name)(self, grids)
            close(ours, getattr(model, name).__wrapped__(self, grids), 1e-4)


@check
def revert_puts_sglang_back():
    import npu_ops_adapters

    undone = states(npu_ops_adapters.revert())
    left = {key for key, state in undone.items() if state != "reverted"}
    assert left == set(), {key: undone[key] for key in left}
    base = importlib.import_module(f"{ROPE}.base").RotaryEmbedding
    assert "forward_npu" in ORIGINALS and len(ORIGINALS) >= 3
    for name, original in ORIGINALS.items():
        assert vars(base)[name] is original, name


ORIGINALS = {}


def theirs_of_another_plugin(self, query, output, *args, **kwargs):
    raise AssertionError("ours falls through to it alone")


def run():
    base = importlib.import_module(f"{ROPE}.base").RotaryEmbedding
    ORIGINALS.update({name: vars(base)[name] for name in vars(base) if "forward_n" in name})
    ORIGINALS["__init__"] = vars(base)["__init__"]
    for module in ("sglang.srt.models.qwen3_vl", VISION):
        importlib.import_module(module)
    registry = importlib.import_module("sglang.srt.plugins.hook_registry")
    replace = registry.HookType.REPLACE
    registry.HookRegistry.register(DECODE, theirs_of_another_plugin, replace)
    importlib.import_module("sglang.srt.plugins").load_plugins()
    for function in CHECKS:
        yield function.__name__, error_of(function)
