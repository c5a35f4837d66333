"""The smallest platform that SGLang's engine runs on without an accelerator."""


def activate() -> str:
    return "sglang_cpu.platform:CpuPlatform"
