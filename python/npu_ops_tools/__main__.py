"""The command `npu-ops`; `python -m npu_ops_tools` is the same."""

import os
import subprocess
import sys

AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"


def main() -> None:
    try:
        import torch  # noqa: F401
    except RuntimeError as error:  # torch_npu without CANN, or with a mismatched one
        if AUTOLOAD not in str(error):
            raise
        _without_backends(error.__cause__ or error)
    from npu_ops_tools import cli

    cli.main()


def _without_backends(reason: BaseException) -> None:
    """Print why torch cannot be imported. `doctor` runs anyway, without torch's backends."""
    print(f"npu-ops: `import torch` fails here: {reason}", file=sys.stderr)
    if sys.argv[1:2] != ["doctor"]:
        raise SystemExit("npu-ops: `npu-ops doctor` says what to do")
    command = [sys.executable, "-m", "npu_ops_tools", *sys.argv[1:]]
    raise SystemExit(subprocess.run(command, env=os.environ | {AUTOLOAD: "0"}).returncode or 1)


if __name__ == "__main__":
    main()
