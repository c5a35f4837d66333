"""Compare real fla with npu-ops active against its own naive functions on the CPU. Prints JSON.

python tests/adapters/fla_process.py FOLDER, where fla-core is installed
"""

from __future__ import annotations

import functools
import json
import pathlib
import sys

import counting
import torch
import upstream_fla


def inputs() -> dict[str, torch.Tensor]:
    """Return two sequences longer than a chunk, with states and two value heads per key head."""
    draw = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 2, 70, 2, 32, generator=draw)
    q, k = (torch.nn.functional.normalize(x, dim=-1) for x in (q, k))
    v = torch.randn(2, 70, 4, 16, generator=draw)
    g, beta = -torch.rand(2, 70, 4, generator=draw), torch.rand(2, 70, 4, generator=draw)
    state = torch.randn(2, 4, 32, 16, generator=draw)
    return dict(q=q, k=k, v=v, g=g, beta=beta, initial_state=state)


def evaluate(function, given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the output, the final state and the gradient of each input."""
    leaves = {name: x.clone().requires_grad_() for name, x in given.items()}
    o, state = function(**leaves, output_final_state=True)
    loss = o.sin().sum() + state.cos().sum()
    gradients = torch.autograd.grad(loss, tuple(leaves.values()))
    return {"o": o, "state": state} | {
        f"d{name}": x for name, x in zip(leaves, gradients, strict=True)
    }


def with_a_query_for_each_value_head(naive):
    """Wrap a naive fla function, which lacks grouped value heads: repeat q and k."""

    def call(q, k, **more):
        return naive(q.repeat_interleave(2, dim=2), k.repeat_interleave(2, dim=2), **more)

    return call


def product(errors: dict[str, float]) -> None:
    """Compare Gated Delta Product with two steps per token, dense and packed, with
    fla's naive one."""
    from fla.ops import gated_delta_product as theirs
    from fla.ops.gated_delta_product import naive

    draw = torch.Generator().manual_seed(1)
    q, k = torch.randn(2, 20, 2, 16, generator=draw), torch.randn(2, 40, 2, 16, generator=draw)
    given = {
        "q": torch.nn.functional.normalize(q, dim=-1),
        "k": torch.nn.functional.normalize(k, dim=-1),
        "v": torch.randn(2, 40, 2, 8, generator=draw),
        "g": -torch.rand(2, 20, 2, generator=draw),
        "beta": torch.rand(2, 40, 2, generator=draw),
        "initial_state": torch.randn(2, 2, 16, 8, generator=draw),
    }
    more = {"num_householder": 2, "scale": 1.0}  # fla 0.5.2's naive function ignores the scale

    def packed(initial_state, output_final_state, **tensors):
        one = {name: x.flatten(0, 1)[None] for name, x in tensors.items()}
        states = {"initial_state": initial_state, "output_final_state": output_final_state}
        starts = torch.tensor([0, 20, 40])
        return theirs.chunk_gated_delta_product(**one, **states, cu_seqlens=starts, **more)

    naive = functools.partial(naive.naive_recurrent_gated_delta_product, cu_seqlens=None, **more)
    dense = functools.partial(theirs.chunk_gated_delta_product, **more)
    expected = evaluate(naive, given)
    for form, function in (("dense", dense), ("packed", packed)):
        actual = evaluate(function, given)
        for of, x in expected.items():
            errors[f"product {form} {of}"] = error(actual[of].flatten(), x.flatten())


def kimi(errors: dict[str, float]) -> None:
    """Compare Kimi Delta Attention, chunked and token by token, with fla's naive function."""
    from fla.ops import kda as theirs
    from fla.ops.kda import naive

    given = inputs()
    keys = torch.rand(given["q"].shape[-1], generator=torch.Generator().manual_seed(2))
    given["g"] = given["g"][..., None] * keys
    expected = evaluate(naive.naive_recurrent_kda, given)
    for form in ("chunk", "fused_recurrent"):
        actual = evaluate(getattr(theirs, f"{form}_kda"), given)
        errors |= {f"kda {form} {of}": error(actual[of], expected[of]) for of in expected}


def error(actual, expected) -> float:
    return float((actual - expected).detach().norm() / expected.detach().norm())


def main() -> None:
    upstream_fla.import_fla(pathlib.Path(sys.argv[1]), "cpu")
    calls = counting.count_calls(counting.DELTA_NET)
    import npu_ops_adapters
    from fla.ops import gated_delta_rule as theirs
    from fla.ops.gated_delta_rule import naive

    errors = {}
    for name, function in (("chunk", "chunk"), ("recurrent", "fused_recurrent")):
        actual = evaluate(getattr(theirs, f"{function}_gated_delta_rule"), inputs())
        plain = with_a_query_for_each_value_head(getattr(naive, f"naive_{name}_gated_delta_rule"))
        expected = evaluate(plain, inputs())
        errors |= {f"{name} {of}": error(actual[of], expected[of]) for of in expected}
    product(errors)
    kimi(errors)
    states = {row.target: row.sentence for row in npu_ops_adapters.verify()}
    reverted = {row.target: row.sentence for row in npu_ops_adapters.revert()}
    print(json.dumps([calls, errors, states, reverted]))


if __name__ == "__main__":
    main()
