"""Every example in a help text does what the text says."""

import json
import re
import shlex
import textwrap

import pytest
import typer
from npu_ops_tools.cli import app
from typer.testing import CliRunner

from npu_ops.core import preferences

VERBS = typer.main.get_command(app).commands
MINE = """
    import triton
    import triton.language as tl


    @triton.jit
    def add(x, n, N: tl.constexpr):
        at = tl.program_id(0) * N + tl.arange(0, N)
        tl.store(x + at, tl.load(x + at, mask=at < n) + 1, mask=at < n)


    @triton.autotune([triton.Config({"N": 256}), triton.Config({"N": 512})], key=["n"])
    @triton.jit
    def tuned(x, n, N: tl.constexpr):
        at = (tl.program_id(0) + tl.program_id(2)) * N + tl.arange(0, N)
        tl.store(x + at, tl.load(x + at, mask=at < n) + 1, mask=at < n)
"""
REPORT = {"format": 1, "environment": {"npu_ops": "1"}, "results": []}
# Error messages of the examples that cannot run here. They need an NPU, an NPU's report (see
# tests/model/test_calibration.py) or a model folder (see tests/emulator/test_launches.py).
DECLINED = {
    "npu-ops launches path/to/Qwen3.5-9B": "needs a folder with a config.json",
    "npu-ops verify": "device: got npu, which is not here",
    "npu-ops tune": "device: got npu, which is not here",
    "npu-ops model --calibrate full/verify.json": "needs npu-ops verify --full on an NPU",
}


def examples(verb):
    lines = (line.strip().partition("  #")[0].rstrip() for line in VERBS[verb].help.splitlines())
    return [line for line in lines if line.startswith("npu-ops ")]


@pytest.mark.parametrize("verb", [verb for verb in VERBS if examples(verb)])
def test_examples_run(verb, tmp_path, monkeypatch):
    """Run a command's examples one after another in one folder, as a user would."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "kept"))
    monkeypatch.setattr(preferences, "cache", lambda: tmp_path / "kept" / "npu_ops" / "preferences")
    (tmp_path / "mine.py").write_text(textwrap.dedent(MINE))
    for folder in ("before", "after", "full"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "verify.json").write_text(json.dumps(REPORT))
    for example in examples(verb):
        done = CliRunner().invoke(app, shlex.split(example)[1:], catch_exceptions=False)
        sentence = DECLINED.get(example)
        assert done.exit_code == (2 if sentence else 0), f"{example}: {done.output}"
        assert (sentence or "") in done.output and len(done.output) > 10, example
    preferences.forget()


def test_help_texts_have_examples():
    having = {verb for verb in VERBS if examples(verb)}
    assert {"explain", "compile", "model", "tune", "verify"} <= having
    assert set(DECLINED) <= {example for verb in having for example in examples(verb)}


@pytest.mark.parametrize("verb", VERBS)
def test_what_an_option_quotes_is_in_an_example(verb):
    """Text in quotes appears in a tested example; outside of quotes there is no NAME=VALUE."""
    shown = " ".join(examples(verb))
    for option in VERBS[verb].params:
        for quoted in re.findall(r'"([^"]+)"', option.help or ""):
            assert f'"{quoted}"' in shown, f"{option.name}: {quoted}"
        assert not re.findall(r"\b[a-z_]+=\w+", re.sub(r'"[^"]+"', "", option.help or ""))
