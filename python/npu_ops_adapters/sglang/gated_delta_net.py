"""Replaces the kernels that SGLang dispatches to for Gated Delta Net's delta rule.

SGLang's pool has a state for each running sequence. Whether a state is [keys, values] or [values,
keys] depends on the version of SGLang and, on NPUs, of sgl-kernel-npu, see `state_v_first`. If K
equals V, no shape check would notice a wrong order.
"""

from __future__ import annotations

import functools
import importlib.util
import pathlib
import re
from collections.abc import Callable, Iterable

import torch

import npu_ops
from npu_ops_adapters.patching import Patch
from npu_ops_adapters.sglang import carried_states, functions

CHUNK = 64  # tokens per chunk; SGLang's prefix cache uses this unit
_PARAMETERS = ("self", "decode_backend", "prefill_backend")
_KERNELS = "sgl_kernel_npu.fla.fused_sigmoid_gating_recurrent"


def patches() -> Iterable[Patch]:
    """Patch the dispatcher after it has made its kernels; versions before 0.5.10 have none."""
    if functions.since("0.5.10"):
        yield Patch(
            target=f"{functions.gated_delta_net()}:GDNKernelDispatcher.__init__",
            op="gated_delta_net",
            make=_replace,
            why=(
                "a server's states are fp32 in npu-ops, and no kernel is launched for one half "
                "of it"
            ),
            signatures=(_PARAMETERS, (*_PARAMETERS, "verify_backend")),
            versions="SGLang 0.5.10 to 0.5.23",
            remove_when="SGLang accepts kernels of Gated Delta Net from plugins",
            by=functions.hooks.who_applies(),
        )


def state_v_first() -> bool:
    """Return whether states of this SGLang, on this machine, are `[values, keys]`.

    Raises:
        ValueError: it depends on sgl-kernel-npu, whose version is not recognized.
    """
    if not functions.since("0.5.10"):
        return False
    if not functions.on_npu() or functions.since("0.5.23"):
        return True
    found = _order_of_kernels()
    if found is None and functions.since("0.5.20"):
        raise ValueError(
            "SGLang 0.5.20 to 0.5.22 have states in the order of sgl-kernel-npu's kernels, and "
            f"npu-ops cannot tell that order from {_KERNELS}"
        )
    return bool(found)


@functools.cache
def _order_of_kernels() -> bool | None:
    """Return the order of a state in sgl-kernel-npu's source: True for values first.

    It changed from keys first to values first in August 2026. None: neither is recognized.
    """
    try:
        source = pathlib.Path(importlib.util.find_spec(_KERNELS).origin).read_text()
    except (ImportError, AttributeError, TypeError, OSError):
        return None
    source = "".join(source.split())
    v_first, k_first = (
        re.search(rf"o_{row}(\[[:,None]*])?\*{width}", source) for row, width in ("vK", "kV")
    )
    return None if bool(v_first) == bool(k_first) else bool(v_first)


def _replace(original: Callable) -> Callable:
    v_first = state_v_first()

    @functools.wraps(original, assigned=(), updated=())
    def npu_ops_init(self, *args, **kwargs):
        original(self, *args, **kwargs)
        ours = functools.cache(lambda kernel: Kernel(kernel, v_first))
        for name in ("decode_kernel", "extend_kernel", "verify_kernel"):
            kernel = vars(self).get(name)
            if type(kernel).__name__ == "TritonGDNKernel":  # other kernels are chosen by an option
                setattr(self, name, ours(kernel))
        self.supports_packed_decode = getattr(self.decode_kernel, "supports_packed_decode", False)

    return npu_ops_init


