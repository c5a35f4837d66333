"""Time the same calls in two checkouts alternately, each with the environment in its .venv.

    python benchmarks/between_commits.py BEFORE AFTER [--calls packed] [--rounds 100] > ratios.csv

BEFORE, AFTER: roots of checkouts. Each has a process, and the two time the same call alternately.
So other load on the machine affects both. Each ratio compares the times of one round.

--calls chooses the calls:
    packed: calls that read the contents of lengths and angles.
    small, one: ops of a layer with 16 tokens, and with one, where Python takes most of the time.
    fp16, long: ops of a layer with 256 tokens in fp16, and with 1024 tokens in bf16.
    decode: attention of one token in each of 8 sequences, with a paged KV cache.
    recurrent: the gated delta rule, token by token.
    dropout: bias_dropout_add with dropout.
    prompts: attention of short prompts and of packed images.
    gates: gdn_gate on slices of a projection.
"""

import argparse
import csv
import functools
import itertools
import os
import statistics
import subprocess
import sys
import time

import torch

LENGTHS = {64: [16] * 4, 512: [128] * 4}


def _normal(dtype):
    """Return a function that draws normal tensors, of `dtype` by default."""
    draw = torch.Generator().manual_seed(0)

    def normal(*shape, dtype=dtype):
        return torch.randn(shape, generator=draw).to(dtype)

    return normal


def packed():
    """Return calls that read lengths or angles; npu-ops caches what it computes from these."""
    import npu_ops

    normal, calls = _normal(torch.bfloat16), {}
    for tokens, lengths in LENGTHS.items():
        starts = torch.nn.functional.pad(torch.tensor(lengths).cumsum(0), (1, 0))
        packed = {"layout": "TND", "cu_seqlens": starts}
        q, k, freqs = normal(tokens, 16, 128), normal(tokens, 8, 128), normal(tokens, 1, 1, 128)
        tables = normal(tokens, 128, dtype=torch.float32), normal(tokens, 128, dtype=torch.float32)
        rule = [normal(1, tokens, n, 64) for n in (4, 4, 8)]
        gates = [normal(1, tokens, 8, dtype=torch.float32).sigmoid() for _ in range(2)]
        calls |= {
            ("apply_rotary_pos_emb", "packed", tokens): (
                npu_ops.apply_rotary_pos_emb, (q, k, *tables), packed,
            ),
            ("apply_rotary_pos_emb_freqs", "packed", tokens): (
                npu_ops.apply_rotary_pos_emb_freqs, (q, k, freqs.float()),
                packed | {"max_seqlen": tokens},
            ),
            ("apply_rotary_pos_emb_freqs", "dense", tokens): (
                npu_ops.apply_rotary_pos_emb_freqs, (q[:, None], k[:, None], freqs.float()), {},
            ),
            ("attention", "packed", tokens): (
                npu_ops.attention, (q[:, :8], k[:, :4], k[:, :4]),
                {"layout": "TND", "cu_seqlens_q": starts, "is_causal": True},
            ),
            ("chunk_gated_delta_rule", "packed", tokens): (
                npu_ops.chunk_gated_delta_rule, (*rule, -gates[0], gates[1]),
                {"cu_seqlens": starts},
            ),
        }  # fmt: skip
    return list(calls.items())


def layer(n, dtype):
    """Return calls, forward and with backward, of n tokens, shaped as Qwen3-Next on 4 ranks."""
    import npu_ops

    normal = _normal(dtype)
    heads, x, gates, model = normal(n, 4, 128), normal(n, 8, 128), normal(n, 8), normal(n, 2048)
    weight, head = torch.ones(128, dtype=dtype), torch.ones(8)
    tables = {"cos": normal(1, n, 128), "sin": normal(1, n, 128), "layout": "BSND"}
    calls = {
        "l2norm": ((heads,), {}),
        "rms_norm_gated": ((x, weight, x.clone()), {}),
        "gdn_gate": ((gates, head, head.clone(), gates.clone()), {}),
        "bias_dropout_add": (
            (model,),
            {"bias": None, "residual": model.clone(), "p": 0.0, "training": True},
        ),
        "apply_rotary_pos_emb": ((x[None], heads[None]), tables),
        "attention": ((x[None], heads[None], heads[None].clone()), {}),
    }
    made = {}
    for name, (args, kwargs) in calls.items():
        function = getattr(npu_ops, name)
        made[name, "forward", n] = function, args, kwargs
        made[name, "forward+backward", n] = _training(function, args, kwargs), (), {}
    return list(made.items())


