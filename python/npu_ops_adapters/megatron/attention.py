"""Replaces Megatron's core attention in layer specs by a module that calls npu-ops.

The module calls `npu_ops.attention` if npu-ops supports the call. For other calls it builds and
runs the module that it replaced. It does not derive from DotProductAttention, because
Megatron-Bridge bypasses that class.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import math
import sys
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch

import npu_ops
from npu_ops.core import check
from npu_ops.core.hardware import is_captured
from npu_ops.core.library import is_plain
from npu_ops_adapters import context_parallel
from npu_ops_adapters.patching import Patch

_LOCAL = ("megatron.core.transformer.dot_product_attention", "DotProductAttention")
_ENGINE = ("megatron.core.extensions.transformer_engine", "TEDotProductAttention")
_BUILDERS = {
    "megatron.core.transformer.attention": "Attention",
    "megatron.core.transformer.multi_latent_attention": "MultiLatentAttention",
}


def patches() -> Iterable[Patch]:
    """Patch the constructors of the layers that build core attention, whatever their spec is."""
    for module, name in _BUILDERS.items():
        yield Patch(
            target=f"{module}:{name}.__init__",
            op="attention",
            make=_replace_init,
            why=(
                "DotProductAttention allocates memory for every pair of tokens, and supports "
                "no packed sequences"
            ),
            # not checked: parameters are read by name, and only config and submodules matter
            signatures=(),
            versions="Megatron-Core 0.12 to 0.19 and main",
            remove_when="Megatron-Core's own attention has NPU kernels",
        )


def npuify(spec: Any) -> Any:
    """Return a layer spec, or submodules, whose core attention is `npu_ops.attention`.

    It is only needed without the patches, because these call it whenever a layer is built.

    Args:
        spec: ModuleSpecs, dataclasses of submodules, lists of them, nested to any depth. It is not
            changed; the result shares the parts without core attention.

    Returns:
        The same spec with npu-ops classes in place of DotProductAttention and
        TEDotProductAttention. Building a layer from it raises ValueError for unsupported settings,
        e.g. learnable softmax.
    """
    if isinstance(spec, type):
        return _module(spec) if spec in _theirs() else spec
    if isinstance(spec, (list, tuple)):
        parts = [npuify(part) for part in spec]
        return spec if _same(parts, spec) else type(spec)(parts)
    if isinstance(spec, functools.partial):
        function, keywords = npuify(spec.func), {k: npuify(v) for k, v in spec.keywords.items()}
        same = function is spec.func and _same(keywords.values(), spec.keywords.values())
        return spec if same else functools.partial(function, *spec.args, **keywords)
    if not dataclasses.is_dataclass(spec):
        return spec
    fields = {field.name: getattr(spec, field.name) for field in dataclasses.fields(spec)}
    changes = {name: npuify(value) for name, value in fields.items()}
    changes = {name: value for name, value in changes.items() if value is not fields[name]}
    return dataclasses.replace(spec, **changes) if changes else spec


def why_not(config: Any) -> str | None:
    """Return None, or the reason why the module does not support a TransformerConfig."""
    reason = context_parallel.why_not(config)
    if reason:
        return reason
    softmax = getattr(config, "softmax_type", "vanilla")
    # Other types have a parameter, which is saved in checkpoints.
    if softmax not in ("vanilla", "off-by-one"):
        return f"softmax_type: got {softmax!r}, needs 'vanilla' or 'off-by-one'"
    for name in ("qk_clip", "log_max_attention_logit", "fp8_dot_product_attention"):
        if getattr(config, name, False):
            return f"{name}: got True, needs False: only Transformer Engine supports it"
    return None


def _theirs() -> list[type]:
    """Return Megatron's classes of core attention, or MindSpeed's replacements of them."""
    found = (getattr(sys.modules.get(module), name, None) for module, name in (_LOCAL, _ENGINE))
    return [value for value in found if isinstance(value, type)]


def _same(values: Iterable, others: Iterable) -> bool:
    return all(value is other for value, other in zip(values, others, strict=True))


def _replace_init(original: Callable) -> Callable:
    signature = inspect.signature(original)

    @functools.wraps(original, assigned=(), updated=())
    def npu_ops_init(*args, **kwargs):
        with contextlib.suppress(TypeError):  # invalid call: the original reports it
            call = signature.bind(*args, **kwargs)
            if "submodules" in call.arguments and why_not(call.arguments.get("config")) is None:
                call.arguments["submodules"] = npuify(call.arguments["submodules"])
                args, kwargs = call.args, call.kwargs
        return original(*args, **kwargs)

    return npu_ops_init


@functools.cache
def _module(original: type) -> type:
    """Return the class that replaces `original` in a spec.

    The class is made on demand, because its base class is Megatron's. Megatron may not be imported
    yet when this file is.
    """
    base = sys.modules["megatron.core.transformer.module"].MegatronModule
    is_engine = original is not getattr(sys.modules.get(_LOCAL[0]), _LOCAL[1], None)

    class NpuOpsAttention(base):
        """`npu_ops.attention` as Megatron's core attention."""

        def __init__(
            self,
            config,
            layer_number,
            attn_mask_type,
            attention_type,
            attention_dropout=None,
            softmax_scale=None,
            **more,
        ):
            reason = why_not(config)
            if reason:
                raise ValueError(reason)
            super().__init__(config=config)
            self.layer_number = max(1, layer_number)
            self.attn_mask_type = attn_mask_type
            dropout = config.attention_dropout if attention_dropout is None else attention_dropout
            self.attention_dropout = torch.nn.Dropout(dropout)
            self.softmax_scale = softmax_scale
            if softmax_scale is None:
                self.softmax_scale = 1.0 / math.sqrt(config.kv_channels)
            self._shared = getattr(config, "context_parallel_size", 1) > 1
            self._groups = more.get("pg_collection")
            arguments = (config, layer_number, attn_mask_type, attention_type)
            settings = {"attention_dropout": attention_dropout, "softmax_scale": softmax_scale}
            self._build = functools.partial(original, *arguments, **settings, **more)
            self._built = []  # in a list, so that it is neither a submodule nor in checkpoints
            # With attention_mask_type "general", MindSpeed's module applies the caller's mask.
            general = getattr(config, "attention_mask_type", "causal") == "general"
            self._by_type = is_engine and not general

        def forward(
            self,
            query,
            key,
            value,
            attention_mask=None,
            attn_mask_type=None,
            attention_bias=None,
            packed_seq_params=None,
            **more,
        ):
            call = (query, key, value, attention_mask, attn_mask_type, attention_bias)
            plain = all(option is None for option in more.values())
            if plain:
                group = context_parallel.group_of(self._groups) if self._shared else None
                out = attend(self, *call, packed_seq_params, by_type=self._by_type, group=group)
                if out is not None:
                    return out
            return self._original()(*call, packed_seq_params, **more)

        def _original(self):
            if not self._built:
                self._built.append(self._build())
            return self._built[0].train(self.training)

        def _load_from_state_dict(self, state_dict, prefix, *args):
            state_dict.pop(f"{prefix}_extra_state", None)  # Transformer Engine's fp8 state
            super()._load_from_state_dict(state_dict, prefix, *args)

    return NpuOpsAttention


