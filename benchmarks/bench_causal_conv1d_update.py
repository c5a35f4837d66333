"""Compare the convolution's decoding step with transformers'."""

from npu_ops_tools.bench import Sweep
from npu_ops_tools.bench.peers import ON_GPUS, SGLANG
from npu_ops_tools.bench.sweep import of_sequences
from transformers.models.qwen3_next.modeling_qwen3_next import causal_conv1d_update


def without_a_pool(inputs):
    """Replace the pool by one state for each sequence, in their order, as transformers needs."""
    batch, channels = inputs["x"].shape[0], inputs["x"].shape[2]
    state = inputs["conv_state"][:batch].reshape(batch, channels, -1).contiguous()
    del inputs["conv_state_indices"]
    return inputs | {"conv_state": state}


def transformers(x, conv_state, weight, activation):
    return causal_conv1d_update(x.mT, conv_state, weight, None, activation).mT


SWEEPS = [
    Sweep(
        "causal_conv1d_update",
        peers={
            "transformers": lambda: transformers,
            "SGLang": SGLANG,
            "causal-conv1d": ON_GPUS,
        },
        case=of_sequences,
        prepare=without_a_pool,
        unit="sequences",
        sizes=(1, 4, 16, 64, 256),
        backward_to=0,
        writes=("conv_state",),
    )
]
