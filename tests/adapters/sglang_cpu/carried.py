"""Check NPU_OPS_CONSISTENT=chunks in one process: a line of JSON for each check, see checks.py.

python -m sglang_cpu.each carried
"""

import importlib
import inspect

import torch
from npu_ops_adapters.sglang import carried_states
from outcomes import error_of

import npu_ops
from npu_ops.core import env
from sglang_cpu.checks import kernel, rows


def states_carry_their_unfinished_chunk():
    """Split prompts, decoding and drafts give the bits of training."""
    tokens, heads, slots = 100, 32, torch.tensor([3], dtype=torch.int32)
    q, k = rows(1, tokens, 8, 32), rows(1, tokens, 8, 32, seed=1)
    v, a, b = rows(1, tokens, heads, 32, seed=2), rows(tokens, heads, seed=3), rows(tokens, heads)
    parameters = {"A_log": rows(heads, seed=5), "dt_bias": rows(heads, seed=6)}
    shape = state_shape(heads)
    states = torch.zeros(6, *shape.temporal)
    with env.override(consistent="chunks"):
        g, beta = npu_ops.gdn_gate(a, parameters["A_log"], parameters["dt_bias"], b)
        wanted, _ = npu_ops.chunk_gated_delta_rule(
            q, k, v, g[None], beta[None], use_qk_l2norm_in_kernel=True
        )

        def prompt(first, last):
            span = (x[:, first:last] for x in (q, k, v, g[None], beta[None]))
            starts = torch.tensor([0, last - first], dtype=torch.int32)
            given = {"ssm_states": states, "cache_indices": slots, "query_start_loc": starts}
            return kernel().extend(*span, **given)[0]

        def packed(token):
            row = torch.cat([x[0, token : token + 1].flatten(1) for x in (q, k, v)], dim=1)
            return kernel().packed_decode(
                row, a[token : token + 1], b[token : token + 1], **parameters, scale=32**-0.5,
                ssm_states=states, cache_indices=slots, num_v_heads=heads, head_v_dim=32,
            )  # fmt: skip

        def drafts(first, last, kept):
            span = {n: x[:, first:last] for n, x in {"q": q, "k": k, "v": v}.items()}
            return kernel().target_verify(
                **span, a=a[first:last], b=b[first:last], **parameters, ssm_states=states,
                cache_indices=slots, query_start_loc=torch.tensor([0, last - first]),
                intermediate_states_buffer=kept, cache_steps=last - first,
                intermediate_state_indices=torch.tensor([0]),
            )  # fmt: skip

        found = [prompt(0, 40), prompt(40, 62), *(packed(token) for token in range(62, 70))]
        for first in range(70, tokens, 2):  # two of four drafted tokens are accepted
            kept = torch.zeros(1, min(4, tokens - first), *shape.temporal)
            found.append(drafts(first, min(first + 4, tokens), kept)[:, :2])
            states[3] = kept[0, 1]
        assert torch.cat(found, 1).equal(wanted)
        assert not states[[0, 1, 2, 4, 5]].any()
        narrow = {"ssm_states": states.bfloat16(), "cache_indices": slots}
        try:
            kernel().extend(q, k, v, g[None], beta[None], query_start_loc=slots, **narrow)
        except RuntimeError as error:
            assert "ssm_states: got bfloat16 with NPU_OPS_CONSISTENT=chunks, needs" in str(error)
        else:
            raise AssertionError("states in bf16 were taken")


def state_shape(heads):
    """Return the shape of a state in SGLang's pools in this mode."""
    with env.override(consistent="chunks"):
        (patch,) = carried_states.patches()
    configs = importlib.import_module(patch.module)
    create = carried_states._with_more_rows(configs.Mamba2StateShape.create)
    assert tuple(inspect.signature(configs.Mamba2StateShape.create).parameters) in patch.signatures
    sizes = {"tp_world_size": 1, "intermediate_size": heads * 32, "n_groups": 8}
    sizes |= {"num_heads": heads, "head_dim": 32, "state_size": 32, "conv_kernel": 4}
    # a Mamba2 state is unchanged
    assert create(**sizes) == configs.Mamba2StateShape.create(**sizes)
    return create(**sizes, conv_shard_groups=[256, 256, heads * 32])


def run():
    """Yield (name, error or None) for each check."""
    importlib.import_module("sglang.srt.plugins").load_plugins()
    check = states_carry_their_unfinished_chunk
    yield check.__name__, error_of(check)
