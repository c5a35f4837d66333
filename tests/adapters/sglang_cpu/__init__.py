"""The smallest platform that SGLang's engine runs on without an accelerator."""

import os


def activate() -> str | None:
    """SGLang asks every platform that is installed; this one is there for who names it."""
    named = os.environ.get("SGLANG_PLATFORM") == "sglang_cpu"
    return "sglang_cpu.platform:CpuPlatform" if named else None
