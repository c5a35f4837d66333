"""Which torch_npu operators each version has, with the arguments that our implementations pass.

The schemas are those registered by its wheels 2.7.1, 2.10.0 and 2.14.0.
"""

import types

import pytest
import torch

from npu_ops.core import library
from npu_ops.ops.attention import routing
from npu_ops.ops.causal_conv1d import aclnn as convolution
from npu_ops.ops.chunk_gated_delta_rule import aclnn as chunk
from npu_ops.ops.gated_delta_rule_update import aclnn as update
from npu_ops.ops.mrope import aclnn as mrope
from npu_ops.ops.rope import aclnn as rope

QKV = "Tensor query, Tensor key, Tensor value"
IN_PLACE = "Tensor query, Tensor key, Tensor cos, Tensor sin, str layout={}, str rotary_mode='half'"
ROTARY = "Tensor input, Tensor r1, Tensor r2, str rotary_mode='half'"
MROPE = (
    "Tensor positions, Tensor query, Tensor key, Tensor cos_sin_cache, int head_size, *, "
    "int[]? mrope_section=None, str? rotary_mode='half'"
)
RECURRENT = (
    f"{QKV}, Tensor(a!) state, *, Tensor? beta=None, float? scale=None, Tensor? "
    "actual_seq_lengths=None, Tensor? ssm_state_indices=None, Tensor? num_accepted_tokens=None, "
    "Tensor? g=None, Tensor? gk=None"
)
CHUNK = (
    f"{QKV}, *, Tensor? beta=None, Tensor? initial_state=None, Tensor? actual_seq_lengths=None, "
    "float? scale=None, Tensor? g=None"
)
# Schema of attention: arguments that all versions have; {} stands for the rest.
FUSION = f"{QKV}, int head_num, str input_layout{{}}"

OLD = {
    "npu_apply_rotary_pos_emb": f"({IN_PLACE.format(repr('BSH'))}) -> (Tensor, Tensor)",
    "npu_rotary_mul": f"({ROTARY}) -> Tensor",
    "npu_mrope": f"({MROPE}) -> (Tensor, Tensor)",
    "npu_fusion_attention": f"({FUSION.format(', str softmax_layout=' + repr(''))}) -> Tensor",
    "npu_fusion_attention_v2": f"({FUSION.format('')}) -> Tensor",
}
MIDDLE = OLD | {
    "npu_rotary_mul": f"({ROTARY}, Tensor? rotate=None) -> Tensor",
    "npu_mrope": f"({MROPE}, str? cache_mode='default') -> (Tensor, Tensor)",
    "npu_recurrent_gated_delta_rule": f"({RECURRENT}) -> Tensor",
    "npu_fusion_attention_v2": OLD["npu_fusion_attention"],
}
NEW = MIDDLE | {
    "npu_apply_rotary_pos_emb": f"({IN_PLACE.format(repr('BSND'))}) -> (Tensor, Tensor)",
    "npu_chunk_gated_delta_rule": f"({CHUNK}) -> (Tensor, Tensor)",
    "npu_masked_causal_conv1d": "(Tensor input, Tensor weight, *, Tensor? mask=None) -> Tensor",
}
VERSIONS = {"2.7": OLD, "2.10": MIDDLE, "2.14": NEW}
NO_CHUNK = "torch_npu has no npu_chunk_gated_delta_rule"
NO_CONVOLUTION = "torch_npu has no npu_masked_causal_conv1d"
REFUSED = {
    "2.7": {
        mrope: "torch_npu's npu_mrope has no cache_mode",
        update: "torch_npu has no npu_recurrent_gated_delta_rule",
        chunk: NO_CHUNK,
        convolution: NO_CONVOLUTION,
    },
    "2.10": {chunk: NO_CHUNK, convolution: NO_CONVOLUTION},
    "2.14": {},
}


@pytest.fixture(params=VERSIONS)
def version(request, monkeypatch):
    """Make torch.ops.npu have the operators of one torch_npu version; return the version."""
    known = types.SimpleNamespace()
    for name, schema in VERSIONS[request.param].items():
        parsed = torch._C.parse_schema(f"npu::{name}{schema}")
        setattr(known, name, types.SimpleNamespace(default=types.SimpleNamespace(_schema=parsed)))
    monkeypatch.setattr(torch.ops, "npu", known, raising=False)
    caches = library.torch_npu_why_not, routing._operators
    for cache in caches:
        cache.cache_clear()
    yield request.param
    for cache in caches:
        cache.cache_clear()


@pytest.mark.parametrize("module", [rope, mrope, update, chunk, convolution])
def test_what_a_version_lacks_is_a_refusal_that_names_it(module, version):
    assert module._missing() == REFUSED[version].get(module)


def test_attention_is_told_what_a_version_takes(version):
    """npu_fusion_attention_v2 of torch_npu 2.7 is not used: its softmax statistics differ."""
    both = ("npu_fusion_attention", "npu_fusion_attention_v2")
    assert routing._operators() == (both[:1] if version == "2.7" else both)
