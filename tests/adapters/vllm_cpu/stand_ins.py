"""Stand-ins for what vllm-ascend needs of an NPU, on a CPU with Triton's interpreter.

All else is the published source. The stand-ins:
- `torch_npu` and `torch.npu`: empty modules, with its delta rule and its norm in PyTorch;
- vllm-ascend's native operators of Gated Delta Net: `SCHEMAS`, mostly by its own other functions;
- Triton's driver: the number of cores; and names of `triton.language` that modules bound, which the
  interpreter does not replace;
- `vllm_ascend.patch.worker`: the package, without the modules it imports for other models.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.machinery
import importlib.util
import pathlib
import sys
import types

import torch

from vllm_cpu.versions import OLDER

MODULES = (
    "torch_npu",
    "torch_npu.npu",
    "torch_npu._C",
    "torch_npu.op_plugin",
    "torch_npu.op_plugin.atb",
)


class StandIn(types.ModuleType):
    """A module in which every requested name is an empty class, for annotations."""

    def __init__(self, name: str, folder: str | None = None, **members):
        super().__init__(name)
        self.__spec__ = importlib.machinery.ModuleSpec(name, None)
        self.__path__ = [folder] if folder else []
        vars(self).update(members)
        sys.modules[name] = self
        owner, _, last = name.rpartition(".")
        if owner in sys.modules:
            setattr(sys.modules[owner], last, self)

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(self, name, type(name, (), {}))
        return getattr(self, name)


def install() -> None:
    """Install all stand-ins, before vLLM is imported."""
    for name in MODULES:
        StandIn(name)
    torch.npu = StandIn(
        "torch.npu", is_available=lambda: False, current_device=lambda: 0,
        device=lambda index: contextlib.nullcontext(),
    )  # fmt: skip
    if OLDER:
        sys.modules["torch_npu"].npu_recurrent_gated_delta_rule = recurrent_gated_delta_rule
    sys.modules["torch_npu"].npu_rms_norm = rms_norm
    from triton.runtime.driver import driver

    utils = types.SimpleNamespace(
        get_device_properties=lambda device: {"num_vectorcore": 4, "num_aicore": 2}
    )
    driver.set_active(
        types.SimpleNamespace(
            get_benchmarker=lambda: None, get_current_device=lambda: 0, utils=utils
        )
    )
    root = pathlib.Path(importlib.util.find_spec("vllm_ascend").origin).parent
    StandIn("vllm_ascend.patch.worker", str(root / "patch" / "worker"))
    install.library = torch.library.Library("_C_ascend", "FRAGMENT")
    for schema, function in SCHEMAS.items():
        install.library.define(schema)
        install.library.impl(schema.partition("(")[0], function, "CPU")


def for_the_interpreter(prefix: str) -> None:
    """Make `exp = tl.exp` in modules a function: the interpreter only replaces names in `tl`."""
    import triton.language as tl

    for module in [m for name, m in sys.modules.items() if name.startswith(prefix)]:
        for name, value in list(vars(module).items()):
            if value is not None and value is getattr(tl, name, None) and callable(value):
                setattr(module, name, functools.partial(_called_late, name))


def _called_late(name: str, *args, **kwargs):
    import triton.language as tl

    return getattr(tl, name)(*args, **kwargs)


def rms_norm(x, weight, epsilon):
    """torch_npu's operator."""
    scale = x.float().square().mean(-1, keepdim=True).add(epsilon).rsqrt()
    return (x.float() * scale * weight.float()).to(x.dtype), scale


def causal_conv1d_custom(
    x, weight, *, conv_state, bias_opt, query_start_loc_opt, cache_indices_opt,
    initial_state_mode_opt, num_accepted_tokens_opt, activation_mode, pad_slot_id, run_mode,
):  # fmt: skip
    """The convolution of a prefill, by vllm-ascend's own PyTorch function."""
    home = "vllm_ascend.ops.triton.mamba" if OLDER else "vllm_ascend._310p.ops"
    causal_conv1d_ref = importlib.import_module(f"{home}.causal_conv1d").causal_conv1d_ref
    assert run_mode == 0 and not num_accepted_tokens_opt
    y, starts, rows = torch.zeros_like(x), query_start_loc_opt, weight.shape[0] - 1
    for n, slot in enumerate(cache_indices_opt):
        if slot == pad_slot_id or starts[n] == starts[n + 1]:
            continue
        before = conv_state[slot, :rows].T[None]
        if not initial_state_mode_opt[n]:
            before = torch.zeros_like(before)
        span = slice(starts[n], starts[n + 1])
        out, after = causal_conv1d_ref(
            x[span].T[None], weight.T, bias_opt, before, True,
            activation="silu" if activation_mode else None,
        )  # fmt: skip
        y[span] = out[0].T
        conv_state[slot, :rows] = after[0].T[-rows:]
    return y


