"""The decoding step against transformers' recurrence and a copy of the states."""

import torch
from npu_ops_tools.bench import Benchmark, by_reference, into
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen3_5

import npu_ops
from npu_ops.ops.gated_delta_rule_update import cases

recurrent = getattr(
    qwen3_5.torch_recurrent_gated_delta_rule,
    "__wrapped__",
    qwen3_5.torch_recurrent_gated_delta_rule,
)


def eager(heads, qkv, a, b, A_log, dt_bias, state, state_indices):
    """The same from the convolution's output to o, with the states in the pool."""
    key_heads, value_heads, keys, values = heads
    widths = (key_heads * keys, key_heads * keys, value_heads * values)
    q, k, v = qkv[:, None].split(widths, -1)
    g = -A_log.exp() * torch.nn.functional.softplus(a.float() + dt_bias)
    o, final = recurrent(
        *(x.unflatten(-1, (key_heads, keys)) for x in (q, k)),
        v.unflatten(-1, (value_heads, values)), g=g[:, None], beta=b.sigmoid()[:, None],
        initial_state=state[state_indices].float(), output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )  # fmt: skip
    state[state_indices] = final.to(state.dtype)
    return o


def benchmarks(device, quick):
    for batch in (4,) if quick else (1, 32):
        for pool in (torch.float32, torch.bfloat16):
            for v_first in (True, False):
                yield decode(batch, pool, v_first, device)


def decode(batch, pool, v_first, device):
    heads = cases.MODELS["qwen3.5-9b-tp1"]
    case = cases.Case("", batch, batch, *heads, v_first=v_first, pool=pool)
    inputs = case.inputs(torch.bfloat16, device)
    inputs["state_indices"] = torch.randperm(batch + 2, device=device)[:batch]
    del inputs["cu_seqlens"], inputs["disable_state_update"]

    def own():
        """The same inputs with a pool of their own."""
        return inputs | {"state": inputs["state"].clone()}

    ours, theirs, reference = own(), own(), own()
    del theirs["state_v_first"]  # its states have the keys first
    theirs["state"] = theirs["state"].reshape(-1, heads[1], heads[2], heads[3])
    used = inputs["state"][:batch]
    run = {
        "npu_ops": lambda: (npu_ops.gated_delta_rule_update(**ours),),
        "eager": lambda: eager(heads, **theirs),
        "memcpy_into": into(used),
    }

    def expected():
        call = lambda: npu_ops.gated_delta_rule_update(**reference)  # noqa: E731
        return (by_reference("gated_delta_rule_update", call),)

    layout = "v-first" if v_first else "k-first"
    dtype = str(pool).removeprefix("torch.")
    return Benchmark(
        "gated_delta_rule_update", f"qwen3.5-9b-b{batch}", f"decode {dtype} pool {layout}",
        torch.bfloat16, {"qkv": list(inputs["qkv"].shape), "state": list(used.shape)}, run,
        "eager", 2 * used.nbytes, expected, 2 * cases.TOLERANCES[torch.bfloat16].ratio,
    )  # fmt: skip
