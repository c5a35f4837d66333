"""Test the import hook: its cost, and that none of its errors breaks an import."""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import inspect
import logging
import pathlib
import pkgutil
import subprocess
import sys
import threading
import types

import npu_ops_adapters
import npu_ops_autoload
import npu_ops_import_hook
import pytest
import torch
from npu_ops_adapters.sglang import functions
from packaging.version import Version
from processes import environment

from npu_ops.core import env, hardware

SOURCE = pathlib.Path(npu_ops_autoload.__file__)
HOOK = pathlib.Path(npu_ops_import_hook.__file__)


def python(code: str, *folders, **changes) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", code],
        env=environment(*folders, **changes),
        capture_output=True,
        text=True,
    )


# Tests in other processes


@pytest.fixture
def broken(tmp_path):
    """Make a folder with npu-ops' hook, its other modules broken, and a watched framework."""
    for source in (SOURCE, HOOK):
        (tmp_path / source.name).write_text(source.read_text())
    for name in ("npu_ops", "npu_ops_adapters"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise RuntimeError('broken')\n")
    for package in ("megatron", "megatron/core"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").touch()
    (tmp_path / "megatron/core/jit.py").write_text("import torch\njit_fuser = torch.compile\n")
    return tmp_path


def test_torch_and_a_framework_import_when_all_else_of_ours_is_broken(broken):
    done = python(
        "import sys, torch\n"
        "assert type(sys.meta_path[0]).__module__ == 'npu_ops_import_hook', sys.meta_path\n"
        "import megatron.core.jit, importlib\n"
        "assert megatron.core.jit.jit_fuser is torch.compile\n"
        "importlib.reload(megatron.core.jit)\n",
        broken,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("npu-ops left the framework as it is: RuntimeError: broken") == 1


@pytest.mark.parametrize("there_before", [False, True])
def test_an_adapter_that_exits_ends_nothing(broken, there_before):
    (broken / "npu_ops_adapters/__init__.py").write_text("import sys\nsys.exit('gone')\n")
    before = "import sys, types; sys.modules['megatron.core.jit'] = types.ModuleType('a.b')\n"
    code = (before if there_before else "") + "import torch, megatron.core.jit\nprint('here')\n"
    done = python(code, broken)
    assert (done.returncode, done.stdout) == (0, "here\n"), done.stderr
    assert "npu-ops left the framework as it is: SystemExit: gone" in done.stderr


def test_without_its_module_an_entry_point_breaks_torch_and_the_way_out_of_the_readme(tmp_path):
    """torch imports the entry point's module before running any of it, so no code
    of ours can help."""
    folder = tmp_path / "gone-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: gone\nVersion: 1.0\n")
    (folder / "entry_points.txt").write_text("[torch.backends]\ngone = no_such_module:install\n")
    done = python("import torch", tmp_path)
    assert done.returncode == 1 and "TORCH_DEVICE_BACKEND_AUTOLOAD=0" in done.stderr
    done = python("import torch", tmp_path, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert done.returncode == 0, done.stderr
    readme = (SOURCE.parents[1] / "README.md").read_text()
    assert "pip uninstall npu-ops" in readme and "TORCH_DEVICE_BACKEND_AUTOLOAD=0" in readme


def test_torch_imports_when_a_watched_module_was_there_before_and_all_else_is_broken(broken):
    done = python(
        "import sys, types\n"
        "sys.modules['megatron.core.jit'] = types.ModuleType('megatron.core.jit')\n"
        "import torch\n"
        "print(torch.ones(2).sum().item())\n",
        broken,
    )
    assert (done.returncode, done.stdout) == (0, "2.0\n"), done.stderr
    assert "RuntimeError: broken" in done.stderr


def test_a_framework_that_imports_torch_itself_is_told_of(broken):
    """The framework's module was found before torch was imported, so before our finder existed."""
    for name in ("npu_ops", "npu_ops_adapters"):
        (broken / name / "__init__.py").unlink()
        (broken / name).rmdir()
    done = python(
        "import megatron.core.jit, sys\n"
        "assert megatron.core.jit.jit_fuser.__name__ == 'npu_ops_leave_uncompiled'\n"
        "spec = megatron.core.jit.__spec__\n"
        "assert type(spec).__name__ == 'ModuleSpec' and spec._initializing is False\n",
        broken,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_framework_that_imports_torch_and_fails_is_not_told_of(broken):
    (broken / "megatron/core/jit.py").write_text("import torch\nraise KeyError('its own')\n")
    done = python("import megatron.core.jit", broken)
    assert done.returncode == 1 and done.stderr.strip().endswith("KeyError: 'its own'")


@pytest.mark.parametrize("disable", ["all", "rope, all"])
def test_disabled_altogether_it_does_not_even_watch(broken, disable):
    done = python(
        "import sys, torch, megatron.core.jit\n"
        "assert not any(type(f).__module__ == 'npu_ops_import_hook' for f in sys.meta_path)\n",
        broken,
        NPU_OPS_DISABLE=disable,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_it_takes_less_than_5_ms_of_importing_torch():
    """The limit is in CPU time, which other programs on the machine do not change."""
    code = (
        "import torch, time\n"
        "start = time.process_time()\n"
        "import npu_ops_autoload\n"
        "npu_ops_autoload.install()\n"
        "print(time.process_time() - start)\n"
        "import sys\n"
        "assert 'npu_ops' not in sys.modules and 'npu_ops_adapters' not in sys.modules\n"
    )
    runs = [python(code, TORCH_DEVICE_BACKEND_AUTOLOAD="0") for _ in range(3)]
    assert all(done.returncode == 0 for done in runs), runs[0].stderr
    assert min(float(done.stdout) for done in runs) < 0.005


def test_it_needs_the_standard_library_alone():
    done = python("import npu_ops_autoload, sys; assert 'torch' not in sys.modules")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("first", ["megatron.core.jit", "npu_ops_adapters"])
def test_applied_by_hand_without_torchs_help(broken, first):
    """Patches are applied before or after the framework is imported.

    Only the hook comes from `broken`.
    """
    for name in ("npu_ops", "npu_ops_adapters"):
        (broken / name / "__init__.py").unlink()
        (broken / name).rmdir()
    done = python(
        f"import {first}, npu_ops_adapters, torch\n"
        "npu_ops_adapters.apply()\n"
        "import megatron.core.jit\n"
        "assert megatron.core.jit.jit_fuser.__name__ == 'npu_ops_leave_uncompiled'\n"
        "assert npu_ops_adapters.verify()[0].state == 'applied'\n"
        "npu_ops_adapters.revert()\n"
        "assert megatron.core.jit.jit_fuser is torch.compile\n",
        broken,
        TORCH_DEVICE_BACKEND_AUTOLOAD="0",
    )
    assert done.returncode == 0, done.stderr


# Tests of the finder in this process


@pytest.fixture
def watched(tmp_path, monkeypatch):
    """Write and watch a module; yield the names that the hook reports."""
    (tmp_path / "watched_module.py").write_text("value = object()\ndef function(): return value\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.setattr(npu_ops_import_hook, "WATCHED", {"watched_module", "watched_late"})
    monkeypatch.setattr(npu_ops_import_hook, "_MODELS", "none of transformers.")
    monkeypatch.setattr(npu_ops_import_hook, "_reported", set())
    told = []
    monkeypatch.setattr(npu_ops_adapters, "imported", told.append)
    npu_ops_autoload.install()
    yield told
    sys.modules.pop("watched_module", None)


def test_it_tells_once_for_each_time_a_module_runs(watched):
    module = importlib.import_module("watched_module")
    importlib.import_module("watched_module")
    assert watched == ["watched_module"]
    importlib.reload(module)
    assert watched == ["watched_module"] * 2


def test_a_module_looks_as_if_nothing_had_happened(watched):
    module = importlib.import_module("watched_module")
    plain = importlib.machinery.SourceFileLoader
    assert type(module.__loader__) is type(module.__spec__.loader) is plain
    assert inspect.getsource(module.function).startswith("def function")
    assert pkgutil.get_data("watched_module", "watched_module.py").startswith(b"value")


def test_finding_or_copying_a_module_is_not_importing_it(watched):
    spec = importlib.util.find_spec("watched_module")
    assert spec.loader.get_source("watched_module").startswith("value")
    assert spec.loader.is_package("watched_module") is False
    copy = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(copy)
    assert copy.function() is copy.value
    assert watched == [] and "watched_module" not in sys.modules


def test_pkgutil_walks_as_before(watched, tmp_path):
    names = [module.name for module in pkgutil.walk_packages([str(tmp_path)])]
    assert names == ["watched_module"]


def test_a_lazy_module_is_told_of_when_it_runs(watched):
    spec = importlib.util.find_spec("watched_module")
    spec.loader = importlib.util.LazyLoader(spec.loader)
    module = importlib.util.module_from_spec(spec)
    sys.modules["watched_module"] = module
    spec.loader.exec_module(module)
    assert watched == []
    assert module.function is not None
    assert watched == ["watched_module"]


@pytest.mark.parametrize("module", [npu_ops_autoload, npu_ops_import_hook])
def test_reloading_leaves_one_finder(module, monkeypatch):
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    npu_ops_import_hook.unwatch()
    for _ in range(2):
        npu_ops_autoload.install()
        importlib.reload(module)
        npu_ops_autoload.install()
        assert [type(f).__name__ for f in sys.meta_path].count("_Finder") == 1
    npu_ops_import_hook.unwatch()
    assert not npu_ops_import_hook.is_watching()


def test_another_hook_that_asks_all_finders_does_not_recurse(watched):
    class Other:
        def find_spec(self, fullname, path=None, target=None):
            if fullname != "watched_module":
                return None
            for finder in sys.meta_path:
                if finder is not self:
                    spec = finder.find_spec(fullname, path, target)
                    if spec:
                        return spec
            return None

    sys.meta_path.insert(1, Other())
    importlib.import_module("watched_module")
    del sys.modules["watched_module"]
    sys.meta_path.insert(0, sys.meta_path.pop(1))
    importlib.import_module("watched_module")
    assert watched == ["watched_module"] * 2


def test_threads_import_it_once(watched):
    ready = threading.Barrier(8)
    seen = []

    def work():
        ready.wait()
        seen.append(importlib.import_module("watched_module").value)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(map(id, seen))) == 1 and len(seen) == 8
    assert watched == ["watched_module"]


def test_a_failure_of_ours_is_said_once_and_the_import_goes_on(watched, monkeypatch, caplog):
    def fails(name):
        raise ValueError("of ours")

    monkeypatch.setattr(npu_ops_adapters, "imported", fails)
    with caplog.at_level(logging.WARNING, logger="npu_ops"):
        module = importlib.import_module("watched_module")
        importlib.reload(module)
    assert module.value is not None
    assert caplog.messages == ["npu-ops left the framework as it is: ValueError: of ours"]


def test_a_failure_of_the_module_is_its_own(watched, tmp_path):
    (tmp_path / "watched_module.py").write_text("raise KeyError('its own')\n")
    with pytest.raises(KeyError, match="its own"):
        importlib.import_module("watched_module")
    assert watched == [] and "watched_module" not in sys.modules


def test_a_failing_finder_fails_as_without_us(watched):
    class Broken:
        def find_spec(self, fullname, path=None, target=None):
            raise OSError("a finder")

    sys.meta_path.insert(1, Broken())
    with pytest.raises(OSError, match="a finder"):
        importlib.import_module("watched_module")


def test_a_module_that_is_not_there_is_not_there(watched):
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("watched_late")


def test_watching_twice_is_watching_once_and_can_be_undone(watched):
    npu_ops_autoload.install()
    finders = [type(finder).__module__ for finder in sys.meta_path]
    assert finders.count("npu_ops_import_hook") == 1
    npu_ops_import_hook.unwatch()
    assert not npu_ops_import_hook.is_watching()
    importlib.import_module("watched_module")
    assert watched == []


@pytest.mark.parametrize(
    "module", [npu_ops_autoload, npu_ops_import_hook], ids=lambda m: m.__name__
)
def test_reloaded_it_still_tells_once(watched, module):
    importlib.reload(module)
    npu_ops_autoload.install()
    npu_ops_import_hook.WATCHED = {"watched_module"}  # the reload had set it again
    importlib.import_module("watched_module")
    assert watched == ["watched_module"]
    npu_ops_import_hook.unwatch()
    assert not npu_ops_import_hook.is_watching()


def test_what_is_patched_is_watched(monkeypatch):
    """The set of patches depends on imports, settings, an NPU and SGLang's version."""
    with env.override(consistent="tokens"):
        watched = {patch.module for patch in npu_ops_adapters.patches()}
    # Modules that are watched import these two.
    watched -= {"sglang.srt.layers.activation", "sglang.srt.models.qwen2_moe"}
    watched |= {patch.module for patch in npu_ops_adapters.patches()}
    monkeypatch.setattr(torch, "npu", object(), raising=False)
    for version in ("0.5.9", "0.5.10", "0.5.23"):
        monkeypatch.setattr(functions, "version", lambda version=version: Version(version))
        watched |= {patch.module for patch in npu_ops_adapters.patches()}
    with env.override(consistent="tokens"):
        watched |= {patch.module for patch in npu_ops_adapters.patches() if ".npu." in patch.module}
    monkeypatch.setattr(hardware, "is_npu", lambda: True)
    for name in npu_ops_import_hook.WATCHED:
        with monkeypatch.context() as context:
            context.setitem(sys.modules, name, types.ModuleType(name))
            watched |= {patch.module for patch in npu_ops_adapters.patches()}
    watched.remove("torch.cuda.nvtx")  # torch's own, imported already
    assert not [name for name in watched if not npu_ops_import_hook.is_watched(name)]
    assert watched > npu_ops_import_hook.WATCHED


def test_every_model_of_transformers_is_watched():
    """The model's name does not matter: npu-ops looks at what the module defines."""
    home = "transformers.models.any_name.modeling_any_name"
    assert npu_ops_import_hook.is_watched(home)
    assert npu_ops_import_hook.model_of_transformers(home) == "any_name"
    for other in (
        "transformers.models.any_name",
        f"{home}.more",
        f"my.{home}",
        "transformers.models.one.modeling_two",
        "transformers.models.one.processing_one",
    ):
        assert not npu_ops_import_hook.is_watched(other)
