"""Lists the attention operators in order of preference, with their capabilities, for plan.py.

The first operator that supports a call runs it. The facts are from torch_npu 2.13's schemas and the
vendor's documents; a fact learnt from a bug names the bug. npu_prompt_flash_attention and
npu_incre_flash_attention have no row: they return no softmax statistics, and
npu_fused_infer_attention_score covers both.
"""

from __future__ import annotations

import dataclasses

UNBOUNDED = 2**31 - 1  # unlimited pre_tokens or next_tokens
# Size of the square mask for sparse modes 2, 3 and 4, for all lengths: ones above the diagonal.
# aclnn.py caches the mask per device.
COMPRESSED = 2048


@dataclasses.dataclass(frozen=True)
class Mask:
    """How to pass a mask to a vendor operator. tensor: "none", "compressed" or "dense"."""

    sparse_mode: int
    tensor: str
    meaning: str


# Vendor operators ignore sparse_mode without a mask tensor, so each mode above 0 has a tensor.
MASKS = {
    "none": Mask(0, "none", "every key takes part"),
    "dense": Mask(1, "dense", "the full mask, inverted: in the operator True hides a key"),
    "causal from the top left": Mask(2, "compressed", "query i sees keys up to i"),
    "causal to the bottom right": Mask(3, "compressed", "the last query sees the last key"),
    "window to the bottom right": Mask(
        4, "compressed", "pre_tokens and next_tokens are the window"
    ),
}


@dataclasses.dataclass(frozen=True)
class Operator:
    """One way to compute attention.

    runs: the implementation that calls it, as in `npu_ops.explain`.
    serves: "training", i.e. it has a backward, and "inference".
    keys: supported keys: "dense"; "packed" by cu_seqlens; "padded", with a length per sequence;
    "paged".
    takes: supported options: bias, softcap, sinks, dropout, nonpositive_scale (0 or less), lse
    gradient. Sinks can be added afterwards if the operator returns the softmax's statistics.
    largest: largest head dimension.
    multiple_of: head dimensions are padded to a multiple of it.
    one_dim: keys and values must have the same head dimension.
    dims: the (head, value) dimensions that packed queries may have; empty: any.
    lengths: "host" if they must be lists.
    captured: why a graph cannot capture it.
    update: the argument to update before a replay.
    """

    name: str
    runs: str
    devices: tuple[str, ...]
    serves: tuple[str, ...]
    dtypes: tuple[str, ...]
    keys: tuple[str, ...]
    masks: tuple[str, ...]
    takes: tuple[str, ...] = ()
    largest: int = UNBOUNDED
    multiple_of: int = 1
    one_dim: bool = False
    dims: tuple[tuple[int, int], ...] = ()
    lengths: str = ""
    captured: str = ""
    update: str = ""
    notes: tuple[str, ...] = ()


_HALF = ("float16", "bfloat16")
_FLOATS = (*_HALF, "float32")
_ANY = ("float64", *_FLOATS)
_BOTH = ("training", "inference")
_ALL_KEYS = ("dense", "packed", "padded", "paged")
_VENDOR = tuple(MASKS)
_EVERY_MASK = (*MASKS, "window from the top left")
_EVERYTHING = ("bias", "softcap", "sinks", "dropout", "nonpositive_scale", "lse gradient")

# vllm-ascend #9632: the tiling of packed queries supports only these.
_PACKED_DIMS = ((64, 64), (128, 128), (192, 192), (192, 128))
# No dense mask or bias: past key 512, masks with one row are misread (vllm-ascend #15503).
_INFERENCE_MASKS = ("none", *list(MASKS)[2:])

_FUSED_INFER = Operator(
    "npu_fused_infer_attention_score",
    "aclnn",
    ("npu",),
    ("inference",),
    _HALF,
    _ALL_KEYS,
    _INFERENCE_MASKS,
    takes=("sinks",),
    largest=512,
    multiple_of=16,
    one_dim=True,
    dims=_PACKED_DIMS,
    lengths="host",
    update="actual_seq_lengths_kv",
)
_FUSION = Operator(
    "npu_fusion_attention",
    "aclnn",
    ("npu",),
    _BOTH,
    _FLOATS,
    ("dense", "packed"),
    _VENDOR,
    takes=("sinks",),
    largest=512,
    multiple_of=16,
    lengths="host",
    captured="it returns its seed as a host number",
)
_BLOCKS = Operator(
    "blocks of queries",
    "cpu",
    ("cpu",),
    _BOTH,
    _FLOATS,
    _ALL_KEYS,
    _EVERY_MASK,
    takes=_EVERYTHING,
)
OPERATORS = (
    dataclasses.replace(
        _FUSED_INFER, name="npu_fused_infer_attention_score_v2", update="actual_seq_kvlen"
    ),
    _FUSED_INFER,
    _FUSION,
    # pse_type 0 adds a bias to the scaled scores; v1 and v3 multiply it by the scale.
    dataclasses.replace(
        _FUSION,
        name="npu_fusion_attention_v2",
        keys=("dense",),
        takes=("sinks", "bias"),
        lengths="",
    ),  # fmt: skip
    # v3 takes lengths as tensors in host memory, so a graph can only capture it without lengths.
    dataclasses.replace(
        _FUSION, name="npu_fusion_attention_v3", keys=("dense",), lengths="", captured=""
    ),
    dataclasses.replace(
        _BLOCKS,
        name="our flash attention",
        runs="triton_ascend",
        devices=("npu", "cuda"),
        largest=256,
    ),
    dataclasses.replace(
        _BLOCKS,
        name="torch flash attention",
        takes=("sinks",),
        one_dim=True,
        notes=(
            "npu-ops' own kernel computes sequences of up to 512 tokens, and with "
            "NPU_OPS_CONSISTENT each query",
        ),
    ),
    _BLOCKS,
    dataclasses.replace(
        _BLOCKS,
        name="reference",
        runs="reference",
        devices=("cpu", "cuda", "npu"),
        dtypes=_ANY,
        notes=("it allocates memory for every pair of a query and a key",),
    ),
)
