"""Run the aarch64 wheel's kernels under qemu-user, against the reference.

    python packaging/wheels.py aarch64
    dpkg --add-architecture arm64 && apt-get update && apt-get install qemu-user-static
    python packaging/aarch64.py [--torch 2.9.1] [pytest's arguments]

Python and the C libraries come from Debian's packages, torch and the other packages from pip. The
default is torch 2.10.0, for the library that serves torch 2.10 and newer; an older torch tests the
library built for it. All files lie in .cache/aarch64. By default the cases of every op run in bf16,
forward and backward.
"""

import argparse
import os
import pathlib
import subprocess
import sys
import zipfile

import wheels

ROOT = pathlib.Path(__file__).parents[1]
HERE = ROOT / ".cache" / "aarch64"
SYSTEM = HERE / "system"
TORCH = ("2.10.0", *wheels.OLDER_TORCH)
DEBIAN = (
    "python3.11-minimal", "libpython3.11-minimal", "libpython3.11-stdlib", "libc6", "libstdc++6",
    "libgcc-s1", "zlib1g", "libexpat1", "libssl3", "libffi8", "libbz2-1.0", "liblzma5",
    "libsqlite3-0", "libuuid1", "libcrypt1", "libgomp1",
)  # fmt: skip
PYTHON = (
    "numpy<2.4", "typing_extensions", "sympy", "mpmath", "networkx", "jinja2",
    "markupsafe", "fsspec", "filelock", "packaging", "pytest", "pluggy", "iniconfig",
    "pygments", "pytest-timeout", "pytest-xdist", "execnet",
)  # fmt: skip
TESTS = (
    "-x",
    "tests/ops/test_contract.py",
    "-k",
    "an_implementation_is_the_reference and cpu and bfloat16",
)


def system():
    """Download and unpack Debian's packages for aarch64."""
    packages = HERE / "debian"
    packages.mkdir(parents=True)
    names = [f"{name}:arm64" for name in DEBIAN]
    subprocess.run(["apt-get", "download", *names], cwd=packages, check=True)
    for package in packages.glob("*.deb"):
        subprocess.run(["dpkg", "-x", package, SYSTEM], check=True)


def site(torch: str, folder: pathlib.Path):
    """Download and unpack Python wheels for aarch64, and wheels for any architecture."""
    downloads = HERE / f"wheels-{torch}"
    platforms = ("manylinux_2_28_aarch64", "manylinux2014_aarch64")
    subprocess.run(
        [
            sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--python-version",
            "3.11", "--only-binary=:all:", *(f"--platform={p}" for p in platforms), "--dest",
            str(downloads), f"torch=={torch}", *PYTHON,
        ],
        check=True,
    )  # fmt: skip
    for wheel in downloads.glob("*.whl"):
        unpack(wheel, folder)


def unpack(wheel: pathlib.Path, folder: pathlib.Path):
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)


def main(torch: str, arguments: list[str]):
    ours = sorted(ROOT.glob("dist/npu_ops-*_aarch64.whl"))
    if not ours:
        raise SystemExit("aarch64: dist has no wheel; run python packaging/wheels.py aarch64")
    folder = HERE / f"site-{torch}"
    if not SYSTEM.exists():
        system()
    if not folder.exists():
        site(torch, folder)
    unpack(ours[-1], folder)
    command = ["qemu-aarch64-static", "-L", SYSTEM, SYSTEM / "usr/bin/python3.11", "-P", "-B"]
    variables = {"PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "-m", "pytest", "-p", "no:cacheprovider", *(arguments or TESTS)],
        cwd=ROOT, env=os.environ | variables,
    )  # fmt: skip
    raise SystemExit(done.returncode)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--torch", choices=TORCH, default=TORCH[0])
    known, others = parser.parse_known_args()
    main(known.torch, others)
