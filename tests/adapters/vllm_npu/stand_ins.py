"""Stand-ins for what vllm-ascend needs of CANN and its native module on the emulated NPU.

Everything else is the published source and the real torch_npu. The stand-ins:
- `acl`, of which one function is named: `doubles/acl`;
- `vllm_ascend_C`, three operators: `doubles/vllm_ascend_C.py`;
- `meta_registration`, empty: shapes of operators that a Qwen model does not call;
- ATB's `_npu_reshape_and_cache` and `_npu_matmul_add_fp32`, below, in PyTorch;
- the patch of torchair in 0.18.0, empty: only compiled models need it, with CANN's graph engine.
  0.23.0 itself goes on without torchair.

One repair: vllm-ascend 0.18.0 raises TypeError if log-probabilities of drafts are requested.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import pathlib
import sys
import types

OLDER = importlib.metadata.version("vllm_ascend") == "0.18.0"
ABSENT = ("vllm_ascend.meta_registration",) + OLDER * (
    "vllm_ascend.patch.worker.patch_npugraph_ex_triton",
)


def install() -> None:
    """Install all stand-ins, before vLLM is imported."""
    sys.path.insert(0, str(pathlib.Path(__file__).parent / "doubles"))
    sys.modules.update({name: types.ModuleType(name) for name in ABSENT})
    sys.modules["vllm_ascend.vllm_ascend_C"] = importlib.import_module("vllm_ascend_C")
    import torch_npu

    atb = importlib.import_module("torch_npu.op_plugin.atb._atb_ops")
    atb._register_atb_extensions = lambda: None  # there is no library of ATB
    for function in (_npu_reshape_and_cache, _npu_matmul_add_fp32):
        setattr(torch_npu, function.__name__, function)


def mend_log_probabilities_of_drafts() -> None:
    """Return lists that `RejectionSampler.parse_output` has already made.

    vllm-ascend 0.18.0 passes them to `tolists` as if they were lengths. 0.23.0 is not repaired.
    """
    if not OLDER:
        return
    from vllm.v1.outputs import LogprobsLists, LogprobsTensors

    own = LogprobsTensors.tolists

    def tolists(self, made=None):
        return made if isinstance(made, LogprobsLists) else own(self, made)

    LogprobsTensors.tolists = tolists


def _npu_reshape_and_cache(key, value, key_cache, value_cache, slot_indices):
    # a graph's padding is -1; it goes to vLLM's unused block 0
    slots = slot_indices.long().clamp(min=0)
    for cache, rows in ((key_cache, key), (value_cache, value)):
        cache.view(-1, *cache.shape[2:])[slots] = rows.view(-1, *cache.shape[2:])


def _npu_matmul_add_fp32(x, weight, c):
    c += x.float().t() @ weight.float()
