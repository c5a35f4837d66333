"""Where tensors lie: the same numbers in memory of every shape, with NaN all around.

What lies around is NaN (of integers: the smallest), so a read beside a tensor is seen in the
result, and it is compared afterwards, so a write beside it is seen too.
"""

from __future__ import annotations

import torch

FORMS = ("dense", "inside", "fused", "apart", "stepped", "swapped", "turned", "expanded")
ROUTES = ("data", "numpy", "dlpack")


def bits(x: torch.Tensor) -> torch.Tensor:
    """The same memory as integers, for NaN equals nothing."""
    if not x.dtype.is_floating_point:
        return x if x.dtype != torch.bool else x.view(torch.uint8)
    return x.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])


class Memory:
    """The memory of one argument or of several, and what was in it."""

    def __init__(self, views: dict[str, torch.Tensor]):
        self.views = views
        first = next(iter(views.values()))
        size = first.untyped_storage().nbytes() // first.element_size()
        self.base = first.detach().as_strided((size,), (1,), 0)
        self.remember()

    def remember(self) -> None:
        self.before = bits(self.base).clone()

    def touched(self, writable: tuple[str, ...]) -> str | None:
        """What was written besides the arguments that may be, in words."""
        wrong = bits(self.base) != self.before
        for name in set(writable) & self.views.keys():
            view = self.views[name]
            wrong.as_strided(view.shape, view.stride(), view.storage_offset()).fill_(False)
        count = int(wrong.sum())
        return (
            f"{count} elements of or beside {', '.join(self.views)} were written" if count else None
        )

    def elements(self, name: str) -> set[int]:
        """Where in the memory an argument's elements are."""
        view = self.views[name]
        places = torch.arange(self.base.numel(), device="cpu")
        places = places.as_strided(view.shape, view.stride(), view.storage_offset())
        return set(places.flatten().tolist())

    def overlapping(self, written: tuple[str, ...]) -> str | None:
        """Of what is to be written, an argument that shares elements with another or itself."""
        for name in set(written) & self.views.keys():
            if is_expanded(self.views[name]):
                return name
            mine = self.elements(name)
            for other in self.views.keys() - {name}:
                if mine & self.elements(other):
                    return name
        return None


def arranged(arguments: dict[str, torch.Tensor], forms: dict[str, str]) -> list[Memory]:
    """Put each argument into memory of a form; those that share memory already stay together."""
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
    """Put other numbers into a tensor in a way that its version does not count."""
    if is_expanded(target):
        target, x = target[:1], x[:1]
    if route == "data":
        target.data.copy_(x)
    elif route == "dlpack":
        torch.from_dlpack(bits(target.data)).copy_(bits(x))
    else:
        bits(target.data).numpy()[...] = bits(x.contiguous()).numpy()


def place(x: torch.Tensor, form: str) -> torch.Tensor:
    """A view that equals x. A form that x has no dimensions for is dense."""
    shape, dims = list(x.shape), x.dim()
    if form == "expanded" and dims > 1 and shape[0] > 1:
        return x[:1].clone().expand(shape)
    if form == "turned" and dims > 1:  # the last two dimensions lie the other way
        return x.mT.clone(memory_format=torch.contiguous_format).mT
    if form == "swapped" and dims > 2:
        return x.transpose(0, 1).clone(memory_format=torch.contiguous_format).transpose(0, 1)
    if form == "fused" and dims > 1:  # as q, k or v in a fused projection
        view = surrounded(x, *shape[:-1], shape[-1] + 5)[..., 2 : 2 + shape[-1]]
    elif form == "stepped" and dims > 0:
        view = surrounded(x, *shape[:-1], 2 * shape[-1] + 1)[..., 1::2][..., : shape[-1]]
    elif form == "apart" and dims > 1:  # rows of the first dimension lie apart
        view = surrounded(x, shape[0], 2, *shape[1:])[:, 1]
    elif form == "inside" and dims > 0:
        view = surrounded(x, x.numel() + 7)[3 : 3 + x.numel()].view(shape)
    else:
        return x.clone(memory_format=torch.contiguous_format)
    return view.copy_(x)


def surrounded(like: torch.Tensor, *shape: int) -> torch.Tensor:
    """Memory of what no formula would return."""
    nothing = float("nan") if like.is_floating_point() else True
    if like.dtype not in (torch.bool,) and not like.is_floating_point():
        nothing = torch.iinfo(like.dtype).min
    return like.new_full(shape, nothing)
