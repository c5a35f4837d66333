from verl.plugin.platform.platform_npu import PlatformNPU

PlatformNPU.is_ipc_supported = lambda self: False
