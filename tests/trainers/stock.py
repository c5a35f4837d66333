"""Start a trainer as users do: `ray start --head`, then slime's or Relax's own program.

python stock.py FOLDER CPUS PROGRAM...

FOLDER is the trainer's; PROGRAM is what Python runs there, e.g. `train.py --lr 1e-6`. Ray finds the
machine's NPUs itself. The exit status is the program's.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator

RAY = (sys.executable, "-m", "ray.scripts.scripts")
MINUTES = 15


def main(folder: str, cpus: str, *program: str) -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends Ray too
    short = tempfile.TemporaryDirectory(prefix="ray", dir="/tmp")  # names of sockets must be short
    with short as scratch, head(cpus, scratch) as at:
        command = [sys.executable, *program]
        environment = os.environ | {"RAY_ADDRESS": at}
        try:
            done = subprocess.run(command, cwd=folder, env=environment, timeout=60 * MINUTES)
        except subprocess.TimeoutExpired:
            print(f"{program[0]} did not end in {MINUTES} minutes", file=sys.stderr)
            return 124
        return done.returncode


@contextlib.contextmanager
def head(cpus: str, scratch: str) -> Iterator[str]:
    """Run Ray within the block and yield its address; all its processes end with it."""
    address = f"127.0.0.1:{free_port()}"
    ports = {"port": address.rpartition(":")[2], "dashboard-agent-listen-port": str(free_port())}
    command = [*RAY, "start", "--head", "--block", "--num-cpus", cpus, "--temp-dir", scratch]
    command += ["--include-dashboard=false", "--node-ip-address=127.0.0.1"]
    command += [f"--{name}={port}" for name, port in ports.items()]
    ray = subprocess.Popen(command, start_new_session=True, stdout=subprocess.DEVNULL)
    try:
        wait(ray, address)
        yield address
    finally:
        ray.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            ray.wait(30)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(ray.pid, signal.SIGKILL)


def wait(ray: subprocess.Popen, address: str) -> None:
    status = [*RAY, "status", "--address", address]
    for _ in range(120):
        if ray.poll() is not None:
            break
        if not subprocess.run(status, capture_output=True).returncode:
            return
        time.sleep(1)
    raise RuntimeError("ray start --head did not come up")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
