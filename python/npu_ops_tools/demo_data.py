"""Makes the demo's training data: scikit-learn's text and pictures as Qwen3-VL prompts.

A picture becomes a grid of patches; the token of a patch is its mean colour. Text becomes bytes.
Positions have three rows, T, H and W, numbered as in Qwen3-VL.
"""

from __future__ import annotations

import importlib.resources

import torch

# Tokens: the 256 bytes, four markers, and the colours of a 4 x 4 x 4 cube.
START, END, VISION_START, VISION_END = range(256, 260)
FIRST_COLOUR, LEVELS = 260, 4
VOCABULARY = FIRST_COLOUR + LEVELS**3

PICTURES = ("china.jpg", "flower.jpg")
# Sides of a patch in pixels. Several, so that a batch has different grids.
PATCH_SIDES = (32, 40, 48, 64)


def batches(steps: int, batch: int, length: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """Return the samples of a training run, the same for the same seed.

    Returns:
        tokens: int64 `[steps, batch, length + 1]`. positions: int64 `[steps, 3, batch, length]`.

    Raises:
        ImportError: scikit-learn or pillow is not installed.
    """
    draw = torch.Generator().manual_seed(seed)
    text, images = read_text(), read_pictures()
    samples = [_sample(text, images, length + 1, draw) for _ in range(steps * batch)]
    tokens = torch.stack([tokens for tokens, _ in samples]).unflatten(0, (steps, batch))
    positions = torch.stack([positions for _, positions in samples]).unflatten(0, (steps, batch))
    return {"tokens": tokens, "positions": positions[..., :-1].transpose(1, 2).contiguous()}


def read_text() -> torch.Tensor:
    """Return the descriptions of scikit-learn's data sets as bytes: int64 `[n]`."""
    folder = importlib.resources.files("sklearn.datasets") / "descr"
    files = sorted((f for f in folder.iterdir() if f.name.endswith(".rst")), key=lambda f: f.name)
    return torch.tensor(list(b"\n".join(file.read_bytes() for file in files)))


def read_pictures() -> list[torch.Tensor]:
    """Return scikit-learn's two photographs, fp32 `[height, width, 3]` in [0, 1)."""
    from sklearn.datasets import load_sample_image

    return [torch.from_numpy(load_sample_image(name).copy()) / 256 for name in PICTURES]


def colour_tokens(image: torch.Tensor, side: int) -> torch.Tensor:
    """Return the colour token of each patch of `side` x `side` pixels, `[rows, columns]`.

    Incomplete patches at the edges are dropped.
    """
    rows, columns = image.shape[0] // side, image.shape[1] // side
    patches = image[: rows * side, : columns * side].unflatten(1, (columns, side))
    mean = patches.unflatten(0, (rows, side)).mean((1, 3))
    red, green, blue = (mean * LEVELS).long().unbind(-1)
    return FIRST_COLOUR + (red * LEVELS + green) * LEVELS + blue


def prompt(grid: torch.Tensor, text: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a picture followed by text: tokens `[n]` and positions `[3, n]`.

    A text token has the same position on all axes. A patch has the picture's position on T; on H
    and W its row and column are added. Text after the picture continues at the largest position
    plus 1.

    Source: transformers `Qwen3VLModel.get_rope_index`.
    """
    before, after = torch.tensor([START, VISION_START]), torch.tensor([VISION_END])
    tokens = torch.cat((before, grid.flatten(), after, text, torch.tensor([END])))
    rows, columns = grid.shape
    origin = len(before)
    row = torch.arange(rows).repeat_interleave(columns)
    column = torch.arange(columns).repeat(rows)
    picture = origin + torch.stack((torch.zeros_like(row), row, column))
    rest = torch.arange(len(tokens) - origin - grid.numel()) + origin + max(rows, columns)
    head = torch.arange(origin)
    return tokens, torch.cat((head.expand(3, -1), picture, rest.expand(3, -1)), dim=1)


def _sample(text, images, length: int, draw):
    image = images[_below(len(images), draw)]
    grid = colour_tokens(image, PATCH_SIDES[_below(len(PATCH_SIDES), draw)])
    words = length - grid.numel() - 4  # four markers
    start = _below(len(text) - words, draw)
    return prompt(grid, text[start : start + words])


def _below(end: int, draw) -> int:
    return int(torch.randint(end, (), generator=draw))
