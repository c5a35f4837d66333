"""Chooses the operator that computes an attention call, and its arguments: the plan of the call.

A plan also says why each operator before the chosen one in the table does not fit. It is a pure
function of plain values: making it reads no tensor, imports no framework and waits for no device.
"""

from __future__ import annotations

import dataclasses
import functools

from npu_ops.core import socs
from npu_ops.ops.attention.table import COMPRESSED, MASKS, OPERATORS, UNBOUNDED, Mask, Operator

_LAYOUTS = ("BSND", "BNSD", "SBND", "TND", "BSH", "SBH")
_KEYS = ("dense", "packed", "padded", "paged")


@dataclasses.dataclass(frozen=True)
class AttentionSpec:
    """Description of an attention call.

    layout: of q: BSND, BNSD, SBND, BSH, SBH, or TND for packed queries.
    kv_heads: None: equal to heads.
    value_dim: head dimension of v; None: equal to head_dim.
    dtype: e.g. "bfloat16".
    query_length, key_length: of a sequence, or of the longest; None if unknown.
    same_lengths: each packed sequence has as many queries as keys.
    keys: "dense", "packed" (cu_seqlens), "padded" (seqlens_k) or "paged" (block_table).
    block_size: of paged keys.
    contiguous_blocks: the cache is contiguous, with heads first or rows first.
    host_lengths: cu_seqlens or seqlens_k are also given in host memory.
    leading_zero: cu_seqlens start with 0, as in `npu_ops.attention`.
    is_causal, causal_alignment, window: as in `npu_ops.attention`.
    prefix: all queries see the first keys, with is_causal for the rest.
    mask: there is a dense boolean mask.
    bias, softcap, sinks, dropout: the call has it.
    nonpositive_scale: scores are multiplied by 0 or less.
    training: a gradient is needed.
    lse_gradient: the log-sum-exp has an incoming gradient.
    deterministic: the same bits in every run.
    consistent: NPU_OPS_CONSISTENT is set: a query gets the bits that it has in training.
    graph_capture: the call is captured in a graph and replayed.
    device: npu, cpu or cuda.
    soc: of an NPU.
    operators: names of torch_npu's attention operators; None: all in the table.
    """

    layout: str = "BSND"
    heads: int = 1
    kv_heads: int | None = None
    head_dim: int = 128
    value_dim: int | None = None
    dtype: str = "bfloat16"
    query_length: int | None = None
    key_length: int | None = None
    same_lengths: bool = False
    keys: str = "dense"
    block_size: int = 0
    contiguous_blocks: bool = True
    host_lengths: bool = False
    leading_zero: bool = True
    is_causal: bool = False
    causal_alignment: str = "bottom_right"
    window: tuple[int, int] | None = None
    prefix: bool = False
    mask: bool = False
    bias: bool = False
    softcap: bool = False
    nonpositive_scale: bool = False
    sinks: bool = False
    dropout: bool = False
    training: bool = False
    lse_gradient: bool = False
    deterministic: bool = False
    consistent: bool = False
    graph_capture: bool = False
    device: str = "npu"
    soc: str = "Ascend910B3"
    operators: tuple[str, ...] | None = None

    def check(self) -> None:
        """Raise ValueError for a call that no operator can compute, or that is ambiguous."""
        for name, allowed in (
            ("layout", _LAYOUTS),
            ("keys", _KEYS),
            ("dtype", ("bfloat16", "float16", "float32", "float64")),
            ("causal_alignment", ("bottom_right", "top_left")),
            ("device", ("npu", "cpu", "cuda")),
        ):
            if getattr(self, name) not in allowed:
                raise ValueError(
                    f"{name}: got {getattr(self, name)!r}, needs one of {', '.join(allowed)}"
                )
        for name in ("heads", "head_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: got {getattr(self, name)}, needs 1 or more")
        if self.kv_heads is not None and (self.kv_heads < 1 or self.heads % self.kv_heads):
            raise ValueError(f"kv_heads: got {self.kv_heads}, needs a divisor of {self.heads}")
        if self.window is not None and self.prefix:
            raise ValueError("window: got a value with a prefix, needs only one of the two")
        if self.mask and (self.is_causal or self.window is not None or self.prefix):
            raise ValueError(
                "mask: got a mask with is_causal, window or prefix, needs only one of them"
            )
        if self.prefix and self.keys != "dense":
            raise ValueError(f"keys: got {self.keys!r} with a prefix, needs 'dense'")
        if (self.mask or self.bias) and self.keys not in ("dense", "padded"):
            raise ValueError(f"keys: got {self.keys!r} with a mask or bias, needs dense or padded")
        if (self.keys == "packed") > (self.layout == "TND"):
            raise ValueError(f"layout: got {self.layout!r} with packed keys, needs 'TND'")
        if self.layout == "TND" and self.keys not in ("packed", "paged"):
            raise ValueError(f"keys: got {self.keys!r} with layout TND, needs 'packed' or 'paged'")
        if self.keys == "paged" and self.block_size < 1:
            raise ValueError(f"block_size: got {self.block_size}, needs 1 or more for paged keys")
        if self.keys == "paged" and self.training:
            raise ValueError("training: got True, needs False for paged keys, without a gradient")
        if self.device == "npu":
            socs.ub_bytes(self.soc)  # raises ValueError for an unknown SoC

    @property
    def mask_kind(self) -> str:
        """Return a key of `table.MASKS`, or "window from the top left".

        No sparse_mode of torch_npu expresses the latter.
        """
        if self.mask or self.prefix:
            return "dense"
        left, right = self.window or (-1, -1)
        right = 0 if self.is_causal else right
        if left < 0 and right < 0:
            return "none"
        square = self.same_lengths or (
            self.keys == "dense" and self.query_length == self.key_length is not None
        )
        bottom_right = square or self.causal_alignment == "bottom_right"
        if left < 0 and right == 0:
            if self.query_length == 1 and bottom_right:
                return "none"  # the only query is the last one
            top = self.causal_alignment == "top_left"
            return f"causal {'from the top left' if top else 'to the bottom right'}"
        return f"window {'to the bottom right' if bottom_right else 'from the top left'}"


