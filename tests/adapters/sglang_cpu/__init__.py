"""A minimal platform on which SGLang's engine runs without an accelerator."""

import os


def activate() -> str | None:
    """Return this platform if SGLANG_PLATFORM names it; SGLang asks every installed platform."""
    named = os.environ.get("SGLANG_PLATFORM") == "sglang_cpu"
    return "sglang_cpu.platform:CpuPlatform" if named else None
