"""Runs sgl-kernel-npu's own tests, with npu-ops in place of its operators.

    git clone https://github.com/sgl-project/sgl-kernel-npu
    python tests/adapters/upstream_sgl_kernel_npu.py sgl-kernel-npu

The argument is a clone of upstream's repository; none of its files is changed or copied. Its
package must be built for an NPU, so modules whose functions call npu-ops replace it, and its
operators in `torch.ops.npu`. The command restarts itself under `npu-ops emulate`. Some tests are
scripts; their cases run one by one.

The exit status is 1 if a test fails for a reason not in KNOWN, or if none called npu-ops.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import logging
import os
import pathlib
import sys
import types

import counting
import pytest
import runs
import torch

FOLDER = "tests/python/sgl_kernel_npu"
FILES = (
    "test_conv1d_update.py", "test_mamba_conv.py", "test_split_qkv_rmsnorm_mrope.py",
    "test_split_qkv_rmsnorm_rope.py",
)  # fmt: skip
NO_BIAS = "qk_norm_rope: got a bias behind the norm, needs None"
# Part of a failure's message, and its meaning.
KNOWN = {
    "with W 2 to 8": "filters of more than 8 taps are refused",
    NO_BIAS: "a bias behind the norm of q and k is refused, which no Qwen3 model has",
    "_mismatch_weight unexpectedly succeeded": "a filter in fp32 is taken beside bf16",
    "_mismatch_query_start_loc unexpectedly succeeded": "lengths in int64 are taken",
    "Outputs mismatched!": "two functions of the test's own differ; nothing of ours is called",
    "'tuple' object has no attribute 'cpu'": "the test takes its reference's tuple for a tensor",
}
OPERATORS = {
    "causal_conv1d": "Tensor x, Tensor weight, Tensor(a!) conv_states, Tensor query_start_loc, "
    "Tensor cache_indices, Tensor has_initial_state, *, Tensor? bias=None, "
    "bool activation_mode=False, int pad_slot_id=-1",
    "causal_conv1d_update": "Tensor x, Tensor weight, Tensor(a!) conv_state, "
    "Tensor conv_state_indices, Tensor? bias=None, Tensor? num_accepted_tokens=None, "
    "Tensor? query_start_loc=None, bool activation_mode=False, int pad_slot_id=-1",
    "recurrent_gated_delta_rule": "Tensor mix_qkv, Tensor(a!) recurrent_state, Tensor beta, "
    "float scale, Tensor actual_seq_lengths, Tensor ssm_state_indices, int nk, int nv, "
    "Tensor(b!)? intermediate_state=None, Tensor? cache_indices=None, "
    "Tensor? num_accepted_tokens=None, Tensor? g=None, Tensor? gk=None",
}


def causal_conv1d(
    x, weight, conv_states, query_start_loc, cache_indices, has_initial_state, *, bias=None,
    activation_mode=False, pad_slot_id=-1,
):  # fmt: skip
    import npu_ops

    dense = x.dim() == 3
    y, _ = npu_ops.causal_conv1d(
        x if dense else x[None], weight.t(), bias, activation="silu" if activation_mode else None,
        cu_seqlens=None if dense else query_start_loc, conv_state=conv_states.transpose(1, 2),
        conv_state_indices=cache_indices, has_initial_state=has_initial_state,
        pad_slot_id=pad_slot_id,
    )  # fmt: skip
    return y.view(x.shape)


def causal_conv1d_update(
    x, weight, conv_state, conv_state_indices, bias=None, num_accepted_tokens=None,
    query_start_loc=None, activation_mode=False, pad_slot_id=-1,
):  # fmt: skip
    import npu_ops

    return npu_ops.causal_conv1d_update(
        x, conv_state.transpose(1, 2), weight.t(), bias, "silu" if activation_mode else None,
        conv_state_indices, num_accepted_tokens, query_start_loc, pad_slot_id=pad_slot_id,
    )  # fmt: skip


def recurrent_gated_delta_rule(
    mix_qkv, recurrent_state, beta, scale, actual_seq_lengths, ssm_state_indices, nk, nv,
    intermediate_state=None, cache_indices=None, num_accepted_tokens=None, g=None, gk=None,
):  # fmt: skip
    """Call npu-ops; the first of a sequence's intermediate states is copied from the pool."""
    import npu_ops

    state = recurrent_state
    if intermediate_state is not None:
        steps = ssm_state_indices.shape[1]
        state = intermediate_state
        state[cache_indices.long() * steps] = recurrent_state[cache_indices.long()]
    o = npu_ops.gated_delta_rule_update(
        mix_qkv.flatten(0, 1), g.flatten(0, 1), beta.float().sigmoid().flatten(0, 1), None, None,
        state, ssm_state_indices, state_v_first=True, num_accepted_tokens=num_accepted_tokens,
        scale=scale,
    )  # fmt: skip
    return o.view(*mix_qkv.shape[:2], *o.shape[1:])