def decode():
    """Return decode calls of attention: 8 sequences with 512 keys each in a paged KV cache.

    The shapes are those of Qwen3-VL-8B on one rank and on 4, and of Qwen3.5-9B on one.
    """
    import npu_ops

    draw = torch.Generator().manual_seed(0)
    table = torch.arange(32, dtype=torch.int32).view(8, 4)
    lengths = torch.full((8,), 512, dtype=torch.int32)
    calls = {}
    for heads, kv_heads, dim in ((32, 8, 128), (8, 2, 128), (16, 2, 256)):
        q = torch.randn(8, 1, heads, dim, generator=draw).bfloat16()
        k, v = (torch.randn(32, 128, kv_heads, dim, generator=draw).bfloat16() for _ in range(2))
        named = {"block_table": table, "seqlens_k": lengths, "is_causal": True}
        calls["attention", f"decoding, {heads} heads on {kv_heads}", 512] = (
            npu_ops.attention, (q, k, v), named,
        )  # fmt: skip
    return list(calls.items())


def recurrent():
    """Return calls of the gated delta rule token by token, and of a decode step of 8 sequences.

    The shapes are those of Qwen3-Next on 4 ranks.
    """
    import npu_ops

    normal = _normal(torch.float32)

    def rule(*tensors):
        q, k, v, g, beta, state = tensors
        o, _ = npu_ops.fused_recurrent_gated_delta_rule(
            q, k, v, g=g, beta=beta, initial_state=state, use_qk_l2norm_in_kernel=True
        )
        return o

    calls = {}
    for tokens in (1, 64):
        heads = [normal(1, tokens, n, 128, dtype=torch.bfloat16) for n in (4, 4, 8)]
        gates = [normal(1, tokens, 8).sigmoid() for _ in range(2)]
        given = (*heads, -gates[0], gates[1], normal(1, 8, 128, 128))
        name = "fused_recurrent_gated_delta_rule"
        calls[name, "forward", tokens] = rule, given, {}
        calls[name, "forward+backward", tokens] = _training(rule, given, {}), (), {}
    qkv = [normal(8, n, 128, dtype=torch.bfloat16) for n in (4, 4, 8)]
    gates = [normal(8, 8, dtype=torch.bfloat16) for _ in range(2)] + [normal(8), normal(8)]
    for first in (False, True):
        calls["gated_delta_rule_update", f"state_v_first={first}", 8] = (
            npu_ops.gated_delta_rule_update,
            (qkv, *gates, normal(8, 8, 128, 128), torch.arange(8, dtype=torch.int32)),
            {"state_v_first": first},
        )
    return list(calls.items())


def dropout():
    """Return calls of bias_dropout_add with a bias and p = 0.1, on rows of Qwen3-VL-8B."""
    import npu_ops

    calls = {}
    for tokens, dtype in itertools.product((1, 16, 128, 1024), (torch.bfloat16, torch.float16)):
        normal = _normal(dtype)
        args, named = (normal(tokens, 4096), normal(4096), normal(tokens, 4096)), {"p": 0.1}
        named["training"] = True
        name = str(dtype).removeprefix("torch.")
        both = _training(npu_ops.bias_dropout_add, args, named)
        one = npu_ops.bias_dropout_add, args, named
        calls["bias_dropout_add", "forward", tokens, name] = one
        calls["bias_dropout_add", "forward+backward", tokens, name] = both, (), {}
    return list(calls.items())


def gates():
    """Return calls of gdn_gate on slices of a projection, of Qwen3-Next on 1, 4 and 8 ranks."""
    import npu_ops

    normal, calls = _normal(torch.bfloat16), {}
    for heads in (32, 8, 4):
        b, a = normal(1, 1024, 2 * heads).split(heads, -1)
        args = a, torch.ones(heads), torch.ones(heads), b
        calls["gdn_gate", f"{heads} heads, forward", 1024] = npu_ops.gdn_gate, args, {}
        both = _training(npu_ops.gdn_gate, args, {})
        calls["gdn_gate", f"{heads} heads, forward+backward", 1024] = both, (), {}
    return list(calls.items())


