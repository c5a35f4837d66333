"""Memory layouts: the same values in many layouts, surrounded by NaN.

The surrounding memory is NaN (the smallest value for integers), so a read beside a tensor makes the
result wrong. The memory is compared after the call, so a write beside a tensor is found, too.
"""

from __future__ import annotations

import torch

FORMS = ("dense", "inside", "fused", "apart", "stepped", "swapped", "turned", "expanded")
ROUTES = ("data", "numpy", "dlpack")


def bits(x: torch.Tensor) -> torch.Tensor:
    """View a tensor as integers, because NaN is not equal to itself."""
    if not x.dtype.is_floating_point:
        return x if x.dtype != torch.bool else x.view(torch.uint8)
    return x.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])


class Memory:
    """The memory of one or several arguments, with a copy of its contents."""

    def __init__(self, views: dict[str, torch.Tensor]):
        self.views = views
        first = next(iter(views.values()))
        size = first.untyped_storage().nbytes() // first.element_size()
        self.base = first.detach().as_strided((size,), (1,), 0)
        self.remember()

    def remember(self) -> None:
        self.before = bits(self.base).clone()

    def touched(self, writable: tuple[str, ...]) -> str | None:
        """Return a sentence if memory outside the `writable` arguments was written, else None."""
        wrong = bits(self.base) != self.before
        for name in set(writable) & self.views.keys():
            view = self.views[name]
            wrong.as_strided(view.shape, view.stride(), view.storage_offset()).fill_(False)
        count = int(wrong.sum())
        return (
            f"{count} elements of or beside {', '.join(self.views)} were written" if count else None
        )

    def elements(self, name: str) -> set[int]:
        """Return the positions of an argument's elements in the memory."""
        view = self.views[name]
        places = torch.arange(self.base.numel(), device="cpu")
        places = places.as_strided(view.shape, view.stride(), view.storage_offset())
        return set(places.flatten().tolist())

    def overlapping(self, written: tuple[str, ...]) -> str | None:
        """Return a written argument that overlaps itself or another argument, or None."""
        for name in set(written) & self.views.keys():
            if is_expanded(self.views[name]):
                return name
            mine = self.elements(name)
            for other in self.views.keys() - {name}:
                if mine & self.elements(other):
                    return name
        return None


def arranged(arguments: dict[str, torch.Tensor], forms: dict[str, str]) -> list[Memory]:
    """Lay out each argument by its form; arguments that already share memory stay together."""
    storages: dict[int, dict[str, torch.Tensor]] = {}
    for name, x in arguments.items():
        storages.setdefault(x.untyped_storage().data_ptr() or id(x), {})[name] = x
    return [
        Memory(views if len(views) > 1 else {n: place(x, forms[n]) for n, x in views.items()})
        for views in storages.values()
    ]


def is_expanded(x: torch.Tensor) -> bool:
    return x.numel() > 0 and any(n > 1 and s == 0 for n, s in zip(x.shape, x.stride(), strict=True))


def rewrite(target: torch.Tensor, x: torch.Tensor, route: str) -> None:
    """Write to a tensor without raising its version counter."""
    if is_expanded(target):
        target, x = target[:1], x[:1]
    if route == "data":
        target.data.copy_(x)
    elif route == "dlpack":
        torch.from_dlpack(bits(target.data)).copy_(bits(x))
    else:
        bits(target.data).numpy()[...] = bits(x.contiguous()).numpy()


def place(x: torch.Tensor, form: str) -> torch.Tensor:
    """Return a view equal to x; dense if x has too few dimensions for the form."""
    shape, dims = list(x.shape), x.dim()
    if form == "expanded" and dims > 1 and shape[0] > 1:
        return x[:1].clone().expand(shape)
    if form == "turned" and dims > 1:  # last two dimensions swapped in memory
        return x.mT.clone(memory_format=torch.contiguous_format).mT
    if form == "swapped" and dims > 2:
        return x.transpose(0, 1).clone(memory_format=torch.contiguous_format).transpose(0, 1)
    if form == "fused" and dims > 1:  # like q, k or v in a fused projection
        view = surrounded(x, *shape[:-1], shape[-1] + 5)[..., 2 : 2 + shape[-1]]
    elif form == "stepped" and dims > 0:
        view = surrounded(x, *shape[:-1], 2 * shape[-1] + 1)[..., 1::2][..., : shape[-1]]
    elif form == "apart" and dims > 1:  # gaps between the rows of the first dimension
        view = surrounded(x, shape[0], 2, *shape[1:])[:, 1]
    elif form == "inside" and dims > 0:
        view = surrounded(x, x.numel() + 7)[3 : 3 + x.numel()].view(shape)
    else:
        return x.clone(memory_format=torch.contiguous_format)
    return view.copy_(x)


def surrounded(like: torch.Tensor, *shape: int) -> torch.Tensor:
    """Return memory filled with NaN, or with the smallest integer."""
    nothing = float("nan") if like.is_floating_point() else True
    if like.dtype not in (torch.bool,) and not like.is_floating_point():
        nothing = torch.iinfo(like.dtype).min
    return like.new_full(shape, nothing)
