"""A process that judges cases. If a case kills it, the case is reported and the fuzzer goes on."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import queue
import signal
import subprocess
import sys
import threading

TESTS = pathlib.Path(__file__).parents[1]
LONGEST = 120.0  # seconds per case; torch.compile takes a few
PATIENCE = 10  # times LONGEST, if the machine is busy and the process got little CPU time


class Child:
    """Judges cases one by one in a child process, which it restarts after a crash."""

    def __init__(self):
        self.process = None

    def judge(self, case: dict) -> str | None:
        """Return None, or what is wrong, also if the child dies or hangs."""
        if self.process is None:
            self._start()
        self.process.stdin.write(json.dumps(case) + "\n")
        self.process.stdin.flush()
        try:
            answer = self._answer()
        except queue.Empty:
            self.stop()
            return f"no answer in {LONGEST:.0f} s"
        if answer is not None:
            return json.loads(answer)
        status = self.process.wait()
        self.process = None
        return f"the process died: {_death(status)}"

    def _answer(self) -> str | None:
        """Return the child's next line, or None if it died.

        Raises:
            queue.Empty: it takes too long.
        """
        before = _seconds(self.process.pid)
        for _ in range(PATIENCE):
            with contextlib.suppress(queue.Empty):
                return self.answers.get(timeout=LONGEST)
            if _seconds(self.process.pid) - before > LONGEST / 2:
                break
        raise queue.Empty

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def _start(self) -> None:
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(TESTS)}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "fuzz.child"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, text=True, env=environment,
        )  # fmt: skip
        self.answers = queue.SimpleQueue()
        threading.Thread(
            target=_read, args=(self.process.stdout, self.answers), daemon=True
        ).start()


def _read(stream, answers) -> None:
    for line in stream:
        answers.put(line)
    answers.put(None)


def _seconds(pid: int) -> float:
    """Return the CPU seconds that a process has used."""
    fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _death(status: int) -> str:
    return signal.Signals(-status).name if status < 0 else f"exit status {status}"


def main() -> None:
    """Read one case per line as JSON, and write a verdict for each."""
    answers, sys.stdout = sys.stdout, sys.stderr  # keep other output apart from verdicts
    from fuzz.judge import judge

    for line in sys.stdin:
        try:
            verdict = judge(json.loads(line))
        except Exception as error:  # a fault of the fuzzer itself
            verdict = f"the fuzzer: {type(error).__name__}: {error}"
        print(json.dumps(verdict), file=answers, flush=True)


if __name__ == "__main__":
    main()
