"""Registers attention under the name `npu_ops`, for models that are loaded with that name:

    model = AutoModel.from_pretrained(..., attn_implementation="npu_ops")

transformers makes the same masks as for SDPA: boolean ones, or None if is_causal is enough. If a
mask is causal and otherwise only separates packed sequences, npu-ops replaces it by the sequences'
starts. Vision towers pass their images' starts, as they do for flash attention, so one call
computes all images. Each layer reads masks and lengths again, because their memory may have changed
since the last layer.

If verl splits a sequence over ranks, the ranks exchange tokens and heads, as verl does for flash
attention.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterable

import torch

import npu_ops
from npu_ops.core import check, log
from npu_ops.core.hardware import is_captured
from npu_ops.core.library import is_plain
from npu_ops_adapters.calls import DEVICES, in_words_of
from npu_ops_adapters.patching import Patch
from npu_ops_adapters.transformers import models
from npu_ops_adapters.verl import ulysses

NAME = "npu_ops"
_FUNCTIONS = "transformers.modeling_utils"
_MASKS = "transformers.masking_utils"
_WHY = "a model selects npu-ops with attn_implementation='npu_ops'"
_SPREAD = "a sequence over several ranks (verl's Ulysses)"
_ARGUMENTS = {
    "cu_seqlens_q": "cu_seq_lens_q", "cu_seqlens_k": "cu_seq_lens_k",
    "max_seqlen_q": "max_length_q", "max_seqlen_k": "max_length_k",
    "attn_mask": "attention_mask", "bias": "attention_mask", "window": "sliding_window",
    "scale": "scaling", "dropout_p": "dropout", "sinks": "s_aux",
}  # fmt: skip
_OVER_RANKS = (
    "which npu-ops does not support over several ranks (verl's Ulysses); flash_attention_2 may"
)


def patches() -> Iterable[Patch]:
    """Patch the tables of attention and mask functions, and the check for packed images."""
    functions = f"{_FUNCTIONS}:AttentionInterface._global_mapping.{NAME}"
    yield _name(functions, _function, left=_hand_models_over)
    yield _name(f"{_MASKS}:AttentionMaskInterface._global_mapping.{NAME}", _mask)
    asks = "is_flash_attention_requested"
    vision = models.vision()
    imported = {model for model in vision if models.home(model) in sys.modules}
    for model in vision:
        # Models of version 4 have no such function: they compare the implementation's name.
        if model not in imported or models.having((model,), asks):
            yield models.patch(
                f"{models.home(model)}:{asks}",
                "attention",
                _packs_images,
                (("config", "requested_attention_implementation", "version"),),
                why=(
                    "without this patch images run one by one, and each layer copies lengths "
                    "to the host"
                ),
                rebind=False,
            )


def _name(target: str, make: Callable, **changes) -> Patch:
    return models.patch(
        target, "attention", make, (), why=_WHY, optional=True, rebind=False,
        remove_when="transformers takes attention functions from entry points", **changes,
    )  # fmt: skip


def _hand_models_over() -> None:
    """Switch loaded models from `npu_ops` to SDPA, because a revert has removed that name."""
    base = sys.modules["transformers.configuration_utils"].PretrainedConfig
    configs = (one for one in gc.get_objects() if issubclass(type(one), base))
    ours = [config for config in configs if config._attn_implementation == NAME]
    for config in ours:
        config._attn_implementation = "sdpa"
    if ours:
        log.logger.warning(
            "transformers: revert() removed attn_implementation='npu_ops'; %d configurations of "
            "loaded models now use 'sdpa'",
            len(ours),
        )


def _mask(original: None) -> Callable:
    def npu_ops_mask(*args, **options):
        mask = sys.modules[_MASKS].sdpa_mask(*args, **options)
        if mask is not None:
            _note_packing(mask)
        return mask

    return npu_ops_mask


def _note_packing(mask) -> None:
    """If a mask is packed and causal, attach the sequences' starts and a copy of the mask to it.

    To compare the mask's values, the host must wait for the device, which it cannot do in traces
    and captured graphs. So masks there are skipped, as are masks that are not square (decoding).
    """
    square = mask.shape[0] == 1 and mask.shape[2] == mask.shape[3]
    if not square or not is_plain(mask) or is_captured(mask.device):
        return
    rows = mask[0, 0]
    starts = torch.nn.functional.pad(~rows.diagonal(-1), (1, 0), value=True)
    number = starts.cumsum(0)
    packed = (number[:, None] == number).tril_()
    if torch.equal(rows, packed):
        starts = starts.nonzero().flatten().to(torch.int32)
        starts = torch.cat((starts, starts.new_full((1,), rows.shape[0])))
        mask.npu_ops_packing = (starts, packed)


def _packing(mask):
    """Return the starts that `_note_packing` attached, or None if the mask's values have changed.

    Also return None in a trace or a captured graph, where values cannot be read.
    """
    starts, packed = getattr(mask, "npu_ops_packing", (None, None))
    if starts is None or not is_plain(mask) or is_captured(mask.device):
        return None
    return starts if torch.equal(mask[0, 0], packed) else None


def _packs_images(original: Callable) -> Callable:
    def npu_ops_is_flash_attention_requested(
        config=None, requested_attention_implementation=None, version=None
    ):
        given = config is not None and requested_attention_implementation is None
        if given and version is None and config._attn_implementation == NAME:
            return True
        return original(config, requested_attention_implementation, version)

    return npu_ops_is_flash_attention_requested


def _function(original: None) -> Callable:
    def npu_ops_attention(
        module, query, key, value, attention_mask=None, dropout=0.0, scaling=None, is_causal=None,
        position_bias=None, cache=None, **options,
    ):  # fmt: skip
        if is_causal is None:
            is_causal = getattr(module, "is_causal", True)
        spread = _is_spread(is_causal, options.get("position_ids"))
        if position_bias is not None or cache is not None or query.device.type not in DEVICES:
            if spread:
                raise RuntimeError(f"attention on {query.device}: {_OVER_RANKS}")
            return sys.modules[_FUNCTIONS].sdpa_attention_forward(
                module, query, key, value, attention_mask, dropout=dropout, scaling=scaling,
                is_causal=is_causal, position_bias=position_bias, cache=cache, **options,
            )  # fmt: skip
        settings = {"scale": scaling, "dropout_p": dropout}
        settings |= {"softcap": options.get("softcap"), "sinks": options.get("s_aux")}
        if spread:
            return _spread(query, key, value, is_causal, attention_mask, options, settings), None
        starts, known = options.get("cu_seq_lens_q"), _packing(attention_mask)
        if known is not None and key.shape[2] == query.shape[2] and _agree(known, starts):
            packing = {"cu_seq_lens_q": known}
            return _packed(query, key, value, True, packing, settings), None
        if starts is not None and attention_mask is None:
            return _packed(query, key, value, bool(is_causal), options, settings), None
        if starts is not None:
            attention_mask = _apart(attention_mask, starts, options.get("cu_seq_lens_k"), key)
        return _dense(query, key, value, attention_mask, bool(is_causal), settings), None

    return npu_ops_attention


def _is_spread(is_causal: bool, position_ids) -> bool:
    """Return whether Ulysses has split the tokens over ranks, so that this rank has only a part.

    verl does not split the images of vision towers, whose layers are not causal and get no
    position_ids.

    Raises:
        RuntimeError: a causal layer got no position_ids, which tell where sequences start.
    """
    if ulysses.size() == 1:
        return False
    if position_ids is None and is_causal:
        raise RuntimeError(
            f"position_ids: got None in a causal layer, needs [1, T] for {_SPREAD}. transformers "
            "passes None for [3, 1, T]: give the model [4, 1, T], with the text's positions first"
        )
    return position_ids is not None


def _spread(query, key, value, is_causal, mask, options, settings):
    """Attend with tokens split over ranks: `[1, N, T / ranks, D]` in, `[1, T / ranks, N, D]` out.

    Each rank attends to all tokens with some of the heads. The mask covers this rank's tokens only,
    so the sequences' starts are computed from the positions of all ranks instead.
    """
    if mask is not None and _packing(mask) is None:
        raise RuntimeError(f"attention_mask: got a mask beyond packed and causal, {_OVER_RANKS}")
    if options.get("cu_seq_lens_q") is not None or settings["sinks"] is not None:
        raise RuntimeError(f"cu_seq_lens_q, s_aux: got a value, {_OVER_RANKS}")
    position_ids = options["position_ids"]
    if position_ids.shape != (1, query.shape[2]):
        raise check.shape("position_ids", position_ids, f"[1, {query.shape[2]}] for {_SPREAD}")
    key, value = (ulysses.with_enough_heads(x, heads=1) for x in (key, value))
    query, key, value = (ulysses.gather_tokens(x, tokens=2, heads=1) for x in (query, key, value))
    lengths = {"cu_seq_lens_q": ulysses.starts(position_ids)}
    window = {"sliding_window": options.get("sliding_window")}
    out = _packed(query, key, value, is_causal, lengths | window, settings)
    return ulysses.gather_heads(out, tokens=1, heads=2)


def _dense(query, key, value, mask, is_causal, settings):
    """Attend dense sequences: `[B, N, S, D]` in, `[B, S, N, D]` out.

    A call without a mask means the same as in transformers' SDPA:

    - A single query attends to all keys.
    - S causal queries attend only to the first S keys: the rest of a cache of fixed size is empty.
    """
    length = query.shape[2]
    is_causal = is_causal and mask is None and length > 1
    if is_causal and key.shape[2] > length:
        key, value = key[:, :, :length], value[:, :, :length]
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    return in_words_of(
        _ARGUMENTS, npu_ops.attention, query, key, value, is_causal=is_causal,
        **_mask_arguments(mask, query, key), **settings,
    )  # fmt: skip


def _mask_arguments(mask, query, key) -> dict:
    """Return the mask under the name attn_mask if it is boolean, else under the name bias."""
    if mask is None:
        return {}
    check.tensor("attention_mask", mask)
    if mask.dim() != 4 or mask.shape[3] < key.shape[1]:
        shape = [*query.shape[:1], "1 or heads", query.shape[1], key.shape[1]]
        raise check.shape("attention_mask", mask, f"[{', '.join(map(str, shape))}]")
    mask = mask[..., : key.shape[1]]  # a cache of fixed size has more columns
    if mask.dtype == torch.bool:
        return {"attn_mask": mask}
    return {"bias": mask if mask.dtype in (query.dtype, torch.float32) else mask.to(query.dtype)}


def _agree(known, starts) -> bool:
    """Return whether `starts` is None or equals `known`, the starts read from the mask."""
    return starts is None or torch.equal(known, starts.to(known.dtype))


def _packed(query, key, value, is_causal, options, settings):
    """Attend packed sequences: `[1, N, T, D]` in, `[1, T, N, D]` out.

    The lengths are copied to the host, because the vendor's operators need them there.
    """
    if query.shape[0] != 1:
        raise check.shape("query", query, "a batch of 1 with cu_seq_lens_q")
    starts, key_starts = options["cu_seq_lens_q"], options.get("cu_seq_lens_k")
    window = options.get("sliding_window")
    query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))
    if query.device.type != "cpu" and not is_captured(query.device):
        on_host = tuple(s.cpu() for s in (starts, key_starts) if s is not None)
        settings["cu_seqlens_cpu"] = on_host if len(on_host) > 1 else on_host[0]
    out = in_words_of(
        _ARGUMENTS, npu_ops.attention, query, key, value, layout="TND", is_causal=is_causal,
        cu_seqlens_q=starts, cu_seqlens_k=key_starts,
        max_seqlen_q=_number(options.get("max_length_q")),
        max_seqlen_k=_number(options.get("max_length_k")),
        window=None if window is None else (window - 1, window - 1), **settings,
    )  # fmt: skip
    return out[None]


def _number(length):
    """Return a maximum length if it is an int, else None, which stands for the number of tokens.

    A tensor is not read, because it may be on the device.
    """
    return length if isinstance(length, int) else None


def _apart(mask, starts, key_starts, key):
    """Return the mask, limited to pairs of a query and a key in the same packed sequence.

    Between sequences a boolean mask becomes False, and an additive mask becomes -inf.
    """
    key_starts = starts if key_starts is None else key_starts
    rows, columns = (
        torch.searchsorted(s, torch.arange(n, device=key.device, dtype=s.dtype), right=True)
        for s, n in ((starts, mask.shape[2]), (key_starts, mask.shape[3]))
    )
    together = rows[:, None] == columns
    if mask.dtype == torch.bool:
        return mask & together
    return mask.masked_fill(~together, float("-inf"))