@dataclasses.dataclass(frozen=True)
class AttentionPlan:
    """The operator that computes a call, and its arguments.

    operator: its name.
    runs: the implementation of `npu_ops.attention` that calls it.
    layout: its input_layout.
    mask_kind: a key of `table.MASKS`, or "window from the top left".
    sparse_mode, pre_tokens, next_tokens: its arguments.
    mask: form of its mask tensor: "none", "compressed" or "dense".
    lengths: form of the keys' lengths: "none", "ends" (cumulative, without the leading zero) or
    "each" (per sequence); queries always use ends.
    drop_leading_zero: whether to drop the first element of the caller's cu_seqlens.
    pad_head_dim: pad head dimensions with zeros to this size; 0: no padding.
    graph_update: the argument to update before a captured graph is replayed, or "".
    notes: further facts for the text of the plan.
    refused: (operator, why not) for each operator before it in the table.
    """

    operator: str
    runs: str
    layout: str
    mask_kind: str
    sparse_mode: int
    pre_tokens: int
    next_tokens: int
    mask: str
    lengths: str
    drop_leading_zero: bool
    pad_head_dim: int
    graph_update: str
    notes: tuple[str, ...]
    refused: tuple[tuple[str, str], ...]

    def as_dict(self) -> dict:
        """Return all fields by name."""
        return dataclasses.asdict(self)

    def why_not(self, runs: str) -> str | None:
        """Return None if the plan chose an operator of the implementation `runs`, else why not."""
        if runs == self.runs:
            return None
        reasons = [f"{name}: {why}" for name, why in self.refused if _runs(name) == runs]
        return "; ".join(reasons) or f"{self.operator} comes first"

    def __str__(self) -> str:
        told = [f"{self.operator} runs the call, layout {self.layout}"]
        if self.mask_kind == "none":
            told.append("without a mask: every key takes part")
        elif self.runs == "aclnn":
            told.append(f"{self.mask_kind}: sparse_mode {self.sparse_mode} ({_meaning(self)})")
        else:
            told.append(self.mask_kind)
        if self.mask == "compressed":
            told.append(f"with the {COMPRESSED} x {COMPRESSED} mask kept on the device")
        if self.lengths != "none":
            zero = " without the leading zero" if self.drop_leading_zero else ""
            told.append(f"key lengths as {_LENGTHS[self.lengths]}{zero}")
        if self.pad_head_dim:
            told.append(f"heads padded to {self.pad_head_dim}")
        if self.graph_update:
            told.append(f"update {self.graph_update} before each replay of a graph")
        text = "; ".join((*told, *self.notes)) + "."
        for name, why in self.refused:
            text += f" Not {name}: {why}."
        return text