def recurrent_gated_delta_rule(
    query, key, value, g, beta, state, scale, actual_seq_lengths, ssm_state_indices,
    num_accepted_tokens=None,
):  # fmt: skip
    """torch_npu's operator: states are `[values, keys]`, and one is kept after each token.

    ssm_state_indices: `[T]`, or with drafted tokens `[N * S]`, S slots per sequence.
    """
    count, o = len(actual_seq_lengths), torch.zeros_like(value)
    slots, group = ssm_state_indices.view(count, -1), value.shape[1] // key.shape[1]
    first = 0
    for n, length in enumerate(actual_seq_lengths.tolist()):
        column = 0 if num_accepted_tokens is None else int(num_accepted_tokens[n]) - 1
        S = state[slots[n, column]].float() if length else None
        for step in range(length):
            q, k = (x[first + step].float().repeat_interleave(group, 0) for x in (query, key))
            S = S * g[first + step].float().exp()[:, None, None]
            error = value[first + step].float() - (S * k[:, None]).sum(-1)
            S = S + (error * beta[first + step].float()[:, None])[:, :, None] * k[:, None]
            o[first + step] = ((S * q[:, None]).sum(-1) * scale).to(o.dtype)
            state[slots[n, step if slots.shape[1] > 1 else 0]] = S.to(state.dtype)
        first += length
    return o


def later_causal_conv1d(
    output, x, weight, conv_state, bias_opt, query_start_loc_opt, cache_indices_opt,
    initial_state_mode_opt, num_accepted_tokens_opt, activation_mode, pad_slot_id, run_mode,
):  # fmt: skip
    """0.23.0's operator. Prefill is as in 0.18.0; new tokens run vllm-ascend's Triton kernel.

    The operator reads the first of a sequence's slots.
    """
    starts = query_start_loc_opt
    slots = cache_indices_opt[:, 0] if cache_indices_opt.dim() > 1 else cache_indices_opt
    if run_mode == 0:
        y = causal_conv1d_custom(
            x, weight, conv_state=conv_state, bias_opt=bias_opt,
            query_start_loc_opt=starts.tolist(), cache_indices_opt=slots.tolist(),
            initial_state_mode_opt=initial_state_mode_opt.tolist(), num_accepted_tokens_opt=None,
            activation_mode=activation_mode, pad_slot_id=pad_slot_id, run_mode=run_mode,
        )  # fmt: skip
    else:
        home = importlib.import_module("vllm_ascend.ops.triton.mamba.causal_conv1d")
        update = home.causal_conv1d_update_npu
        y = getattr(update, "__wrapped__", update)(  # not npu-ops' replacement
            x.clone(), conv_state.transpose(1, 2), weight.T, bias_opt, bool(activation_mode), slots,
            num_accepted_tokens_opt, starts, int(starts.diff().max()), pad_slot_id,
        )  # fmt: skip
    return output.copy_(y)


def later_recurrent_gated_delta_rule(
    query, key, value, state, *, beta=None, scale=None, actual_seq_lengths=None,
    ssm_state_indices=None, num_accepted_tokens=None, g=None, gk=None,
):  # fmt: skip
    """0.23.0's operator; actual_seq_lengths begins with the first token's place, which is 0."""
    assert actual_seq_lengths[0] == 0 and gk is None
    return recurrent_gated_delta_rule(
        query, key, value, g, beta, state, scale, actual_seq_lengths[1:], ssm_state_indices,
        num_accepted_tokens,
    )  # fmt: skip


def gates(A_log, a, b, dt_bias, beta=1.0, threshold=20.0):
    """The gates, by vllm-ascend's PyTorch function for another NPU."""
    home = importlib.import_module("vllm_ascend._310p.ops.fla.fused_gdn_gating")
    return home.fused_gdn_gating_pytorch(A_log, a, b, dt_bias, beta, threshold)


SCHEMAS = (
    {
        "npu_causal_conv1d_custom(Tensor x, Tensor weight, *, Tensor(a!) conv_state, "
        "Tensor? bias_opt, int[] query_start_loc_opt, int[] cache_indices_opt, "
        "int[] initial_state_mode_opt, int[] num_accepted_tokens_opt, int activation_mode, "
        "int pad_slot_id, int run_mode) -> Tensor": causal_conv1d_custom
    }
    if OLDER
    else {  # as in the strings of vllm-ascend's native module
        "npu_causal_conv1d_custom(Tensor output, Tensor x, Tensor weight, Tensor conv_state, "
        "Tensor? bias_opt, Tensor? query_start_loc_opt, Tensor? cache_indices_opt, "
        "Tensor? initial_state_mode_opt, Tensor? num_accepted_tokens_opt, int activation_mode, "
        "int pad_slot_id, int run_mode) -> (Tensor output)": later_causal_conv1d,
        "npu_recurrent_gated_delta_rule(Tensor query, Tensor key, Tensor value, Tensor(a!) state, "
        "*, Tensor? beta=None, float? scale=None, Tensor? actual_seq_lengths=None, "
        "Tensor? ssm_state_indices=None, Tensor? num_accepted_tokens=None, Tensor? g=None, "
        "Tensor? gk=None) -> Tensor": later_recurrent_gated_delta_rule,
        "npu_fused_gdn_gating(Tensor A_log, Tensor a, Tensor b, Tensor dt_bias, float beta=1.0, "
        "float threshold=20.0) -> (Tensor g, Tensor beta_output)": gates,
    }
)