def attend(
    layer, query, key, value, mask, mask_type, bias, packing, by_type: bool, scale=None, group=None
) -> torch.Tensor | None:
    """Return the core attention's output, `[s, b, h]` or `[t, h]`.

    Returns None if npu-ops does not support the call.

    by_type: True, as in Transformer Engine: the types causal, causal_bottom_right and no_mask
    ignore the caller's mask, and padding_causal adds the causal mask to it. False: if the caller
    passes a mask, only that mask applies.
    group: ranks that share each sequence.
    """
    if not _fits(query, key, value, bias, packing):
        return None
    if group is not None and group.size() > 1:
        of = _shared_dense if packing is None else _shared_packed
        calls = of(layer, query, key, value, mask, mask_type, bias, packing, by_type, group)
    elif packing is None:
        calls = _whole(query, key, value, _dense(layer, query, key, mask, mask_type, by_type))
    else:
        calls = _whole(query, key, value, _packed(layer, query, key, mask_type, packing))
    if calls is None:
        return None
    config, dropout = layer.config, layer.attention_dropout.p if layer.training else 0.0
    with _generator(config, dropout):
        parts = [
            npu_ops.attention(
                *tensors,
                bias=bias,
                scale=layer.softmax_scale if scale is None else scale,
                dropout_p=dropout,
                deterministic=bool(getattr(config, "deterministic_mode", False)),
                sinks=_sinks(config, query),
                **given,
            )
            for tensors, given in calls
        ]
    return (parts[0] if len(parts) == 1 else torch.cat(parts)).flatten(-2)


def _whole(query, key, value, given: dict | None) -> list | None:
    return None if given is None else [((query, key, value), given)]


def _shared_dense(
    layer, query, key, value, mask, mask_type, bias, packing, by_type, group
) -> list | None:
    """Return the calls of `npu_ops.attention` for `[s, b, n, d]`; None if unsupported.

    With a causal mask there is one call for each of this rank's two chunks of a sequence. The
    checks must have the same result on all ranks, because the gathers are collective.
    """
    kind = (mask_type if by_type and mask_type is not None else layer.attn_mask_type).name
    mask = None if by_type else mask
    if mask is None:
        fits = kind in ("causal", "no_mask")
    else:
        fits = _is_mask(mask, query, key, len(key) * group.size())
    if not fits or bias is not None or len(query) != len(key) or len(query) % 2:
        return None
    keys, values = (context_parallel.in_order(x, group) for x in (key, value))
    given = {"layout": "SBND"}
    if mask is None and kind == "no_mask":
        return _whole(query, keys, values, given)
    if mask is not None and not _readable_causal(mask, group):
        return _whole(query, keys, values, given | {"attn_mask": _takes_part(mask, None)})
    halves = zip(query.chunk(2), context_parallel.chunks_of(group), strict=True)
    ends = [(half, (chunk + 1) * len(half)) for half, chunk in halves]
    return [((half, keys[:end], values[:end]), given | {"is_causal": True}) for half, end in ends]


