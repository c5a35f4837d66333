"""In each process of verl: weights go to the rollout through the host's memory.

VERL_USE_EXTERNAL_MODULES=verl_without_ipc

verl asks npu-smi and CANN for versions that share a device's memory between processes. The emulated
NPU has neither, and does not share it.
"""

from __future__ import annotations

from verl.plugin.platform import platform_npu

platform_npu.PlatformNPU.is_ipc_supported = lambda self: False