class Kernel:
    """Replaces one of SGLang's kernels; unsupported calls run SGLang's kernel."""

    supports_packed_decode = True
    supports_strided_target_verify_qkv = True

    def __init__(self, theirs, v_first: bool):
        self._theirs, self._v_first = theirs, v_first

    def __getattr__(self, name):
        if name.startswith("_"):  # e.g. in copy.copy, which asks before _theirs is set
            raise AttributeError(name)
        return getattr(self._theirs, name)

    def packed_decode(self, *args, **kwargs):
        return self._first_ours("packed_decode", self._packed_decode, args, kwargs)

    def decode(self, *args, **kwargs):
        return self._first_ours("decode", self._update, args, kwargs)

    def target_verify(self, *args, **kwargs):
        return self._first_ours("target_verify", self._verify, args, kwargs)

    def extend(self, *args, **kwargs):
        return self._first_ours("extend", self._extend, args, kwargs)

    def _first_ours(self, name, ours, args, kwargs):
        try:
            return ours(*args, **kwargs)
        except (TypeError, ValueError) as reason:
            functions.fell_back(name, reason)
        return getattr(self._theirs, name)(*args, **kwargs)

    def _packed_decode(
        self, mixed_qkv, a, b, *, A_log, dt_bias, scale, ssm_states, cache_indices, num_v_heads,
        head_v_dim, **options,
    ):  # fmt: skip
        """Decode one token of each sequence; its q, k and v are one row."""
        functions.check_device(mixed_qkv)
        functions.refuse(**options)  # options for replaying recent tokens
        qkv = mixed_qkv
        if carried_states.in_force():
            qkv = carried_states.parts(mixed_qkv, head_v_dim, ssm_states)
        o = update(self._v_first, qkv, a, b, A_log, dt_bias, ssm_states, cache_indices, scale=scale)
        return o[None]

    def _update(
        self, q, k, v, a, b, *, A_log, dt_bias, ssm_states, cache_indices, query_start_loc,
        **states,
    ):  # fmt: skip
        """Process a few tokens of each sequence; q, k and v are `[1, T, heads, ...]`."""
        functions.check_device(q)
        heads = v.shape[2]
        o = update(
            self._v_first, (q[0], k[0], v[0]), a.reshape(-1, heads), b.reshape(-1, heads), A_log,
            dt_bias, ssm_states, cache_indices[: query_start_loc.shape[0] - 1],
            cu_seqlens=query_start_loc, **states,
        )  # fmt: skip
        return o[None]

    def _verify(
        self, A_log, dt_bias, q, k, v, a, b, *, intermediate_states_buffer,
        intermediate_state_indices, cache_steps, retrieve_parent_token=None, stable_rows=False,
        **arguments,
    ):  # fmt: skip
        """Verify draft tokens: leave the pool unchanged, and store the state after each token."""
        functions.refuse(retrieve_parent_token=retrieve_parent_token, stable_rows=stable_rows)
        sequences = arguments["query_start_loc"].shape[0] - 1
        return self._update(
            q, k, v, a, b, A_log=A_log, dt_bias=dt_bias,
            intermediate_states=intermediate_states_buffer,
            intermediate_state_indices=intermediate_state_indices[:sequences],
            disable_state_update=True, **arguments,
        )  # fmt: skip

    def _extend(
        self, q, k, v, g, beta, *, ssm_states, cache_indices, query_start_loc, inplace_update=True,
        **options,
    ):  # fmt: skip
        """Compute a prefill of packed sequences: output, final states, states between chunks.

        On NPUs SGLang's backend writes the final states to the pool. Elsewhere this method writes
        them, if inplace_update is set, and returns None for them. `options` are for kernels that
        keep states at checkpoints; SGLang asks a kernel first whether it does.
        """
        o, after, between = prefill(
            self._v_first, q, k, v, g, beta, ssm_states, cache_indices, query_start_loc
        )
        if functions.on_npu():
            return o, after, between
        if inplace_update:
            functions.write_slots(ssm_states, cache_indices, after)
        return o, None, between


def update(v_first, qkv, a, b, A_log, dt_bias, pool, slots, **options):
    """Run a decoding step of the delta rule on the states in `slots` of the pool.

    qkv: as in `npu_ops.gated_delta_rule_update`; with carried states, a tuple of q, k and v.
    """
    if carried_states.in_force():
        return carried_states.update(qkv, a, b, A_log, dt_bias, pool, slots, **options)
    return npu_ops.gated_delta_rule_update(
        qkv, a, b, A_log, dt_bias, pool, slots, state_v_first=v_first, **options
    )


def prefill(v_first, q, k, v, g, beta, pool, slots, starts):
    """Return o of packed sequences, their final states, and the states between chunks.

    pool, slots: where the initial states are; the pool is only read. starts: cu_seqlens.
    """
    functions.check_device(q)
    carry = carried_states.in_force()
    if carry:
        carried_states.check_pool(pool)
    before = functions.read_slots(pool, slots).float()
    inputs, tokens = zip(
        *(functions.tokens_of_sequences(x[0], starts) for x in (q, k, v, g, beta)), strict=True
    )
    rule = functools.partial(
        npu_ops.chunk_gated_delta_rule, *(x[None] for x in inputs), output_final_state=True,
        use_qk_l2norm_in_kernel=True, state_v_first=v_first, carry_unfinished=carry,
    )  # fmt: skip
    o, after = rule(initial_state=before, cu_seqlens=starts)
    return functions.padded(o[0], tokens[0])[None], after, ChunkStates(rule, before, starts)


class ChunkStates:
    """The states at the start of each chunk of each sequence, computed on request.

    SGLang requests at most one per sequence, at the end of its cached prefix. Then the rule runs
    again over the tokens up to that point.
    """

    def __init__(self, rule: Callable, before: torch.Tensor, starts: torch.Tensor):
        self._rule, self._before, self._starts = rule, before, starts

    def squeeze(self, dim: int) -> ChunkStates:
        """Return self. SGLang squeezes a first dimension of size 1, which this object lacks."""
        return self

    def __getitem__(self, chunks: torch.Tensor) -> torch.Tensor:
        """Return the states before some chunks, at most one per sequence.

        chunks: int64 indices. Chunks are numbered consecutively across all sequences.
        """
        starts = self._starts.long()
        last = ((starts.diff() + CHUNK - 1) // CHUNK).cumsum(0)
        sequences = torch.searchsorted(last, chunks, right=True)
        first = last - (starts.diff() + CHUNK - 1) // CHUNK
        cut = starts[:-1].clone()
        cut[sequences] += (chunks - first[sequences]) * CHUNK
        # Split each sequence in two: up to the cut, and a rest whose states are ignored.
        halves = torch.stack((starts[:-1], cut), dim=1).flatten()
        state = torch.zeros_like(self._before).repeat_interleave(2, dim=0)
        state[::2] = self._before
        ends = torch.cat((halves, starts[-1:])).to(self._starts.dtype)
        _, after = self._rule(initial_state=state, cu_seqlens=ends)
        return after[::2][sequences]
