"""The adapters in every supported release of megatron-core: see megatron_checks.py."""

import fetch_megatron
import megatron_checks
import pytest
from conftest import run_checks

RUNS = [
    pytest.param(
        version,
        mode,
        check,
        id=f"{version}-{mode}-{check}",
        marks=pytest.mark.xdist_group(f"megatron-{version}-{mode}"),
    )  # fmt: skip
    for version in fetch_megatron.VERSIONS
    for mode in megatron_checks.CHECKS
    for check in megatron_checks.names(mode, version)
]


@pytest.mark.parametrize("version, mode, check", RUNS)
def test_megatron(version, mode, check):
    report = run_checks(version, mode)
    error = report.get(check, report["stopped"])
    assert error is None, f"megatron-core {version}, {mode}:\n{error}"
