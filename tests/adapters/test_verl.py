"""verl's own Ulysses on two ranks: what looks from one token to another sees all of them."""

import json
import subprocess
import sys

import fetch_verl
import npu_ops_adapters
from npu_ops_tools import verl_patches
from processes import HERE, environment


def test_two_ranks_equal_one(tmp_path):
    path = environment(HERE, *fetch_verl.path(), OMP_NUM_THREADS="1")
    command = [sys.executable, str(HERE / "verl_ranks.py"), str(tmp_path / "store")]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    ranks = [subprocess.Popen([*command, str(rank)], env=path, **pipes) for rank in range(2)]
    for done in ranks:
        out, err = done.communicate(timeout=500)
        assert done.returncode == 0, err[-3000:]
        report = json.loads(out.splitlines()[-1])
        for name, errors in report["errors"].items():
            assert len(errors) in (2, 4, 11) and max(errors.values()) < 2e-5, (name, errors)
        refused = report["refused"]
        assert all("verl's Ulysses" in sentence for sentence in refused.values()), refused
        assert refused["no text positions"].startswith("position_ids: got None in a causal layer")
        assert refused["positions of three axes"].startswith("position_ids: got shape [3, 1, 16]")


def test_what_its_npu_patches_set_over_ours():
    """The counts at the top of docs/replacing-patches.md."""
    text = (fetch_verl.path()[0] / "verl" / verl_patches.FILE).read_text()
    ours = {patch.target for patch in npu_ops_adapters.patches()}
    found = set(verl_patches.targets(text))
    lost = sorted(target.rpartition(".")[2] for target in found & ours)
    assert [name.endswith("apply_rotary_pos_emb") for name in lost].count(True) == 7
    assert len(found) == 27 + 1 and len(lost) == 10, lost  # a norm has two names, by version
