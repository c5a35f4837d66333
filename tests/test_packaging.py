"""Contents of the sdist and the wheels, built through the hooks that pip and build call."""

import ast
import concurrent.futures
import functools
import json
import os
import pathlib
import re
import runpy
import shutil
import subprocess
import sys
import tarfile
import textwrap
import time
import zipfile

import pytest

import npu_ops
from npu_ops.core import preferences

ROOT = pathlib.Path(__file__).parents[1]
pytestmark = pytest.mark.xdist_group("packaging")  # share one sdist
NOT_SHIPPED = {".gitignore"}
EMPTY = "#include <stdint.h>\n"


def committed():
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return {name for name in listed.stdout.splitlines() if (ROOT / name).exists()}


def copy(names, folder):
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    return folder


def call(folder, hook, **variables):
    """Run a hook of the build backend in `folder` and return the file that it built."""
    done = run_hook(folder, f"print(backend.{hook}('dist'))", **variables)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "dist" / done.stdout.splitlines()[-1]


def run_hook(folder, code, **variables):
    """Run `code` with the build backend imported as `backend` in `folder`, as pip does."""
    return subprocess.run(
        [sys.executable, "-c", f"import build_backend as backend; {code}"],
        cwd=folder, env=os.environ | {"PYTHONPATH": str(folder / "packaging")} | variables,
        capture_output=True, text=True,
    )  # fmt: skip


# The README


def test_the_readme_lists_the_extras():
    section = (ROOT / "pyproject.toml").read_text()
    section = section.partition("[project.optional-dependencies]")[2].partition("\n[")[0]
    extras = set(re.findall(r"^(\w+) = \[", section, re.M))
    assert {"triton", "emulate"} <= extras
    assert extras == set(re.findall(r"`npu-ops\[(\w+)\]`", (ROOT / "README.md").read_text()))


# Contents of the packages


@pytest.fixture(scope="module")
def sdist(tmp_path_factory):
    """An sdist of the committed files, built in a clone that holds results of an older build."""
    clone = copy(committed(), tmp_path_factory.mktemp("clone"))
    (clone / "npu_ops" / "_build_info.json").write_text('{"compiler": "the builder\'s"}')
    (clone / "npu_ops" / "_native.abi3.so").write_bytes(b"\x7fELF")
    made = call(clone, "build_sdist")
    assert "the builder" in (clone / "npu_ops" / "_build_info.json").read_text()
    return made


def test_the_source_distribution_has_what_is_committed_and_no_more(sdist):
    with tarfile.open(sdist) as archive:
        members = [member.name.partition("/")[2] for member in archive if member.isfile()]
    made = {name for name in members if ".egg-info/" in name} | {"PKG-INFO", "setup.cfg"}
    assert set(members) - made == committed() - NOT_SHIPPED
    assert {"CHANGELOG.md", "CONTRIBUTING.md", "ENVS.md", "tests/test_packaging.py"} <= set(members)
    assert not {"npu_ops/_build_info.json", "npu_ops/_native.abi3.so"} & set(members)


def test_a_wheel_of_it_says_how_it_was_built(sdist, tmp_path):
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    (folder,) = tmp_path.iterdir()
    wheel = call(folder, "build_wheel", NPU_OPS_SKIP_NATIVE="1")
    with zipfile.ZipFile(wheel) as archive:
        assert b'"torch": null' in archive.read("npu_ops/_build_info.json")
        names = archive.namelist()
    packages = {name.partition("/")[0] for name in names if ".dist-info/" not in name}
    assert packages == {
        "npu_ops", "npu_ops_adapters", "npu_ops_autoload.py", "npu_ops_emulator",
        "npu_ops_import_hook.py", "npu_ops_tools",
    }  # fmt: skip
    assert "npu_ops_tools/templates/report.html" in names


