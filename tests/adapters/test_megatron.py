"""The adapters in every supported release of megatron-core: see megatron_checks.py."""

import fetch_megatron
import megatron_checks
import pytest

RUNS = [
    pytest.param(version, mode, check, id=f"{version}-{mode}-{check}")
    for version in fetch_megatron.VERSIONS
    for mode in megatron_checks.CHECKS
    for check in megatron_checks.names(mode, version)
]


@pytest.mark.parametrize("version, mode, check", RUNS)
def test_megatron(megatron_reports, version, mode, check):
    report = megatron_reports[version, mode].result()
    error = report.get(check, report["stopped"])
    assert error is None, f"megatron-core {version}, {mode}:\n{error}"
