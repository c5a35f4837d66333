"""Graphs in torch's compile cache from another npu-ops version are not reused."""

import pytest
import torch

from npu_ops.core import compile_cache


@pytest.fixture
def package(tmp_path):
    (tmp_path / "ops").mkdir()
    (tmp_path / "ops/op.py").write_text("GRADIENT = 1\n")
    return tmp_path


def test_torch_knows_what_this_package_consists_of():
    assert compile_cache.fingerprint(compile_cache._PACKAGE) in torch.compiler.config.cache_key_tag


@pytest.mark.parametrize("name, text", [("ops/op.py", "GRADIENT = 2\n"), ("ops/new.py", "")])
def test_another_source_is_another_fingerprint(package, name, text):
    before = compile_cache.fingerprint(package)
    assert compile_cache.fingerprint(package) == before
    (package / name).write_text(text)
    assert compile_cache.fingerprint(package) != before


def test_a_tag_that_is_there_stays(package):
    with torch.compiler.config.patch(cache_key_tag="theirs"):
        compile_cache.tell_torch(package)
        compile_cache.tell_torch(package)
        expected = f"theirs npu_ops={compile_cache.fingerprint(package)}"
        assert torch.compiler.config.cache_key_tag == expected
