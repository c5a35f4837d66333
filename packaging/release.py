"""Print what is missing for a release, or else the files to upload and the tag to set.

    make release        # builds dist/ and site/, checks them, and calls this

It uploads and tags nothing. The exit status is 1 if something is missing.
"""

import datetime
import pathlib
import re
import subprocess
import sys

import wheels

ROOT = pathlib.Path(__file__).parents[1]
KINDS = ("*-manylinux_*_x86_64.whl", "*-manylinux_*_aarch64.whl", "*-none-any.whl", "*.tar.gz")


def missing(root, today):
    """Yield the reasons why `root` cannot be released, one sentence each."""
    version = wheels.version(root)
    dated = re.search(
        rf"^## \[{re.escape(version)}\] - (\S+)$", (root / "CHANGELOG.md").read_text(), re.M
    )
    if not dated:
        yield f"CHANGELOG.md: no section '## [{version}] - DATE'"
    elif dated[1] != today:
        yield f"CHANGELOG.md: {version} is dated {dated[1]}, today is {today}"
    if git(root, "status", "--porcelain"):
        yield "git: there are changes that are not committed"
    if git(root, "tag", "--list", f"v{version}"):
        yield f"git: there is a tag v{version} already; raise the version in npu_ops/version.py"
    for kind in KINDS:
        if len(list(root.glob(f"dist/npu_ops-{version}{kind}"))) != 1:
            yield f"dist: needs one npu_ops-{version}{kind}"
    for other in root.glob("dist/*"):
        if not other.name.startswith(f"npu_ops-{version}"):
            yield f"dist: {other.name} is not of {version}"
    if not (root / "site/index.html").exists():
        yield "site: not built"


def git(root, *arguments):
    return subprocess.run(
        ["git", "-C", str(root), *arguments], capture_output=True, text=True, check=True
    ).stdout.strip()


def main():
    found = list(missing(ROOT, datetime.date.today().isoformat()))
    if found:
        raise SystemExit("not to be released yet:\n  " + "\n  ".join(found))
    version = wheels.version(ROOT)
    print(f"npu-ops {version}. After CI has passed for {git(ROOT, 'rev-parse', 'HEAD')}:")
    print("  upload  twine upload \\")
    print(" \\\n".join(f"            dist/{path.name}" for path in sorted(ROOT.glob("dist/*"))))
    print(f"  tag     git tag --annotate v{version} --message 'npu-ops {version}'")
    print(f"          git push origin v{version}")
    print("  site    the folder site/, to where the documentation is read")
    if not wheels.web_address():
        print("The metadata has no URLs: git has no remote 'origin' with a web page.")


if __name__ == "__main__":
    sys.exit(main())
