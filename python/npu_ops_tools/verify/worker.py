"""Starts the process that runs checks (child.py), and handles its hangs and crashes."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time

from npu_ops_tools.verify.jobs import Job, torch_device

STARTS_WITHIN = 300.0  # seconds to load torch and a driver, and create a context on the device


class NoWorker(RuntimeError):
    """The process that runs checks does not start; the message says why."""


class Worker:
    """Runs jobs one after another in another process, and restarts it if needed."""

    def __init__(self, device: str, modules: list[str], variables: dict[str, str]):
        self._command = [sys.executable, "-m", "npu_ops_tools.verify.child", device, *modules]
        self._variables = variables
        self._process = None
        self.environment: dict = {}

    def start(self) -> None:
        """Start the process.

        Raises:
            NoWorker: it does not become ready.
        """
        self._said = tempfile.TemporaryFile("w+", errors="replace")
        self._process = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._said,
            text=True, env=os.environ | self._variables, start_new_session=True,
        )  # fmt: skip
        self._answers = queue.SimpleQueue()
        arguments = (self._process.stdout, self._answers)
        threading.Thread(target=_read, args=arguments, daemon=True).start()
        try:
            answer = self._answers.get(timeout=STARTS_WITHIN)
        except queue.Empty:
            answer = None
        if answer is None:
            said = self._last_words()
            self.stop()
            raise NoWorker(f"the worker process does not start: {said}")
        self.environment = json.loads(answer)["ready"]

    def do(self, job: Job, limit: float) -> dict:
        """Return a job's result. A process that takes longer than `limit` seconds is killed."""
        if self._process is None:
            self.start()
        start, at = time.monotonic(), "its start"
        try:
            self._process.stdin.write(json.dumps(dataclasses.asdict(job)) + "\n")
            self._process.stdin.flush()
            while True:
                answer = self._answers.get(timeout=max(0.0, start + limit - time.monotonic()))
                if answer is None:
                    return self._died(at, time.monotonic() - start)
                said = json.loads(answer)
                if "done" in said:
                    return said["done"]
                at = said["at"]
        except queue.Empty:
            self.stop()
            return _wrong("hung", f"no answer in {limit:.0f} s, during {at}", limit)
        except BrokenPipeError:
            return self._died(at, time.monotonic() - start)

    def _died(self, at: str, seconds: float) -> dict:
        status, words = self._process.wait(), self._last_words()
        self.stop()
        how = signal.Signals(-status).name if status < 0 else f"exit status {status}"
        return _wrong("crashed", f"the process died of {how} during {at}: {words}", seconds)

    def _last_words(self) -> str:
        self._said.seek(0)
        lines = [line.strip() for line in self._said.read().splitlines() if line.strip()]
        return " / ".join(lines[-3:]) or "no output"

    def stop(self) -> None:
        """End the process and its children."""
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):  # a driver may keep it alive
            self._process.wait(timeout=10)
        self._process.stdin.close()
        self._said.close()
        self._process = None


def _wrong(what: str, why: str, seconds: float) -> dict:
    return {"verdict": "wrong", "why": f"{what}: {why}", "ended": what, "seconds": seconds}


def _read(stream, answers) -> None:
    """Read answers; skip lines that torch_npu prints during import."""
    for line in stream:
        if line.startswith("{"):
            answers.put(line)
    answers.put(None)


def variables_of(device: str) -> dict[str, str]:
    """Return the extra environment variables of a process for `device`.

    Raises:
        EmulatorError: the emulated NPU cannot be built here.
    """
    if device != "npu-emulated":
        return {}
    import npu_ops_emulator

    return npu_ops_emulator.environment(npu_ops_emulator.Settings(devices=2))


def label(device: str) -> str:
    """Return the device's name in reports: "npu-emulated" for an emulated NPU."""
    emulated = os.environ.get("NPU_OPS_EMULATOR") == "1" and torch_device(device) == "npu"
    return "npu-emulated" if emulated else device
