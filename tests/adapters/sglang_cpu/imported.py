"""Check the import hook on SGLang 0.5.9, which has no plugins; print [check, error] as JSON.

python -m sglang_cpu.imported        with that version first on PYTHONPATH

Only modules that need no GPU package are imported.
"""

import importlib
import json
import types

import torch
from outcomes import error_of

from sglang_cpu.checks import calls_of, close, rows, states

ROPE = "sglang.srt.layers.rotary_embedding"
CACHE = "sglang.srt.layers.attention.torch_native_backend"
WAITING = "module not imported yet"


def what_is_imported_is_patched():
    assert importlib.import_module("sglang.version").__version__ == "0.5.9"
    found = states()
    applied = {target for (target, _), state in found.items() if state == "applied"}
    assert {target.partition(":")[0] for target in applied} == {ROPE, CACHE}, found
    assert len(applied) == 7 and set(found.values()) == {"applied", WAITING}, found


def rotated(module, positions):
    q, k = rows(9, 4 * 64), rows(9, 64)
    with calls_of("rope", "mrope") as counted:
        ours = module.forward_native(positions, q, k)
    own = type(module).forward_native.__wrapped__(module, positions, q, k)
    for x, y in zip(ours, own, strict=True):
        close(x, y)
    return counted


def rotary_embeddings_are_ours():
    home = importlib.import_module(ROPE)
    home._is_cpu = True  # otherwise the embedding needs another package's kernel
    home.get_global_server_args = lambda: types.SimpleNamespace(rl_on_policy_target=None)
    text = home.RotaryEmbedding(64, 64, 512, 10000, True, torch.float32)
    assert rotated(text, torch.arange(9)) == ["rope"]
    for interleaved in (True, False):
        images = home.MRotaryEmbedding(
            64, 64, 512, 10000, True, torch.float32, mrope_section=[12, 10, 10],
            mrope_interleaved=interleaved,
        )  # fmt: skip
        torch.manual_seed(0)
        assert rotated(images, torch.randint(512, (3, 9))) == ["mrope"]


def revert_puts_it_back():
    import npu_ops_adapters

    home = importlib.import_module(ROPE).RotaryEmbedding
    original = home.forward_npu.__wrapped__
    undone = states(npu_ops_adapters.revert())
    assert set(undone.values()) == {"reverted"} and len(undone) == 7, undone
    assert vars(home)["forward_npu"] is original


if __name__ == "__main__":
    for module in (ROPE, CACHE):
        importlib.import_module(module)
    for check in (what_is_imported_is_patched, rotary_embeddings_are_ours, revert_puts_it_back):
        print(json.dumps([check.__name__, error_of(check)]), flush=True)