def test_a_table_that_is_shipped_chooses(tmp_path):
    """A table from `npu-ops tune --export`, put into the package, is found once installed."""
    names = {name for name in committed() if not name.startswith("tests/")}
    clone, site = copy(names, tmp_path / "clone"), tmp_path / "site"
    folder = clone / preferences.PACKAGED.relative_to(ROOT)
    folder.mkdir()
    row = {"op": "l2norm", "dtype": "float32", "width": 8, "bits": 5, "implementation": "reference"}
    table = {"format": preferences.FORMAT, "rows": [row]}
    (folder / preferences.file_name(preferences.soc_of("cpu"))).write_text(json.dumps(table))
    with zipfile.ZipFile(call(clone, "build_wheel", NPU_OPS_SKIP_NATIVE="1")) as archive:
        archive.extractall(site)
    copy({"npu_ops/_native.abi3.so", "npu_ops/_build_info.json"}, site)
    code = """
        import npu_ops, torch
        for rows in (2, 200):
            verdicts = npu_ops.explain("l2norm", torch.ones(rows, 8))
            print(*(v.implementation for v in verdicts if v.why_not is None))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], cwd=tmp_path, capture_output=True, text=True,
        env=os.environ | {"PYTHONPATH": str(site), "XDG_CACHE_HOME": str(tmp_path)},
    )  # fmt: skip
    assert done.stdout.split() == ["reference", "cpu"], done.stdout + done.stderr


@pytest.fixture(scope="module")
def installed(sdist, tmp_path_factory):
    """A folder with the wheel's content, built from the sdist, and our native library."""
    folder = tmp_path_factory.mktemp("installed")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder / "source", filter="data")
    (source,) = (folder / "source").iterdir()
    with zipfile.ZipFile(call(source, "build_wheel", NPU_OPS_SKIP_NATIVE="1")) as archive:
        archive.extractall(folder / "site")
    return copy({"npu_ops/_native.abi3.so", "npu_ops/_build_info.json"}, folder / "site")


# For each command run in a clone: text in its output, and its exit status.
IN_A_CLONE = {
    "new-op toy": ("tests/fuzz/ops/toy.py", 0),
    "bench l2norm --quick --longest 0 --only decoding": ("only: got ['decoding']", 2),
    "fuzz l2norm --minutes 0": ("", 0),
    "demo --megatron no": ("megatron: got no, which has no megatron-core", 2),
}


@pytest.mark.parametrize("arguments", IN_A_CLONE)
def test_commands_of_a_clone_work_there_by_an_installed_wheel(installed, tmp_path, arguments):
    said, status = IN_A_CLONE[arguments]
    clone = copy(committed(), tmp_path / "clone")
    code = "from npu_ops_tools import cli, where; print(where.ROOT); cli.main()"

    def run(folder):
        done = subprocess.run(
            [sys.executable, "-P", "-c", code, *arguments.split()], cwd=folder,
            env=os.environ | {"PYTHONPATH": str(installed)}, capture_output=True, text=True,
        )  # fmt: skip
        assert done.stdout.splitlines()[0] == str(installed)
        return done

    done = run(clone / "docs")
    assert done.returncode == status and said in done.stdout + done.stderr, done
    done = run(tmp_path)
    assert done.returncode == 2 and "run from a clone of the repository" in done.stderr, done


def test_editors_and_type_checkers_know_every_public_name(installed, tmp_path):
    """pyright finds no error in the docs' examples. It sees only the installed wheel."""
    assert dir(npu_ops) == sorted(npu_ops.__all__)
    every = "import npu_ops\n" + "".join(f"npu_ops.{name}\n" for name in npu_ops.__all__)
    (tmp_path / "every.py").write_text(f"{every}npu_ops.importlib\n")
    examples = [
        block
        for page in [ROOT / "README.md", *ROOT.glob("docs/**/*.md")]
        for block in re.findall(r"^```python\n(.*?)^```", page.read_text(), re.M | re.S)
    ]
    for number, example in enumerate(examples):
        (tmp_path / f"example_{number}.py").write_text(example)
    (tmp_path / "pyrightconfig.json").write_text(json.dumps({"extraPaths": [str(installed)]}))
    command = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable]
    done = subprocess.run([*command, "-p", tmp_path], capture_output=True, text=True)
    found = [each["message"] for each in json.loads(done.stdout)["generalDiagnostics"]]
    assert found == ['"importlib" is not a known attribute of module "npu_ops"']
    assert len(examples) > 10


def test_the_native_library_asks_for_no_newer_glibc():
    """The library needs at most glibc 2.28 (see packaging/wheels.py) and GCC 8's libstdc++."""
    library = ROOT / "npu_ops" / "_native.abi3.so"
    symbols = subprocess.run(["objdump", "-T", library], capture_output=True, text=True, check=True)
    needed = re.findall(r"\((GLIBC|GLIBCXX)_([\d.]+)\)", symbols.stdout)
    assert len(needed) > 10
    newest = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 25)}
    for name, version in needed:
        assert tuple(map(int, version.split("."))) <= newest[name], f"{name}_{version}"


# AscendC kernels, built with a stand-in for CANN whose compiler records how it was called.

CANN = ROOT / "tests" / "cann_stand_in"


