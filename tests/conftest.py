"""Every output is NaN before a kernel writes it, so that an element it forgets shows.

What is compared with a framework's function is compared with the framework's own: nothing is
patched in this process but where a test asks for it.

What a test draws is the same in every run, whichever tests ran before it, and so are the folders
where modules are found.
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
preferences.cache = lambda: None  # what a user tuned is no part of the tests
npu_ops_import_hook.unwatch()


def pytest_collectstart(collector):
    """A module may draw when it is imported."""
    _seed()


@pytest.fixture(autouse=True)
def seeded():
    _seed()


@pytest.fixture(autouse=True)
def same_path():
    """With a folder go the packages that were found in it: adapters ask what is imported."""
    before = sys.path[:]
    yield
    added = [pathlib.Path(folder) for folder in sys.path if folder not in before]
    sys.path[:] = before
    packages = {item.stem for folder in added for item in folder.glob("*")}
    for name in [n for n in sys.modules if n.partition(".")[0] in packages]:
        del sys.modules[name]


@pytest.fixture
def applied():
    """npu-ops in the frameworks that are imported, until the test ends."""
    import npu_ops_adapters

    npu_ops_adapters.revert()
    npu_ops_adapters.apply()
    yield
    npu_ops_adapters.revert()


@pytest.fixture(autouse=True)
def no_group_stays():
    """The next test is in no process group: with one, `core.preferences` asks its store."""
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def _seed():
    torch.manual_seed(0)
    random.seed(0)


def pytest_addoption(parser):
    parser.addoption("--device", help="only the tests that run on such a device, e.g. npu")


def pytest_collection_modifyitems(config, items):
    # Single tests that take a minute come first: at the end, all processes but one would wait for
    # them.
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
    """A kernel takes a second to compile for each dtype, and the tests are in three: mark slow all
    but one dtype of a test, in turn, and all but a third of mixed dtypes, which has every pair."""
    tests = {}
    for item in items:
        dtypes = {n: DTYPES.index(v) for n, v in _parameters(item).items() if v in DTYPES}
        others = {n: i for n, i in item.callspec.indices.items() if n not in dtypes}
        turn = tests.setdefault(str((item.path, item.originalname, others)), len(tests))
        if dtypes and (sum(dtypes.values()) + turn) % len(DTYPES):
            item.add_marker(pytest.mark.slow)


def _leave_cases_to_test_all(items):
    """A kernel is compiled for the shapes of each case, and on the CPU all of them run: mark slow
    two cases of three, but none of those that together take every branch of the kernels."""
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
    """A kernel is compiled for each option, and on the CPU all of them run: mark slow two of
    three."""
    options = [item for item in items if "option" in _parameters(item)]
    for i, item in enumerate(options):
        if i % 3:
            item.add_marker(pytest.mark.slow)


def _parameters(item) -> dict:
    return item.callspec.params if hasattr(item, "callspec") else {}