def _readable_causal(mask: torch.Tensor, group) -> bool:
    readable = is_plain(mask) and not is_captured(mask.device)
    return readable and context_parallel.is_causal_part(mask, group)


def _shared_packed(
    layer, query, key, value, mask, mask_type, bias, packing, by_type, group
) -> list | None:
    """Return the call of `npu_ops.attention` for `[t, n, d]`; None if unsupported.

    In the call, each chunk of this rank is a packed sequence with its own keys.
    """
    starts = _starts(layer, query, mask_type, packing)
    if starts is None or bias is not None or is_captured(query.device):
        return None
    queries, keys = (x.detach().cpu() for x in starts)
    causal = "causal" in (mask_type or layer.attn_mask_type).name
    if not keys.equal(queries) or int(queries[0]) or len(query) != len(key):
        return None
    if int(queries[-1]) != len(query) * group.size():
        return None
    found = context_parallel.packed(queries, group, causal)
    if found is None:
        return None
    rows = found.rows.to(query.device)
    gathered = (context_parallel.all_gather(x, group).flatten(0, 1)[rows] for x in (key, value))
    longest = found.longest
    given = {
        "layout": "TND",
        "is_causal": causal,
        "cu_seqlens_q": found.queries.to(query.device),
        "cu_seqlens_k": found.keys.to(query.device),
        "cu_seqlens_cpu": (found.queries, found.keys),
        "max_seqlen_q": longest[0],
        "max_seqlen_k": longest[1],
    }
    return [((query, *gathered), given)]


def _sinks(config, query) -> torch.Tensor | None:
    """Return zeros `[n]` as extra scores for off-by-one softmax; None for vanilla softmax."""
    if getattr(config, "softmax_type", "vanilla") == "vanilla":
        return None
    return query.new_zeros(query.shape[-2], dtype=torch.float32)


def _fits(query, key, value, bias, packing) -> bool:
    tensors = [query, key, value, *([] if bias is None else [bias])]
    return (
        all(isinstance(x, torch.Tensor) and x.dtype in check.FLOATS for x in tensors)
        and all(x.device == query.device for x in tensors)
        and query.device.type in ("cpu", "npu")
        and query.dtype == key.dtype == value.dtype
        and (bias is None or bias.dtype in (query.dtype, torch.float32))
        and query.dim() == key.dim() == value.dim() == (4 if packing is None else 3)
        and key.shape[:-1] == value.shape[:-1]
        and query.shape[-1] == key.shape[-1]
        and 0 < key.shape[-2] <= query.shape[-2]
        and query.shape[-2] % key.shape[-2] == 0
    )


@contextlib.contextmanager
def _generator(config, dropout: float):
    """Fork the RNG as DotProductAttention does, so that tensor-parallel ranks draw different masks.

    config: the layer's. dropout: probability; without dropout nothing is forked.
    """
    if dropout and not config.sequence_parallel:
        with sys.modules["megatron.core.tensor_parallel"].get_cuda_rng_tracker().fork():
            yield
    else:
        yield


# Masks


def _dense(layer, query, key, mask, mask_type, by_type: bool) -> dict | None:
    """Return the arguments of `npu_ops.attention` for `[s, b, n, d]`, or None."""
    given = {"layout": "SBND"}
    lengths = query.shape[0], key.shape[0]
    kind = (mask_type if by_type and mask_type is not None else layer.attn_mask_type).name
    window = _window(layer)
    if window is not None:  # Megatron's local module ignores the caller's mask if it has a window
        if by_type and kind != "causal":
            return None
        return given | {"window": window, "is_causal": by_type}
    if by_type and kind in ("causal", "causal_bottom_right", "no_mask"):
        alignment = "top_left" if kind == "causal" else "bottom_right"
        return given | {"is_causal": kind != "no_mask", "causal_alignment": alignment}
    if mask is None:
        if kind == "causal" and 1 < lengths[0] != lengths[1]:
            return None
        return given | {"is_causal": "causal" in kind and lengths[0] > 1}
    if not _is_mask(mask, query, key):
        return None
    if kind == "causal" and lengths[0] == lengths[1] and _is_causal(mask):
        return given | {"is_causal": True}
    both = by_type and kind == "padding_causal"
    return given | {"attn_mask": _takes_part(mask, lengths if both else None)}