_LENGTHS = {"ends": "a list of cumulative ends", "each": "a list with one length per sequence"}


def plan_attention(spec: AttentionSpec) -> AttentionPlan:
    """Choose the operator that computes an attention call.

    It is a pure function of `spec` and the table in `npu_ops/ops/attention/table.py`; it reads
    nothing from a device and does not query torch_npu. `npu_ops.attention` executes the returned
    plan.

    Args:
        spec: layouts, heads, lengths and masks; see `AttentionSpec`.

    Returns:
        An `AttentionPlan`; `print` shows a paragraph, `as_dict()` returns its fields.

    Raises:
        ValueError: no operator can compute it, or the spec is ambiguous; the message names the
            field, what it got and what it needs.

    Source: the schemas and documents of torch_npu 2.13.
    """
    return _planned(spec)


@functools.lru_cache(maxsize=4096)
def _planned(spec: AttentionSpec) -> AttentionPlan:
    spec.check()
    refused = []
    for operator in OPERATORS:
        if spec.device not in operator.devices:
            continue
        why = _why_not(operator, spec)
        if why is None:
            return _tell(operator, spec, tuple(refused))
        refused.append((operator.name, why))
    reasons = "; ".join(f"{name}: {why}" for name, why in refused)
    raise ValueError(
        f"device: got {spec.device!r}, which has no operator for this call ({reasons})"
    )


def _why_not(operator: Operator, spec: AttentionSpec) -> str | None:
    """Return None, or the first requirement that an operator does not meet, as a sentence."""
    vendor = operator.runs == "aclnn"
    if vendor and spec.operators is not None and operator.name not in spec.operators:
        return "this torch_npu does not have it"
    if spec.training and "training" not in operator.serves:
        return "it has no backward"
    if spec.dtype not in operator.dtypes:
        return f"it has no {spec.dtype} kernel"
    if spec.keys not in operator.keys:
        return f"it does not support {spec.keys} keys"
    for name in ("bias", "softcap", "dropout", "sinks", "nonpositive_scale"):
        if getattr(spec, name) and name not in operator.takes:
            return _LACKS.get((vendor, name), f"it does not support {name}")
    if spec.mask_kind not in operator.masks:
        return _LACKS.get(
            (vendor, spec.mask_kind), f"it does not support the mask {spec.mask_kind}"
        )
    if spec.lse_gradient and "lse gradient" not in operator.takes:
        return "its backward takes no gradient of the log-sum-exp"
    if operator.runs == "triton_ascend" and spec.keys == "paged":
        soc = spec.soc if spec.device == "npu" else ""
        if why := page_why_not(spec.block_size, soc, spec.consistent):
            return why
    return _dims_why_not(operator, spec) or (_vendor_why_not(operator, spec) if vendor else None)


def page_why_not(size: int, soc: str, consistent: bool) -> str | None:
    """Return why npu-ops' kernels do not support a paged cache with blocks of `size` keys, or None.

    A block must be a multiple of a tile of keys: 16 for the matrix unit, 32 for Ascend950's
    compiler, 64 to get the bits of training.
    """
    fewest = 64 if consistent else 32 if socs.is_ascend950(soc) else 16
    if size % fewest:
        asked = ", which NPU_OPS_CONSISTENT needs" if consistent else ""
        return f"blocks of {size} keys are not a multiple of {fewest} keys{asked}"
    return None


_LACKS = {
    (True, "nonpositive_scale"): "it may mask before it multiplies by the scale",
    (False, "nonpositive_scale"): "it multiplies its causal mask, -inf, by the scale",
    (True, "dropout"): "it draws its own dropout mask, which recomputation would have to reproduce",
    (True, "bias"): "it multiplies a bias by the scale, or misreads a bias with one row",
    (True, "dense"): "it ignores a dense mask of one row past key 512 (vllm-ascend #15503)",
    (True, "window from the top left"): "its windows count from the last query and the last key",
}