def update_of_channels(x, conv_state, weight, bias, activation, conv_state_indices):
    import npu_ops

    return npu_ops.causal_conv1d_update(x, conv_state, weight, bias, activation, conv_state_indices)


def update_of_rows(
    x, conv_state, weight, bias, activation, conv_state_indices, num_accepted_tokens, pad_slot_id,
    validate_data,
):  # fmt: skip
    return causal_conv1d_update(
        x, weight, conv_state, conv_state_indices, bias, num_accepted_tokens, None,
        bool(activation), pad_slot_id,
    )  # fmt: skip


def gating(A_log, a, b, dt_bias, beta, threshold):
    import npu_ops

    g = npu_ops.gdn_gate(a, A_log, dt_bias, softplus_beta=beta, softplus_threshold=threshold)
    return g[None], b


def split_qkv_rmsnorm_rope(
    qkv, sin, cos, q_hidden_size, kv_hidden_size, head_dim, eps=None, q_weight=None, k_weight=None,
    q_bias=None, k_bias=None,
):  # fmt: skip
    import npu_ops

    if q_bias is not None or k_bias is not None:
        raise ValueError(NO_BIAS)
    cos, sin = cos.flatten(1), sin.flatten(1)
    heads = {"num_heads": q_hidden_size // head_dim, "num_kv_heads": kv_hidden_size // head_dim}
    if q_weight is not None:
        q, k, v = npu_ops.qk_norm_rope(qkv, q_weight, k_weight, cos, sin, **heads, eps=eps)
        return q.flatten(1), k.flatten(1), v.flatten(1)
    q, k, v = qkv.split([q_hidden_size, kv_hidden_size, kv_hidden_size], -1)
    q, k = (x.unflatten(-1, (-1, head_dim)) for x in (q, k))
    q, k = npu_ops.apply_rotary_pos_emb(q, k, cos, sin, layout="TND")
    return q.flatten(1), k.flatten(1), v


def replace_upstream() -> None:
    """Replace the modules and operators that the tests import and call."""
    from npu_ops_adapters.sglang import split_gated_qkv

    make("sgl_kernel_npu")
    make(
        "sgl_kernel_npu.mamba.causal_conv1d",
        PAD_SLOT_ID=-1,
        causal_conv1d_update_npu=update_of_channels,
        causal_conv1d_update_v2=update_of_rows,
    )
    make("sgl_kernel_npu.fla.fused_gdn_gating", fused_gdn_gating_kernel_without_sigmoid=gating)
    make(
        "sgl_kernel_npu.norm.split_qkv_rmsnorm_mrope",
        triton_split_qkv_rmsnorm_mrope=split_gated_qkv.prefill,
    )
    make(
        "sgl_kernel_npu.norm.split_qkv_rmsnorm_rope",
        split_qkv_rmsnorm_rope=split_qkv_rmsnorm_rope,
        split_qkvgate_gemma_rmsnorm_rope=split_gated_qkv.step,
    )
    make("torchair.configs.compiler_config", CompilerConfig=object)
    make("torchair.core.utils", logger=logging.getLogger("torchair"))
    library = torch.library.Library("npu", "FRAGMENT")
    for name, arguments in OPERATORS.items():
        library.define(f"{name}({arguments}) -> Tensor")
        library.impl(name, globals()[name], "PrivateUse1")
    replace_upstream.library = library  # a library drops its operators when it is freed


def make(name: str, **members) -> None:
    """Put a module with these members into sys.modules, with its parent packages."""
    parts = name.split(".")
    for end in range(1, len(parts) + 1):
        path = ".".join(parts[:end])
        module = sys.modules.setdefault(path, types.ModuleType(path))
        module.__path__ = []
        if end > 1:
            setattr(sys.modules[".".join(parts[: end - 1])], parts[end - 1], module)
    vars(sys.modules[name]).update(members)


class Record(runs.Record):
    """Also records a script's cases; fails tests that print an error (test_conv1d_update.py)."""

    def pytest_runtest_logreport(self, report):
        super().pytest_runtest_logreport(report)
        wrong = [x for x in report.capstdout.splitlines() if "❌" in x or "WARNING" in x]
        if report.when == "call" and wrong:
            self.tests[report.nodeid] = ("failed", wrong[0])

    def case(self, file: str, name: str, function, *args, **kwargs) -> None:
        """Run one case of a script and record its outcome."""
        self._file, outcome, why = file, "passed", ""
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                right = function(*args, **kwargs)
            if right is False:
                outcome, why = "failed", "another result"
        except Exception as error:
            outcome, why = "failed", str(error).partition("\n")[0]
        self.tests[f"{file}::{name}"] = (outcome, why)


def run_scripts(record: Record) -> None:
    """Run the cases of tests that are scripts, as their `main` would."""
    for name in ("test_conv1d_prefill", "test_fused_gdn_gating_without_sigmoid"):
        script = importlib.import_module(name)
        run_case, file = script.run_positive_case, f"{name}.py"

        def case(given, *args, run_case=run_case, file=file, **kwargs):
            record.case(file, given.name, run_case, given, *args, **kwargs)

        script.run_positive_case = case
        if name == "test_conv1d_prefill":
            expect = script.expect_failure
            script.expect_failure = lambda what, call, words, expect=expect, file=file: record.case(
                file, what, expect, what, call, (*words, "needs")
            )
        sys.argv = [file]
        with contextlib.redirect_stdout(io.StringIO()):
            script.main()
    script = importlib.import_module("test_recurrent_gated_delta_rule")
    for given in script.compatible_cases()[0]:
        record.case(f"{script.__name__}.py", str(given["shape"]), recurrent, script, given)


def recurrent(script, given) -> bool:
    """Run a case as the script's `run_cases` does; return whether it is right."""
    b, mtp, dk, dv, nk, nv = given["shape"]
    beta, scale, g, accepted, gk = given["option"]
    case = script.TestCase(
        b=b, mtp=mtp, nk=nk, nv=nv, dk=dk, dv=dv, is_continue=given["is_cont"], has_g=g,
        has_scale=scale, has_beta=beta, has_gk=gk, has_num_accepted_tokens=accepted,
    )  # fmt: skip
    case.generate_input()
    case.run_golden()
    case.run_npu()
    return case.compare()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("checkout", type=pathlib.Path, help="a clone of sgl-kernel-npu")
    options, more = parser.parse_known_args()
    folder = options.checkout.resolve() / FOLDER
    runs.on_emulated_npu()
    replace_upstream()
    sys.path.insert(0, str(folder))
    record = Record(counting.operators())
    record.count_calls()
    os.chdir(folder)
    options = ["-q", "-p", "no:cacheprovider", "--tb=short", "--rootdir", str(folder)]
    pytest.main([*options, *FILES, *more], plugins=[record])
    if not more:
        run_scripts(record)
    return runs.show(record, lambda test, why: [KNOWN[part] for part in KNOWN if part in why])


if __name__ == "__main__":
    sys.exit(main())
