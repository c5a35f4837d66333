"""Compare real fla's functions, with packed sequences split over ranks, with each sequence alone.

python fla_ranks.py STORE RANK RANKS    in as many processes, with gloo; fla-core is on the path

Prints the largest error of the output and of each gradient, relative to the largest value of that
tensor, and the number of npu-ops calls with a cp_group. The sequences alone use fla's naive
functions and torch's conv1d.
"""

from __future__ import annotations

import datetime
import functools
import json
import sys
from unittest import mock

import torch
import torch.distributed as dist
import upstream_fla
from torch.nn import functional

import npu_ops

# Of three ranks each has a part of the fourth sequence; the third sequence has one token.
STARTS = (0, 3, 41, 42, 160, 192)
KEYS, VALUES, HEADS, VALUE_HEADS, CHANNELS, WIDTH = 32, 16, 2, 4, 6, 4
FUNCTIONS = ("chunk_gated_delta_rule", "causal_conv1d")


def tensors(seed: int, **shapes) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return {name: torch.randn(1, STARTS[-1], *shape, generator=draw) for name, shape in
            shapes.items()}  # fmt: skip


def delta() -> dict[str, torch.Tensor]:
    given = tensors(0, q=(HEADS, KEYS), k=(HEADS, KEYS), v=(VALUE_HEADS, VALUES), g=(VALUE_HEADS,),
                    beta=(VALUE_HEADS,))  # fmt: skip
    for name in ("q", "k"):
        given[name] = functional.normalize(given[name], dim=-1)
    return given | {"g": functional.logsigmoid(given["g"]), "beta": given["beta"].sigmoid()}


def each_delta(naive, q, k, **more):
    """Call fla's naive function for each sequence.

    q and k are repeated, because the function lacks grouped value heads.
    """
    groups = VALUE_HEADS // HEADS
    more |= {"q": q.repeat_interleave(groups, 2), "k": k.repeat_interleave(groups, 2)}
    parts = [naive(**{name: x[:, a:b] for name, x in more.items()})[0] for a, b in sequences()]
    return torch.cat(parts, 1)


def sequences() -> list[tuple[int, int]]:
    return list(zip(STARTS, STARTS[1:], strict=False))


def convolution() -> dict[str, torch.Tensor]:
    return tensors(1, x=(CHANNELS,), residual=(CHANNELS,))


def each_convolution(weight, x, residual):
    parts = [
        functional.conv1d(
            functional.pad(x[:, a:b].transpose(1, 2), (WIDTH - 1, 0)), weight[:, None],
            groups=CHANNELS,
        ).transpose(1, 2)
        for a, b in sequences()
    ]  # fmt: skip
    return functional.silu(torch.cat(parts, 1)) + residual


def product() -> dict[str, torch.Tensor]:
    """Return inputs with two steps per token: pairs of rows in k, v and beta."""
    given = tensors(2, q=(HEADS, KEYS), k=(2, HEADS, KEYS), v=(2, HEADS, VALUES), g=(HEADS,),
                    beta=(2, HEADS))  # fmt: skip
    for name in ("q", "k"):
        given[name] = functional.normalize(given[name], dim=-1)
    return given | {"g": functional.logsigmoid(given["g"]), "beta": given["beta"].sigmoid()}


def each_product(naive, **given):
    """Call fla's naive function for each sequence."""
    parts = [naive(**in_rows({name: x[:, a:b] for name, x in given.items()}))[0]
             for a, b in sequences()]  # fmt: skip
    return torch.cat(parts, 1)


def in_rows(given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Flatten the two steps of each token into rows, as fla's product function needs them."""
    return {name: x.flatten(1, 2) if name in ("k", "v", "beta") else x for name, x in given.items()}


def step(function, given: dict[str, torch.Tensor], grad: torch.Tensor) -> dict[str, torch.Tensor]:
    leaves = {name: x.clone().requires_grad_() for name, x in given.items()}
    out = function(**leaves)
    found = torch.autograd.grad(out, tuple(leaves.values()), grad)
    return {"out": out.detach(), **dict(zip(leaves, found, strict=True))}


def errors(theirs, alone, given, own: slice) -> dict[str, float]:
    out = alone(**given)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(9))
    wanted = step(alone, given, grad)
    found = step(theirs, {name: x[:, own] for name, x in given.items()}, grad[:, own])
    return {
        name: ((found[name] - x[:, own]).abs().max() / x.abs().max()).item()
        for name, x in wanted.items()
    }


def main() -> None:
    store, rank, ranks = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks,
        timeout=datetime.timedelta(seconds=120),
    )  # fmt: skip
    upstream_fla.without_triton_driver()
    from fla.modules.conv import causal_conv1d
    from fla.ops.cp import build_cp_context
    from fla.ops.gated_delta_product import chunk_gated_delta_product
    from fla.ops.gated_delta_product.naive import naive_recurrent_gated_delta_product
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    from fla.ops.gated_delta_rule.naive import naive_recurrent_gated_delta_rule

    starts = torch.tensor(STARTS)
    context = build_cp_context(starts, dist.group.WORLD, conv1d_kernel_size=WIDTH)
    weight = torch.randn(CHANNELS, WIDTH, generator=torch.Generator().manual_seed(3))
    naive_product = functools.partial(
        naive_recurrent_gated_delta_product, cu_seqlens=None, num_householder=2, scale=1.0,
        output_final_state=False,
    )  # fmt: skip
    cases = {
        "delta": (
            lambda **given: chunk_gated_delta_rule(**given, cp_context=context)[0],
            functools.partial(each_delta, naive_recurrent_gated_delta_rule), delta(),
        ),
        "convolution": (
            lambda **given: causal_conv1d(
                **given, weight=weight, activation="silu", cp_context=context)[0],
            functools.partial(each_convolution, weight), convolution(),
        ),
        "product": (
            lambda **given: chunk_gated_delta_product(
                **in_rows(given), num_householder=2, scale=1.0, cp_context=context)[0],
            functools.partial(each_product, naive_product), product(),
        ),
    }  # fmt: skip
    each = STARTS[-1] // ranks
    own = slice(rank * each, (rank + 1) * each)
    found = {}
    for name, case in cases.items():
        with mock.patch.multiple(
            npu_ops, **{of: mock.Mock(wraps=getattr(npu_ops, of)) for of in FUNCTIONS}
        ):
            found[name] = errors(*case, own)
            calls = [getattr(npu_ops, of).call_args_list for of in FUNCTIONS]
        shared = [call for of in calls for call in of if call.kwargs["cp_group"] is not None]
        found[name]["calls"] = len(shared)
    print(json.dumps(found))
    dist.barrier()


if __name__ == "__main__":
    main()
