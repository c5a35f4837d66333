"""Runs vllm-ascend's own tests of Gated Delta Net, with npu-ops in place of its operators.

    git clone https://github.com/vllm-project/vllm-ascend
    python tests/adapters/upstream_vllm_ascend.py vllm-ascend

The argument is a clone of upstream's repository; none of its files is changed or copied. Its Triton
functions are replaced by those of npu-ops's adapter, and its AscendC operators in
`torch.ops._C_ascend` call npu-ops. The tests compare with upstream's own PyTorch code. The command
restarts itself under `npu-ops emulate`. Tests that upstream skips because its kernels fail run too.

The exit status is 1 if a test fails for a reason not in KNOWN, or if none called npu-ops.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import sys
import types

import counting
import pytest
import runs
import torch

FOLDER = "tests/e2e/nightly/single_node/ops/singlecard_ops"
FILES = (
    "test_recurrent_gated_delta_rule.py", "triton/test_causal_conv1d.py",
    "triton/test_chunk_gated_delta_rule.py", "triton/test_fused_gdn_gating.py",
    "triton/test_fused_recurrent_gated_delta_rule.py", "triton/test_l2norm.py",
)  # fmt: skip
# Part of a test's name, and the reason why the test fails.
KNOWN = {
    "test_fused_recurrent_gated_delta_rule_310p_parity_precision": "the test rounds normalised "
    "queries and keys to bf16 for the operator alone, and allows 1e-2 (upstream skips it)",
    "test_causal_conv1d_update_qwen3_next_shape": "the test gives 96 slots for 192 sequences, "
    "which npu-ops refuses (upstream skips it)",
}
OPERATORS = {
    "npu_causal_conv1d_custom": "Tensor(b!) output, Tensor x, Tensor weight, *, "
    "Tensor(a!) conv_state, Tensor? bias_opt, Tensor query_start_loc_opt, "
    "Tensor cache_indices_opt, Tensor? initial_state_mode_opt, Tensor? num_accepted_tokens_opt, "
    "int activation_mode, int pad_slot_id, int run_mode) -> ()",
    "npu_recurrent_gated_delta_rule": "Tensor query, Tensor key, Tensor value, Tensor(a!) state, "
    "*, Tensor beta, float scale, Tensor actual_seq_lengths, Tensor ssm_state_indices, "
    "Tensor? num_accepted_tokens=None, Tensor? g=None, Tensor? gk=None) -> Tensor",
}


def npu_causal_conv1d_custom(
    output, x, weight, *, conv_state, bias_opt, query_start_loc_opt, cache_indices_opt,
    initial_state_mode_opt, num_accepted_tokens_opt, activation_mode, pad_slot_id, run_mode,
):  # fmt: skip
    """run_mode 0 is a prefill; 1 adds tokens after num_accepted_tokens accepted ones."""
    import npu_ops

    activation = "silu" if activation_mode else None
    pool = conv_state.transpose(1, 2)
    if run_mode:
        y = npu_ops.causal_conv1d_update(
            x, pool, weight.t(), bias_opt, activation, cache_indices_opt, num_accepted_tokens_opt,
            query_start_loc_opt, pad_slot_id=pad_slot_id,
        )  # fmt: skip
    else:
        y, _ = npu_ops.causal_conv1d(
            x[None], weight.t(), bias_opt, activation=activation, cu_seqlens=query_start_loc_opt,
            conv_state=pool, conv_state_indices=cache_indices_opt,
            has_initial_state=initial_state_mode_opt, pad_slot_id=pad_slot_id,
        )  # fmt: skip
    output.copy_(y.view(output.shape))


def npu_recurrent_gated_delta_rule(
    query, key, value, state, *, beta, scale, actual_seq_lengths, ssm_state_indices,
    num_accepted_tokens=None, g=None, gk=None,
):  # fmt: skip
    """actual_seq_lengths starts with 0; ssm_state_indices has a slot per token."""
    import npu_ops

    lengths = actual_seq_lengths[1:].tolist()
    slots = torch.nn.utils.rnn.pad_sequence(
        list(ssm_state_indices.cpu().split(lengths)), batch_first=True, padding_value=-1
    )
    # whether each sequence has one slot
    one = (slots == slots[:, :1]).logical_or(slots == -1).all()
    return npu_ops.gated_delta_rule_update(
        (query, key, value), g, beta, None, None, state,
        (slots[:, 0] if one else slots).to(state.device), state_v_first=True,
        cu_seqlens=actual_seq_lengths.cumsum(0), scale=scale, use_qk_l2norm_in_kernel=False,
        num_accepted_tokens=None if one else num_accepted_tokens,
    )  # fmt: skip


def replace_upstream(checkout: pathlib.Path) -> None:
    """Replace the modules and operators that the tests import and call."""
    from npu_ops_adapters.vllm import (
        causal_conv1d,
        causal_conv1d_update,
        chunk_gated_delta_rule,
        gdn_gate,
        l2norm,
    )

    triton = "vllm_ascend.ops.triton"
    make("vllm_ascend", folder=checkout / "vllm_ascend")
    make("vllm_ascend.ops")
    make("vllm_ascend.utils", enable_custom_op=lambda: True)
    for part in ("_310p", "_310p.ops", "_310p.ops.fla"):  # packages with upstream's modules
        make(f"vllm_ascend.{part}", folder=checkout / "vllm_ascend" / part.replace(".", "/"))
    make(f"{triton}.triton_utils", init_device_properties_triton=lambda: None)
    make(
        f"{triton}.mamba.causal_conv1d",
        PAD_SLOT_ID=-1,
        causal_conv1d_fn=causal_conv1d.ours,
        causal_conv1d_update_npu=causal_conv1d_update.ours,
    )
    make(
        f"{triton}.fla.chunk",
        chunk_gated_delta_rule=chunk_gated_delta_rule.ours,
        get_forward_context=None,
    )
    make(f"{triton}.fused_gdn_gating", fused_gdn_gating_patch=gdn_gate.ours)
    make(f"{triton}.fla.l2norm", l2norm_fwd=l2norm.ours)
    fla = "vllm.third_party.flash_linear_attention.ops"
    make(f"{fla}.l2norm", l2norm_fwd=l2norm.ours)
    make(f"{fla}.utils", tensor_cache=lambda function: function)
    make("vllm.v1.attention.backends.utils", PAD_SLOT_ID=-1)
    make("tests.ut.base", PytestBase=object)
    library = torch.library.Library("_C_ascend", "FRAGMENT")
    for name, arguments in OPERATORS.items():
        library.define(f"{name}({arguments}")
        library.impl(name, globals()[name], "PrivateUse1")
    replace_upstream.library = library  # a library drops its operators when it is freed


def make(name: str, folder: pathlib.Path | None = None, **members) -> None:
    """Put a module with these members into sys.modules, with its parent packages."""
    parts = name.split(".")
    for end in range(1, len(parts) + 1):
        path = ".".join(parts[:end])
        if path not in sys.modules:
            sys.modules[path] = types.ModuleType(path)
            sys.modules[path].__path__ = [str(folder)] if folder and end == len(parts) else []
        if end > 1:
            setattr(sys.modules[".".join(parts[: end - 1])], parts[end - 1], sys.modules[path])
    vars(sys.modules[name]).update(members)


class Record(runs.Record):
    """Also runs tests that upstream skips."""

    def pytest_collection_modifyitems(self, items):
        for item in items:
            item.own_markers = [mark for mark in item.own_markers if mark.name != "skip"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("checkout", type=pathlib.Path, help="a clone of vllm-ascend")
    options, more = parser.parse_known_args()
    checkout = options.checkout.resolve()
    runs.on_emulated_npu()
    replace_upstream(checkout)
    record = Record(counting.operators())
    record.count_calls()
    os.chdir(checkout / FOLDER)
    settings = ["-q", "-p", "no:cacheprovider", "--tb=short", "--noconftest"]
    settings += ["--import-mode=importlib", "--rootdir", str(checkout / FOLDER)]
    pytest.main([*settings, *FILES, *more], plugins=[record])
    return runs.show(record, lambda test, why: [KNOWN[part] for part in KNOWN if part in test])


if __name__ == "__main__":
    sys.exit(main())
