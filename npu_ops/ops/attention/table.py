"""What computes attention, in order of preference, and what each can do: all that a plan knows.

Read from top to bottom: the first operator that has everything a call needs runs it. Facts are of
torch_npu 2.13's schemas and the vendor's documents; a fact that was learnt from a bug names it.

npu_prompt_flash_attention and npu_incre_flash_attention have no row: they return no statistics of
the softmax, and npu_fused_infer_attention_score covers both.
"""

from __future__ import annotations

import dataclasses

UNBOUNDED = 2**31 - 1  # of pre_tokens and next_tokens
# The mask that sparse modes 2, 3 and 4 are described by, whatever the lengths: ones above the
# diagonal. Kept for each device; never made for a call.
COMPRESSED = 2048


@dataclasses.dataclass(frozen=True)
class Mask:
    """How a vendor's operator is told a mask. tensor: "none", "compressed" or "dense"."""

    sparse_mode: int
    tensor: str
    meaning: str


# Without a mask tensor every operator ignores sparse_mode, so a mode above 0 always has one.
MASKS = {
    "none": Mask(0, "none", "every key takes part"),
    "dense": Mask(1, "dense", "the mask of all pairs, inverted: the vendor's True leaves out"),
    "causal from the top left": Mask(2, "compressed", "query i sees keys up to i"),
    "causal to the bottom right": Mask(3, "compressed", "the last query sees the last key"),
    "window to the bottom right": Mask(4, "compressed", "pre_tokens and next_tokens are its sides"),
}


@dataclasses.dataclass(frozen=True)
class Operator:
    """One way to compute attention.

    runs: the implementation that calls it, as in `npu_ops.explain`.
    serves: "training" has a backward.
    keys: "dense"; "packed" by cu_seqlens; "padded", of which some exist; "paged".
    takes: of bias, softcap, sinks, dropout, nonpositive_scale (0 or less), lse gradient. Sinks can
        be put in afterwards by whatever returns the softmax's statistics.
    largest: head dimension. multiple_of: what head dimensions are padded to. one_dim: values have
        the same. dims: the (head, value) dimensions that packed queries may have, if not any.
    lengths: "host" where they must be lists. captured: why a graph cannot capture it. update: the
        argument that has to be set before a replay.
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

# vllm-ascend #9632: the tiling of packed queries knows these and no others.
_PACKED_DIMS = ((64, 64), (128, 128), (192, 192), (192, 128))
# No dense mask or bias: past key 512 masks of one row are read wrong (vllm-ascend #15503).
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
    # Its lengths are tensors, but of the host; a graph captures it without lengths alone.
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
            "sequences of up to 512 tokens by a kernel of ours, with NPU_OPS_CONSISTENT each query "
            "by one",
        ),
    ),
    _BLOCKS,
    dataclasses.replace(
        _BLOCKS,
        name="reference",
        runs="reference",
        devices=("cpu", "cuda", "npu"),
        dtypes=_ANY,
        notes=("memory for every pair of a query and a key",),
    ),
)
