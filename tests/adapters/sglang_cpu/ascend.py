"""Check the adapter's part for NPUs on CPU tensors; print a line of JSON for each check.

python -m sglang_cpu.each ascend

SGLang's NPU backends of Gated Delta Net and attention are imported with stand-ins for packages that
exist only for NPUs. The stand-ins' functions are never called.
"""

import importlib
import importlib.machinery
import sys
import types

import torch
from outcomes import error_of

import npu_ops
from sglang_cpu.checks import close, prefill, rows, token_by_token

SGL = "sgl_kernel_npu"
NAMES = {
    f"{SGL}.fla.fused_gdn_gating": (
        *("fused_gdn_gating_kernel_without_sigmoid", "fused_gdn_gating_npu"),
    ),
    f"{SGL}.fla.l2norm": ("l2norm_fwd",),
    f"{SGL}.fla.utils": ("prepare_chunk_indices",),
    f"{SGL}.attention.sinks_attention": (
        *("attention_sinks_prefill_triton", "attention_sinks_triton"),
    ),
    "torch_npu": (),
    f"{SGL}.mamba.mamba_state_update_triton": ("conv_state_rollback", "move_intermediate_cache"),
}
WIDTH, DRAFTED = 4, 3
CHECKS = []


def check(function):
    CHECKS.append(function)
    return function


def doubles() -> None:
    for name, functions in NAMES.items():
        parts = name.split(".")
        for n in range(1, len(parts) + 1):
            part = ".".join(parts[:n])
            module = sys.modules.setdefault(part, types.ModuleType(part))
            module.__spec__ = importlib.machinery.ModuleSpec(part, None)
        for function in functions:
            setattr(sys.modules[name], function, None)


class Backend:
    """The attributes of a backend that its methods need; the methods are the real, hooked ones."""

    def __init__(self, module, starts, slots, tracked=None):
        self.cls = module.AscendGDNAttnBackend
        rows_kept = WIDTH - 1 + DRAFTED - 1
        self.conv = rows(6, rows_kept, 8 * 32, seed=11)
        self.states = rows(6, 4, 32, 32, seed=12) / 32
        self.kept = torch.zeros(6, DRAFTED, 4, 32, 32)
        self.req_to_token_pool = types.SimpleNamespace(mamba2_layer_cache=self._cache)
        self.forward_metadata = types.SimpleNamespace(
            query_start_loc=starts, mamba_cache_indices=slots, has_mamba_track_mask=False
        )
        self.decoded = []

    def _cache(self, layer_id):
        return types.SimpleNamespace(
            conv=[self.conv], temporal=self.states, intermediate_ssm=self.kept
        )

    def _track_mamba_state_decode(self, *arguments):
        self.decoded.append(arguments)


def layer():
    return types.SimpleNamespace(
        layer_id=0, conv_weights=rows(8 * 32, WIDTH, seed=1), bias=None, activation="silu",
        A_log=rows(4, seed=2), dt_bias=rows(4, seed=3), q_dim=64, k_dim=64, v_dim=128,
        num_q_heads=2, num_k_heads=2, num_v_heads=4, head_q_dim=32, head_k_dim=32, head_v_dim=32,
    )  # fmt: skip


def forward_batch(verify=False, prefixes=()):
    return types.SimpleNamespace(
        forward_mode=types.SimpleNamespace(is_target_verify=lambda: verify),
        spec_info=types.SimpleNamespace(draft_token_num=DRAFTED),
        extend_prefix_lens=torch.tensor(prefixes),
    )


def right(part, history, state, x, a, b):
    """Return o, the last state and the new history of one sequence.

    history: the rows before its first token, for the convolution.
    """
    seen = torch.cat((history, x)).T
    qkv = torch.nn.functional.conv1d(seen[None], part.conv_weights[:, None], groups=len(seen))
    q, k, v = torch.nn.functional.silu(qkv[0].T).split([64, 64, 128], dim=-1)
    g, beta = npu_ops.gdn_gate(a, part.A_log, part.dt_bias, b)
    inputs = [y.view(1, len(x), -1, 32) for y in (q, k, v)] + [g[None], beta[None]]
    o, after = token_by_token(inputs, state, 0, len(x))
    return o[0], after[0], seen.T[-(WIDTH - 1) :]


@check
def a_decoding_step(module):
    slots = torch.tensor([3, 1], dtype=torch.int32)
    backend, part = Backend(module, torch.arange(3, dtype=torch.int32), slots), layer()
    conv, states = backend.conv.clone(), backend.states.clone()
    x, a, b = rows(2, 256), rows(2, 4, seed=5), rows(2, 4, seed=6)
    o = backend.cls.forward_decode(backend, part, forward_batch(), x, a, b)
    assert o.shape == (1, 2, 4, 32) and len(backend.decoded) == 1
    for n, slot in enumerate(slots):
        token = slice(n, n + 1)
        history = conv[slot, -(WIDTH - 1) :]
        out, after, last = right(part, history, states[slot], x[token], a[token], b[token])
        close(o[0, token], out, 2e-4)
        close(backend.states[slot], after, 2e-4)
        assert backend.conv[slot, -(WIDTH - 1) :].equal(last)
    assert backend.conv[[0, 2, 4, 5]].equal(conv[[0, 2, 4, 5]])


