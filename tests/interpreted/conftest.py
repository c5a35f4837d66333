"""Triton decides at import whether to interpret, so these tests have a process of their own:

TRITON_INTERPRET=1 pytest tests/interpreted
"""

import os


def pytest_ignore_collect():
    return None if os.environ.get("TRITON_INTERPRET") == "1" else True