def _window(layer) -> tuple[int, int] | None:
    size = getattr(layer.config, "window_size", None)
    if size is None:
        return None
    utils = sys.modules["megatron.core.transformer.utils"]
    # Before 0.15 every layer has the window.
    windowed = getattr(utils, "is_layer_window_attention", None)
    skip = getattr(layer.config, "window_attn_skip_freq", None)
    return tuple(size) if windowed is None or windowed(size, skip, layer.layer_number) else None


def _is_mask(mask, query, key, keys: int | None = None) -> bool:
    """Return whether `mask` is a bool mask `[b, n, sq, sk]`, any dimension of which may be 1.

    `[sq, sk]` counts, too. In Megatron True hides a key.
    """
    full = (query.shape[1], query.shape[2], query.shape[0], keys or key.shape[0])
    return (
        isinstance(mask, torch.Tensor)
        and mask.dtype == torch.bool
        and mask.device == query.device
        and (
            (mask.dim() == 4 and all(m in (1, s) for m, s in zip(mask.shape, full, strict=True)))
            or tuple(mask.shape) == full[2:]
        )
    )


def _is_causal(mask: torch.Tensor) -> bool:
    """Return whether `mask` is exactly the causal mask.

    Every layer reads the values again, because it cannot know whether the previous layer had the
    same mask. False in a trace or a captured graph, where values cannot be read.
    """
    if not is_plain(mask) or is_captured(mask.device):
        return False
    rows = mask.shape[-1]
    if mask.shape[-2] != rows or mask.numel() != rows * rows:
        return False
    return mask.reshape(rows, rows).equal(_above(rows, rows, mask))


def _takes_part(mask: torch.Tensor, causal: tuple[int, int] | None) -> torch.Tensor:
    """Convert a mask of Megatron to one of `npu_ops.attention`, in which True attends."""
    return ~mask if causal is None else ~(mask | _above(*causal, mask))


def _above(rows: int, columns: int, like: torch.Tensor) -> torch.Tensor:
    return torch.ones(rows, columns, dtype=torch.bool, device=like.device).triu(1)


def _packed(layer, query, key, mask_type, packing) -> dict | None:
    """Return the arguments of `npu_ops.attention` for `[t, n, d]`; None if unsupported.

    A sequence includes the padding at its end. With a causal mask no token attends to that padding.
    """
    starts = _starts(layer, query, mask_type, packing)
    if starts is None:
        return None
    given = {
        "layout": "TND",
        "is_causal": "causal" in (mask_type or layer.attn_mask_type).name,
        "window": _window(layer),
        "cu_seqlens_q": starts[0],
    }
    if is_captured(query.device):  # the graph would freeze these lengths
        return given | {"cu_seqlens_k": starts[1]}
    # The vendor's operators need the lengths on the host.
    queries, keys = _lengths(starts[0]), _lengths(starts[1])
    if (queries.first, queries.last) != (0, query.shape[0]):
        return None
    if (keys.first, keys.last) != (0, key.shape[0]):
        return None
    given |= {"max_seqlen_q": queries.longest, "cu_seqlens_cpu": queries.ends}
    if keys.ends.equal(queries.ends):
        return given
    both = {"cu_seqlens_cpu": (queries.ends, keys.ends)}
    return given | both | {"cu_seqlens_k": starts[1], "max_seqlen_k": keys.longest}


def _starts(layer, query, mask_type, packing) -> list[torch.Tensor] | None:
    """Return cu_seqlens of the queries and of the keys, on the device; None if unsupported."""
    kind = (mask_type or layer.attn_mask_type).name
    padded = [getattr(packing, f"cu_seqlens_{x}_padded", None) for x in ("q", "kv")]
    starts = [
        getattr(packing, f"cu_seqlens_{x}", None) if p is None else p
        for x, p in zip(("q", "kv"), padded, strict=True)
    ]
    if (
        getattr(packing, "qkv_format", None) != "thd"
        or (getattr(packing, "local_cp_size", None) or 1) > 1
        or ("causal" not in kind and any(p is not None for p in padded))
        or not all(_is_lengths(x, query) for x in starts)
    ):
        return None
    return starts


class _Lengths(NamedTuple):
    ends: torch.Tensor
    first: int
    last: int
    longest: int


def _lengths(starts: torch.Tensor) -> _Lengths:
    ends = starts.detach().cpu()
    return _Lengths(ends, int(ends[0]), int(ends[-1]), int(ends.diff().max()))


def _is_lengths(x, query) -> bool:
    return (
        isinstance(x, torch.Tensor)
        and x.dtype in (torch.int32, torch.int64)
        and x.dim() == 1
        and x.numel() > 1
        and x.device == query.device
    )