def _dims_why_not(operator: Operator, spec: AttentionSpec) -> str | None:
    dim, value = spec.head_dim, spec.value_dim or spec.head_dim
    if max(dim, value) > operator.largest:
        return f"head dimension {max(dim, value)} is above {operator.largest}"
    packed = _input_layout(operator, spec) == "TND"
    if operator.dims and packed:
        if (dim, value) not in operator.dims:
            known = ", ".join(str(d) if d == v else f"{d}/{v}" for d, v in operator.dims)
            return f"packed queries need head dimension {known}, not {dim} (vllm-ascend #9632)"
    elif operator.one_dim and value != dim:
        return f"value dimension {value} needs head dimension {value}, not {dim}"
    if operator.runs == "aclnn" and value > dim:
        return f"value dimension {value} is above the head dimension {dim}"
    return None


def _vendor_why_not(operator: Operator, spec: AttentionSpec) -> str | None:
    """Return None, or which limit of all torch_npu operators the call exceeds."""
    if spec.consistent:
        return "its order of sums is not documented, and NPU_OPS_CONSISTENT needs a known order"
    if spec.heads > 256:
        return f"{spec.heads} heads are above 256"
    if spec.keys != "dense" and not spec.host_lengths:
        return "it takes lengths from the host: pass cu_seqlens_cpu (seqlens_k_cpu for a cache)"
    if spec.graph_capture and operator.captured:
        return f"a graph cannot capture it: {operator.captured}"
    if spec.deterministic and spec.training:
        return "its backward adds in any order unless torch's deterministic algorithms are on"
    if "infer" not in operator.name:
        return None
    if _input_layout(operator, spec) == "TND" and spec.mask_kind == "none":
        if spec.keys == "packed" or spec.query_length != 1:
            return "packed queries without a mask give a plain average (vllm-ascend #13699)"
    return _cache_why_not(operator, spec) if spec.keys == "paged" else None


def _cache_why_not(operator: Operator, spec: AttentionSpec) -> str | None:
    if not 16 <= spec.block_size <= 512 or spec.block_size % 16:
        return f"blocks of {spec.block_size} keys are not a multiple of 16 from 16 to 512 keys"
    if not spec.contiguous_blocks:
        return "a cache that is not contiguous would have to be copied"
    if spec.head_dim % operator.multiple_of:
        return f"a cache of head dimension {spec.head_dim} would have to be padded"
    return None


def _input_layout(operator: Operator, spec: AttentionSpec) -> str:
    """Return the operator's input_layout.

    With a paged cache and several queries per sequence, the queries are packed: TND.
    """
    if operator.runs != "aclnn":
        return spec.layout
    if spec.keys == "paged" and spec.query_length != 1:
        return "TND"
    if spec.layout in ("SBND", "SBH"):
        return "BSND" if "infer" in operator.name else "SBH"
    return spec.layout


def _tell(operator: Operator, spec: AttentionSpec, refused) -> AttentionPlan:
    vendor = operator.runs == "aclnn"
    kind = spec.mask_kind
    told = MASKS[kind] if vendor else Mask(0, "none", "")
    left, right = spec.window or (-1, -1)
    right = 0 if spec.is_causal else right
    sides = (left, right) if told.sparse_mode == 4 else (-1, -1)
    lengths = {"dense": "none", "packed": "ends"}.get(spec.keys, "each") if vendor else "none"
    dims = spec.head_dim, spec.value_dim or spec.head_dim
    step = operator.multiple_of
    pad = -(-dims[0] // step) * step if any(dim % step for dim in dims) else 0
    notes = operator.notes
    if spec.prefix:
        notes += ("the prefix becomes a dense mask",)
    return AttentionPlan(
        operator=operator.name,
        runs=operator.runs,
        layout=_input_layout(operator, spec),
        mask_kind=kind,
        sparse_mode=told.sparse_mode,
        pre_tokens=UNBOUNDED if sides[0] < 0 else sides[0],
        next_tokens=UNBOUNDED if sides[1] < 0 else sides[1],
        mask=told.tensor,
        lengths=lengths,
        drop_leading_zero=lengths == "ends" and spec.leading_zero,
        pad_head_dim=pad,
        graph_update=operator.update if spec.graph_capture and lengths != "none" else "",
        notes=notes,
        refused=refused,
    )


def _meaning(plan: AttentionPlan) -> str:
    if plan.sparse_mode == 4:
        return f"pre_tokens {plan.pre_tokens}, next_tokens {plan.next_tokens}"
    return MASKS[plan.mask_kind].meaning


def _runs(name: str) -> str:
    return next(operator.runs for operator in OPERATORS if operator.name == name)
