"""Every output is NaN before a kernel writes it, so that an element it forgets shows."""

from npu_ops.core import library

library.poison_outputs = True


def pytest_addoption(parser):
    parser.addoption("--device", help="only the tests that run on such a device, e.g. npu")


def pytest_collection_modifyitems(config, items):
    device = config.getoption("--device")
    if device is None:
        return
    others = [item for item in items if _device(item) != device]
    items[:] = [item for item in items if _device(item) == device]
    config.hook.pytest_deselected(items=others)


def _device(item) -> str | None:
    return item.callspec.params.get("device") if hasattr(item, "callspec") else None