@pytest.fixture
def kernels(tmp_path):
    """A clone with one empty native source in place of ours, which take minutes to compile."""
    names = {name for name in committed() if not name.startswith("tests/")}
    names = {name for name in names if not name.endswith(("_cpu.cpp", "_npu.cpp"))}
    clone = copy(names, tmp_path)
    (clone / "csrc/one").mkdir()
    (clone / "csrc/one/one_cpu.cpp").write_text(EMPTY)
    return clone


def build_wheel(folder, **variables):
    """Build as `pip install .` does; return the process and the wheel's AscendC files by name."""
    done = run_hook(folder, "backend.build_wheel('dist')", **variables)
    wheels = list((folder / "dist").glob("*.whl"))
    if not wheels:
        return done, {}
    with zipfile.ZipFile(wheels[0]) as archive:
        return done, {n: archive.read(n) for n in archive.namelist() if "_ascendc/" in n}


def test_kernels_are_compiled_for_each_family_and_shipped(kernels):
    done, objects = build_wheel(kernels, ASCEND_HOME_PATH=str(CANN))
    assert done.returncode == 0, done.stdout + done.stderr
    ops = {path.parent.name for path in (ROOT / "csrc").glob("*/*_ascendc.cpp")}
    families = ("ascend910b", "ascend910_93")
    assert set(objects) == {f"npu_ops/_ascendc/{f}/{op}.o" for f in families for op in ops}
    for name, called in objects.items():
        arguments = called.decode().splitlines()
        assert "--npu-arch=dav-2201" in arguments and "--cce-aicore-only" in arguments
        assert arguments[-1].endswith(f"/{pathlib.Path(name).stem}_ascendc.cpp")
        assert any(a.startswith("-I") and a.endswith("/csrc") for a in arguments)


def test_a_kernel_that_does_not_compile_ends_the_installation(kernels):
    done, _ = build_wheel(kernels, ASCEND_HOME_PATH=str(CANN), STAND_IN_REFUSES="l2norm_ascendc")
    assert done.returncode != 0
    assert "npu-ops: the AscendC kernels were not built" in done.stderr
    assert "NPU_OPS_SKIP_ASCENDC=1" in done.stderr
    assert not list((kernels / "dist").glob("*.whl"))


def test_kernels_are_left_out_loudly_or_where_there_is_no_cann(kernels):
    done, objects = build_wheel(kernels, ASCEND_HOME_PATH=str(CANN), NPU_OPS_SKIP_ASCENDC="1")
    assert done.returncode == 0 and not objects
    assert "NPU_OPS_SKIP_ASCENDC=1: WITHOUT AscendC kernels" in done.stderr
    done, objects = build_wheel(kernels, ASCEND_HOME_PATH="")
    assert done.returncode == 0 and not objects
    assert "AscendC" not in done.stderr


# A clone


def test_a_changed_source_alone_is_compiled_again(tmp_path):
    """In an editable install, with two tiny sources in place of ours, which take longer."""
    names = {name for name in committed() if not name.startswith(("csrc/", "tests/"))}
    clone = copy(names, tmp_path)
    emulator = clone / "csrc" / "emulator"  # setup.py needs it: it is also a package
    for path in (emulator, clone / "csrc/one", clone / "csrc/two"):
        path.mkdir(parents=True)
    (clone / "csrc/one/size.h").write_text("inline int size() { return 1; }\n")
    for name, text in (("one", '#include "one/size.h"\n'), ("two", EMPTY)):
        (clone / f"csrc/{name}/{name}_cpu.cpp").write_text(text)

    def compiled():
        """Build, and return the names of the objects that were written."""
        before = {path: path.stat().st_mtime_ns for path in objects()}
        call(clone, "build_editable")
        return {path.stem for path in objects() if before.get(path) != path.stat().st_mtime_ns}

    def objects():
        return list((clone / "build").rglob("*.o"))

    assert compiled() == {"one_cpu", "two_cpu"}
    with (clone / "csrc/two/two_cpu.cpp").open("a") as source:
        source.write("int two() { return 2; }\n")
    assert compiled() == {"two_cpu"}
    (clone / "csrc/one/size.h").write_text("inline int size() { return 2; }\n")
    assert compiled() == {"one_cpu"}
    assert (clone / "npu_ops/_native.abi3.so").exists()


def test_building_wheels_leaves_a_checkout_as_it_was(tmp_path):
    """A build writes _build_info.json; setup.py does so for a source distribution too."""
    kept = runpy.run_path(str(ROOT / "packaging/build_backend.py"))["kept"]
    there, missing = tmp_path / "there", tmp_path / "missing"
    there.write_text("mine")
    for file in (there, missing):
        with kept(file):
            file.write_text("a build's")
    assert there.read_text() == "mine" and not missing.exists()