def prompts():
    """Return calls of attention for causal prompts and for 8 images.

    The prompts are of Qwen3-VL-8B and Qwen3.5-9B on 8 ranks.
    """
    import npu_ops

    normal, calls = _normal(torch.bfloat16), {}
    for heads, kv_heads, dim in ((4, 1, 128), (2, 1, 256)):
        for tokens in (2, 16, 64, 512):
            args = [normal(1, tokens, n, dim) for n in (heads, kv_heads, kv_heads)]
            both = _training(npu_ops.attention, args, {"is_causal": True})
            case = f"prompt, {heads} heads on {kv_heads}"
            calls["attention", f"{case}, forward", tokens] = (
                npu_ops.attention, args, {"is_causal": True},
            )  # fmt: skip
            calls["attention", f"{case}, forward+backward", tokens] = both, (), {}
    for tokens in (128, 1024):
        starts = torch.arange(0, tokens + 1, tokens // 8)
        args, named = [normal(tokens, 2, 72) for _ in range(3)], {"layout": "TND"}
        named |= {"cu_seqlens_q": starts, "cu_seqlens_cpu": starts}
        both = _training(npu_ops.attention, args, named)
        calls["attention", "8 images, forward", tokens] = npu_ops.attention, args, named
        calls["attention", "8 images, forward+backward", tokens] = both, (), {}
    return list(calls.items())


def _training(function, args, kwargs):
    """Return a training step of a function: its outputs, and the gradients of all `args`."""
    leaves = [x.detach().requires_grad_() for x in args]

    def step():
        with torch.enable_grad():
            outputs = function(*leaves, **kwargs)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        torch.autograd.grad(outputs, leaves, [x.detach() for x in outputs])

    return step


CALLS = {
    "packed": packed,
    "small": functools.partial(layer, 16, torch.bfloat16),
    "one": functools.partial(layer, 1, torch.bfloat16),
    "fp16": functools.partial(layer, 256, torch.float16),
    "decode": decode,
    "recurrent": recurrent,
    "dropout": dropout,
    "prompts": prompts,
    "gates": gates,
    "long": functools.partial(layer, 1024, torch.bfloat16),
}


def work(calls: str) -> None:
    """For each line "row count" of stdin, print the lower quartile of `count` times, in seconds."""
    torch.set_num_threads(1)
    calls = [call for _, call in CALLS[calls]()]
    print(len(calls), flush=True)
    with torch.no_grad():
        for line in sys.stdin:
            row, count = map(int, line.split())
            function, args, kwargs = calls[row]
            times = []
            for _ in range(count):
                begin = time.perf_counter()
                function(*args, **kwargs)
                times.append(time.perf_counter() - begin)
            print(sorted(times)[count // 4], flush=True)


class Checkout:
    def __init__(self, root: str, calls: str):
        self.root = root
        python = os.path.join(root, ".venv", "bin", "python")
        alone = os.environ | {"OMP_NUM_THREADS": "1"}
        command = [python, os.path.abspath(__file__), "--work", "--calls", calls]
        self.process = subprocess.Popen(
            command, cwd=root, text=True, env=alone, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        self.process.stdout.readline()

    def ask(self, row: int, count: int) -> float:
        self.process.stdin.write(f"{row} {count}\n")
        self.process.stdin.flush()
        return float(self.process.stdout.readline())

    @property
    def commit(self) -> str:
        command = ["git", "-C", self.root, "rev-parse", "--short", "HEAD"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("before", nargs="?")
    parser.add_argument("after", nargs="?")
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--calls", choices=CALLS, default="packed")
    parser.add_argument("--work", action="store_true")
    given = parser.parse_args()
    if given.work:
        return work(given.calls)
    sides = Checkout(given.before, given.calls), Checkout(given.after, given.calls)
    names = [name for name, _ in CALLS[given.calls]()]
    counts = [max(3, min(40, int(0.02 / sides[1].ask(row, 5)))) for row in range(len(names))]
    times = [([], []) for _ in names]
    for turn in range(given.rounds):
        for row, count in enumerate(counts):
            for side in (0, 1) if turn % 2 else (1, 0):
                times[row][side].append(sides[side].ask(row, count))
    out = csv.writer(sys.stdout, lineterminator="\n")
    out.writerow(
        "op,case,tokens,dtype,before_us,after_us,ratio_of_least,ratio_p50,ratio_p10,ratio_p90,"
        "rounds,device,threads,torch,before,after,repro".split(",")
    )
    usual = "float16" if given.calls == "fp16" else "bfloat16"
    for (op, case, tokens, *dtype), (before, after) in zip(names, times, strict=True):
        ratios = statistics.quantiles([b / a for a, b in zip(before, after, strict=True)], n=10)
        out.writerow([
            op, case, tokens, *(dtype or [usual]),
            *(f"{statistics.median(t) * 1e6:.1f}" for t in (before, after)),
            *(f"{x:.3f}" for x in (min(after) / min(before), ratios[4], ratios[0], ratios[8])),
            given.rounds, "cpu", 1, torch.__version__, sides[0].commit, sides[1].commit,
            f"python benchmarks/between_commits.py BEFORE AFTER --calls {given.calls}",
        ])  # fmt: skip


if __name__ == "__main__":
    main()