@check
def a_prefill(module):
    lengths, slots = (70, 5), torch.tensor([3, 1], dtype=torch.int32)
    starts = torch.tensor((0, *lengths)).cumsum(0).to(torch.int32)
    backend, part = Backend(module, starts, slots), layer()
    conv, states = backend.conv.clone(), backend.states.clone()
    states[1] = 0
    backend.states.copy_(states)
    x, a, b = rows(75, 256), rows(75, 4, seed=5), rows(75, 4, seed=6)
    batch = forward_batch(prefixes=(9, 0))
    o = backend.cls.forward_extend(backend, part, batch, x, a, b)
    for n, slot in enumerate(slots):
        span = slice(int(starts[n]), int(starts[n + 1]))
        history = conv[slot, -(WIDTH - 1) :] * (n == 0)
        out, after, last = right(part, history, states[slot], x[span], a[span], b[span])
        close(o[0, span], out, 2e-4)
        close(backend.states[slot], after, 2e-4)
        assert backend.conv[slot, -(WIDTH - 1) :].equal(last)


@check
def a_verification_of_drafted_tokens(module):
    slots = torch.tensor([3, 1], dtype=torch.int32)
    starts = torch.arange(0, 2 * DRAFTED + 1, DRAFTED, dtype=torch.int32)
    backend, part = Backend(module, starts, slots), layer()
    conv, states = backend.conv.clone(), backend.states.clone()
    padded = 2 * DRAFTED + 2
    x, a, b = rows(padded, 256), rows(padded, 4, seed=5), rows(padded, 4, seed=6)
    o = backend.cls.forward_extend(backend, part, forward_batch(verify=True), x, a, b)
    assert o.shape == (padded, 4, 32) and not o[2 * DRAFTED :].any()
    assert backend.states.equal(states)
    for n, slot in enumerate(slots):
        span = slice(n * DRAFTED, (n + 1) * DRAFTED)
        # The last rows are used, as if the last step's drafted tokens had all been accepted.
        history = conv[slot, -(WIDTH - 1) :]
        for m in range(1, DRAFTED + 1):
            few = slice(n * DRAFTED, n * DRAFTED + m)
            out, after, _ = right(part, history, states[slot], x[few], a[few], b[few])
            close(backend.kept[n, m - 1], after, 2e-4)
        close(o[span], out, 2e-4)


@check
def before_0_5_23_keys_may_come_first(module):
    """Before 0.5.23 the order of a state's dimensions is an argument; here keys come first."""
    from npu_ops_adapters.sglang import ascend_gated_delta_net as ours

    slots = torch.tensor([3, 1], dtype=torch.int32)
    for function, lengths, verify in (
        (ours.decode, (1, 1), False), (ours.extend, (70, 5), False),
        (ours.extend, (DRAFTED, DRAFTED), True),
    ):  # fmt: skip
        starts = torch.tensor((0, *lengths)).cumsum(0).to(torch.int32)
        tokens = sum(lengths)
        call = layer(), forward_batch(verify, (9, 9)), rows(tokens, 256)
        a, b = rows(tokens, 4, seed=5), rows(tokens, 4, seed=6)
        values, keys = Backend(module, starts, slots), Backend(module, starts, slots)
        keys.states = keys.states.mT.contiguous()
        first = function(values, *call, a, b, v_first=True)
        close(function(keys, *call, a, b, v_first=False), first)
        close(keys.states.mT, values.states)
        close(keys.kept.mT, values.kept)
        assert keys.conv.equal(values.conv)


@check
def the_dispatchers_prefill_leaves_the_pool_to_the_backend(module):
    """The backend writes the final states to the pool. Before 0.5.20 a state's keys came first."""
    from npu_ops_adapters.sglang import gated_delta_net

    inputs, starts = prefill((70, 9))
    pool = rows(6, 4, 32, 32, seed=7) / 32
    kernel = gated_delta_net.Kernel(None, False)
    o, last, between = kernel.extend(
        *inputs, ssm_states=pool.mT.contiguous(), cache_indices=torch.tensor([3, 1]),
        query_start_loc=starts,
    )  # fmt: skip
    right_o, after = token_by_token(inputs, pool[3], 0, 70)
    close(o[:, :70], right_o, 2e-4)
    close(last[0].mT, after[0], 2e-4)
    _, after = token_by_token(inputs, pool[3], 0, 64)
    close(between.squeeze(0)[torch.tensor([1])][0].mT, after[0], 2e-4)


def run():
    doubles()
    home = "sglang.srt.hardware_backend.npu.attention"
    module = importlib.import_module(f"{home}.ascend_gdn_backend")
    importlib.import_module(f"{home}.ascend_backend")
    torch.npu = types.SimpleNamespace()  # the adapter then sees an NPU
    importlib.import_module("sglang.srt.plugins").load_plugins()
    attention = importlib.import_module("sglang_cpu.ascend_attention")
    for function in (*CHECKS, *attention.CHECKS):
        yield function.__name__, error_of(function, *[module] * (function in CHECKS))