def test_wheels_are_built_from_a_tree_of_their_own(tmp_path):
    """A clone in which `make test` ran: nothing that its builds left behind is in the wheel."""
    sources = committed()
    clone = copy(sources, tmp_path / "clone")
    left = {
        "build/lib/npu_ops/left.py", "build/lib.linux-x86_64-cpython-311/npu_ops/_known.so",
        "build/native/left.o", "npu_ops/_native.abi3.so", "npu_ops/_known.cpython-311.so",
        "npu_ops.egg-info/SOURCES.txt", "csrc/build/left.cpp.o",
    }  # fmt: skip
    for name in left:
        (clone / name).parent.mkdir(parents=True, exist_ok=True)
        (clone / name).write_text("left")
    (clone / "npu_ops/_build_info.json").write_text('{"torch": "another"}')
    before = {path: path.read_bytes() for path in clone.rglob("*") if path.is_file()}
    done = subprocess.run(
        [sys.executable, clone / "packaging/wheels.py", "pure"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = (clone / "dist").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        assert b'"torch": null' in archive.read("npu_ops/_build_info.json")
    assert not [n for n in names if "left" in n or n.endswith((".so", ".o"))]
    shutil.rmtree(clone / "dist")
    after = {path: path.read_bytes() for path in clone.rglob("*") if path.is_file()}
    egg = "npu_ops.egg-info"  # setuptools writes it again
    changed = {p for p in before.keys() | after.keys() if before.get(p) != after.get(p)}
    assert {str(p) for p in changed if egg not in str(p) and "__pycache__" not in str(p)} == set()

    made = tmp_path / "made"
    made.mkdir()
    tree = runpy.run_path(str(clone / "packaging/wheels.py"))["tree"](made)
    files = {str(path.relative_to(tree)) for path in tree.rglob("*") if path.is_file()}
    assert sources - NOT_SHIPPED <= files and not left & files - {"npu_ops.egg-info/SOURCES.txt"}


def test_source_distributions_are_built_one_at_a_time(tmp_path, monkeypatch):
    """packaging/versions.py asks for two at once; setuptools gathers both in the same folder."""
    sdist = runpy.run_path(str(ROOT / "packaging/wheels.py"))["sdist"]
    folders, running, most = [tmp_path / "one", tmp_path / "two"], [], []

    def build(*command, **options):
        running.append(command)
        time.sleep(0.1)
        most.append(len(running))
        for folder in filter(pathlib.Path.exists, folders):
            (folder / "made.tar.gz").touch()
        running.pop()

    monkeypatch.setitem(sdist.__globals__, "run", build)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        made = [*pool.map(functools.partial(sdist, ROOT), folders)]
    assert made == [folder / "made.tar.gz" for folder in folders] and most == [1, 1]


ADDRESSES = {
    "https://example.org/group/npu-ops.git": "https://example.org/group/npu-ops",
    "https://user:secret@example.org/npu-ops": "https://example.org/npu-ops",
    "git@example.org:group/npu-ops.git": "https://example.org/group/npu-ops",
    "ssh://git@example.org/npu-ops": "https://example.org/npu-ops",
    "/srv/npu-ops.git": None,
    "file:///srv/npu-ops": None,
    "": None,
}


@pytest.mark.parametrize("remote", ADDRESSES)
def test_the_page_of_a_remote(remote, tmp_path, monkeypatch):
    wheels = runpy.run_path(str(ROOT / "packaging/wheels.py"))["web_address"].__globals__
    monkeypatch.setitem(wheels, "ROOT", tmp_path)
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    if remote:
        subprocess.run(["git", "-C", tmp_path, "remote", "add", "origin", remote], check=True)
    assert wheels["web_address"]() == ADDRESSES[remote]


def test_the_metadata_and_the_readme_of_a_release_link_to_the_repository(tmp_path):
    copy({"README.md", "pyproject.toml", "npu_ops/version.py"}, tmp_path)
    runpy.run_path(str(ROOT / "packaging/wheels.py"))["link"](tmp_path, "https://example.org/x")
    metadata = (tmp_path / "pyproject.toml").read_text().partition("[project.urls]\n")[2]
    urls = dict(re.findall('^(.+) = "(.+)"$', metadata, re.M))
    assert urls["Source"] == "https://example.org/x" and {"Issues", "Changelog"} < set(urls)
    files = f"https://example.org/x/blob/v{npu_ops.__version__}/"
    assert urls["Changelog"] == f"{files}CHANGELOG.md"
    targets = re.findall(r"\]\(([^)#]+)", (tmp_path / "README.md").read_text())
    ours = [target for target in targets if target.startswith(files)]
    assert len(ours) > 10 and not [target for target in targets if "://" not in target]
    assert all((ROOT / target.removeprefix(files)).exists() for target in ours)


@pytest.fixture
def release(tmp_path, monkeypatch):
    """Return the module packaging/release.py and a folder in which a release was built."""
    monkeypatch.syspath_prepend(ROOT / "packaging")
    import release

    copy({"npu_ops/version.py"}, tmp_path)
    version = npu_ops.__version__
    (tmp_path / "CHANGELOG.md").write_text(f"## [{version}] - 2026-01-02\n")
    (tmp_path / "site").mkdir()
    (tmp_path / "site/index.html").touch()
    who = "-c", "user.name=test", "-c", "user.email=test@example.org"
    for arguments in (("init", "-q"), ("add", "-A"), (*who, "commit", "-q", "-m", "all")):
        subprocess.run(["git", *arguments], cwd=tmp_path, check=True)
    (tmp_path / ".git/info/exclude").write_text("dist\n")
    (tmp_path / "dist").mkdir()
    for kind in release.KINDS:
        (tmp_path / f"dist/npu_ops-{version}{kind.replace('*', '1')}").touch()
    return release, tmp_path


def test_a_release_that_is_ready(release):
    module, clone = release
    assert list(module.missing(clone, "2026-01-02")) == []


def test_what_a_release_lacks_is_named(release):
    module, clone = release
    subprocess.run(["git", "tag", f"v{npu_ops.__version__}"], cwd=clone, check=True)
    (clone / "site/index.html").unlink()
    (clone / "dist/npu_ops-0.0.1.tar.gz").touch()
    next(clone.glob("dist/*x86_64.whl")).unlink()
    said = " ".join(module.missing(clone, "2026-01-03"))
    for sentence in (
        "dated 2026-01-02, today is 2026-01-03", "not committed", "is a tag", "x86_64.whl",
        "npu_ops-0.0.1.tar.gz is not of", "site: not built",
    ):  # fmt: skip
        assert sentence in said
    (clone / "CHANGELOG.md").write_text("")
    assert "no section" in next(module.missing(clone, "2026-01-03"))


def test_the_changelog_is_short_and_has_this_version():
    text = (ROOT / "CHANGELOG.md").read_text()
    assert len(text.splitlines()) <= 60 and f"## [{npu_ops.__version__}]" in text


def test_torch_is_asked_for_where_it_is_compiled_for():
    """A wheel without native code and a source distribution need no download of torch."""

    def asked(hook, **variables):
        done = run_hook(ROOT, f"print(backend.get_requires_for_{hook}())", **variables)
        return ast.literal_eval(done.stdout)

    for hook in ("build_wheel", "build_editable"):
        assert asked(hook, NPU_OPS_SKIP_NATIVE="0") == ["torch==2.13.0", "ninja"]
        assert asked(hook, NPU_OPS_SKIP_NATIVE="1") == []
    assert asked("build_sdist", NPU_OPS_SKIP_NATIVE="0") == []
    system = (ROOT / "pyproject.toml").read_text().partition("[project]")[0]
    assert 'requires = ["setuptools>=77"]' in system and 'build-backend = "build_backend"' in system


@pytest.mark.parametrize(
    "missing, said",
    [
        ("setuptools.__version__ = '65.5.0'", r"npu-ops: got setuptools 65.5.0 .* needs 77 or "),
        ("sys.modules['torch'] = None", r"npu-ops: torch was not found .* --no-build-isolation, "),
        ("os.environ['CXX'] = 'no-g++'", r"npu-ops: the C\+\+ compiler 'no-g\+\+' was not found"),
    ],
    ids=["setuptools", "torch", "compiler"],
)
def test_what_is_missing_to_build_with_is_one_sentence(missing, said):
    setup = "runpy.run_path('setup.py')"
    code = (
        f"import os, runpy, sys, setuptools\n{missing}\nsys.argv = ['setup.py', '--name']\n{setup}"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and re.match(said, done.stderr), done.stderr
    assert done.stderr.count("\n") == 1


def test_a_wheel_of_python_alone_is_built_without_torch(sdist, tmp_path):
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    (folder,) = tmp_path.iterdir()
    code = "import sys; sys.modules['torch'] = None; "
    for made in ("backend.build_sdist('dist')", "backend.build_wheel('dist')"):
        done = run_hook(folder, code + made, NPU_OPS_SKIP_NATIVE="1")
        assert done.returncode == 0, done.stderr
    assert len(list((folder / "dist").iterdir())) == 2
