"""Settings for all tests.

Outputs are filled with NaN before a kernel runs, so tests find elements that it does not write.

Framework functions stay unpatched unless a test asks for the patches: tests compare npu-ops with
the framework's own functions.

Random numbers and `sys.path` are the same for a test whichever tests ran before it.
"""

import pathlib
import random
import sys

import npu_ops_import_hook
import pytest
import torch
from support import DTYPES

from npu_ops.core import library, preferences

library.poison_outputs = True
preferences.cache = lambda: None  # ignore what this user tuned
npu_ops_import_hook.unwatch()


def pytest_collectstart(collector):
    """Seed before each module is collected: some modules draw random numbers when imported."""
    _seed()


@pytest.fixture(autouse=True)
def seeded():
    _seed()


@pytest.fixture(autouse=True)
def same_path():
    """Restore `sys.path` after a test, and unload modules found in the folders that it added.

    Adapters look at which frameworks are imported, so a module left behind would change later
    tests.
    """
    before = sys.path[:]
    yield
    added = [pathlib.Path(folder) for folder in sys.path if folder not in before]
    sys.path[:] = before
    packages = {item.stem for folder in added for item in folder.glob("*")}
    for name in [n for n in sys.modules if n.partition(".")[0] in packages]:
        del sys.modules[name]


@pytest.fixture
def applied():
    """Patch the imported frameworks with npu-ops until the test ends."""
    import npu_ops_adapters

    npu_ops_adapters.revert()
    npu_ops_adapters.apply()
    yield
    npu_ops_adapters.revert()


@pytest.fixture(autouse=True)
def no_group_stays():
    """Destroy a test's process group: while one exists, `core.preferences` uses its store."""
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def _seed():
    torch.manual_seed(0)
    random.seed(0)


def pytest_addoption(parser):
    parser.addoption("--device", help="only the tests that run on such a device, e.g. npu")


def pytest_collection_modifyitems(config, items):
    # Tests in trainers/ and tools/ take up to a minute each. They start first, so that no worker
    # still runs one while the others have finished.
    items.sort(key=lambda item: item.path.parent.name not in ("trainers", "tools"))
    device = config.getoption("--device")
    if device is None:
        return
    others = [item for item in items if _parameters(item).get("device") != device]
    items[:] = [item for item in items if _parameters(item).get("device") == device]
    config.hook.pytest_deselected(items=others)
    _leave_dtypes_to_test_all(items)
    _leave_cases_to_test_all(items)
    _leave_options_to_test_all(items)


def _leave_dtypes_to_test_all(items):
    """Mark all but one dtype of each test as slow, a different one from test to test.

    A kernel takes about a second to compile per dtype. Of a test with several dtype parameters, a
    third of the combinations stays; with three or more, this third contains every pair of dtypes.
    """
    tests = {}
    for item in items:
        dtypes = {n: DTYPES.index(v) for n, v in _parameters(item).items() if v in DTYPES}
        others = {n: i for n, i in item.callspec.indices.items() if n not in dtypes}
        turn = tests.setdefault(str((item.path, item.originalname, others)), len(tests))
        if dtypes and (sum(dtypes.values()) + turn) % len(DTYPES):
            item.add_marker(pytest.mark.slow)


def _leave_cases_to_test_all(items):
    """Mark two of three cases as slow, except those that together take every kernel branch.

    On a device each case's shapes need a compilation of their own. On the CPU all cases run.
    """
    tests = {}
    for item in items:
        case = _parameters(item).get("case")
        known = getattr(sys.modules[type(case).__module__], "REPRESENTATIVE", ())
        if not known or case.name in known:
            continue
        cases = tests.setdefault((item.path, item.originalname), {})
        if cases.setdefault((type(case), case.name), len(cases)) % 3:
            item.add_marker(pytest.mark.slow)


def _leave_options_to_test_all(items):
    """Mark two of three options as slow: each needs a compilation. On the CPU all options run."""
    options = [item for item in items if "option" in _parameters(item)]
    for i, item in enumerate(options):
        if i % 3:
            item.add_marker(pytest.mark.slow)


def _parameters(item) -> dict:
    return item.callspec.params if hasattr(item, "callspec") else {}
