"""Run the aarch64 wheel's kernels under qemu-user, against the reference.

    python packaging/wheels.py aarch64
    dpkg --add-architecture arm64 && apt-get update && apt-get install qemu-user-static
    python packaging/aarch64.py [pytest's arguments]

Python and the C libraries come from Debian's packages, torch 2.10 (the oldest that the library is
for, and a build for CPUs) and the rest from pip. All of it lies in .cache/aarch64. By default every
op's cases run in bf16, forward and backward.
"""

import os
import pathlib
import subprocess
import sys
import zipfile

ROOT = pathlib.Path(__file__).parents[1]
HERE = ROOT / ".cache" / "aarch64"
SYSTEM, SITE = HERE / "system", HERE / "site"
DEBIAN = (
    "python3.11-minimal", "libpython3.11-minimal", "libpython3.11-stdlib", "libc6", "libstdc++6",
    "libgcc-s1", "zlib1g", "libexpat1", "libssl3", "libffi8", "libbz2-1.0", "liblzma5",
    "libsqlite3-0", "libuuid1", "libcrypt1", "libgomp1",
)  # fmt: skip
PYTHON = (
    "torch==2.10.0", "numpy<2.4", "typing_extensions", "sympy", "mpmath", "networkx", "jinja2",
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
    """Debian's packages of aarch64, unpacked."""
    packages = HERE / "debian"
    packages.mkdir(parents=True)
    names = [f"{name}:arm64" for name in DEBIAN]
    subprocess.run(["apt-get", "download", *names], cwd=packages, check=True)
    for package in packages.glob("*.deb"):
        subprocess.run(["dpkg", "-x", package, SYSTEM], check=True)


def site():
    """Wheels of aarch64, and of any architecture, unpacked."""
    wheels = HERE / "wheels"
    platforms = ("manylinux_2_28_aarch64", "manylinux2014_aarch64")
    subprocess.run(
        [
            sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--python-version",
            "3.11", "--only-binary=:all:", *(f"--platform={p}" for p in platforms), "--dest",
            str(wheels), *PYTHON,
        ],
        check=True,
    )  # fmt: skip
    for wheel in wheels.glob("*.whl"):
        unpack(wheel)


def unpack(wheel):
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(SITE)


def main(arguments):
    ours = sorted(ROOT.glob("dist/npu_ops-*_aarch64.whl"))
    if not ours:
        raise SystemExit("aarch64: dist has no wheel; run python packaging/wheels.py aarch64")
    if not SYSTEM.exists():
        system()
    if not SITE.exists():
        site()
    unpack(ours[-1])
    command = ["qemu-aarch64-static", "-L", SYSTEM, SYSTEM / "usr/bin/python3.11", "-P", "-B"]
    variables = {"PYTHONPATH": str(SITE), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "-m", "pytest", "-p", "no:cacheprovider", *(arguments or TESTS)],
        cwd=ROOT, env=os.environ | variables,
    )  # fmt: skip
    raise SystemExit(done.returncode)


if __name__ == "__main__":
    main(sys.argv[1:])
