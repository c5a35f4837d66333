"""Triton decides at import whether to interpret, so these tests run in a process of their own:

TRITON_INTERPRET=1 pytest tests/interpreted
"""

import os


def pytest_ignore_collect():
    return None if os.environ.get("TRITON_INTERPRET") == "1" else True


def pytest_configure():
    """Fix tl.dot for bfloat16: the interpreter stores bfloat16 as integers and multiplies these."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder

    dot = InterpreterBuilder.create_dot

    def widened(self, *operands_and_rest):
        a, b, *rest = (
            self.cast_impl(x, tl.float32) if getattr(x, "dtype", None) == tl.bfloat16 else x
            for x in operands_and_rest
        )
        return dot(self, a, b, *rest)

    InterpreterBuilder.create_dot = widened
