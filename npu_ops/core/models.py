"""Shapes of published models: `npu-ops parity` and each op's `of_model` make cases from them."""

from __future__ import annotations

import dataclasses

# Width of a key or value head of Gated Delta Net; the same in all models below.
LINEAR_DIM = 128


@dataclasses.dataclass(frozen=True)
class Model:
    """Shapes of a published model; `divided` returns the shapes of one tensor-parallel rank.

    section: rope sections of multimodal positions, or None.
    vision: heads and head dimension of the vision tower, or None.
    linear: key heads and value heads of Gated Delta Net, each `LINEAR_DIM` wide, or None.
    expert: hidden width of one expert, or None without experts.
    mlp: hidden width of an MLP, or None where every layer has experts.
    """

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int = 128
    rotary_dim: int = 128
    theta: float = 1e6
    section: tuple[int, int, int] | None = None
    section_layout: str = "interleaved"
    vision: tuple[int, int] | None = None
    linear: tuple[int, int] | None = None
    expert: int | None = None
    mlp: int | None = None

    @property
    def linear_channels(self) -> int:
        """Channels of q, k and v of Gated Delta Net together."""
        keys, values = self.linear
        return (2 * keys + values) * LINEAR_DIM


_QWEN3_VL = {"theta": 5e6, "section": (24, 20, 20), "vision": (16, 72)}
_QWEN3_5 = {
    "head_dim": 256, "rotary_dim": 64, "theta": 1e7, "section": (11, 11, 10), "vision": (16, 72),
}  # fmt: skip

MODELS = {
    "qwen2-vl-7b": Model(
        3584, 28, 4, section=(16, 24, 24), section_layout="chunked", vision=(16, 80), mlp=18944
    ),
    "qwen3-4b": Model(2560, 32, 8, mlp=9728),
    "qwen3-8b": Model(4096, 32, 8, mlp=12288),
    "qwen3-30b-a3b": Model(2048, 32, 4, expert=768),
    "qwen3-vl-4b": Model(2560, 32, 8, **_QWEN3_VL | {"vision": (16, 64)}, mlp=9728),
    "qwen3-vl-8b": Model(4096, 32, 8, **_QWEN3_VL, mlp=12288),
    "qwen3-vl-30b-a3b": Model(2048, 32, 4, **_QWEN3_VL, expert=768),
    "qwen3-next-80b-a3b": Model(
        2048, 16, 2, head_dim=256, rotary_dim=64, theta=1e7, linear=(16, 32), expert=512
    ),
    "qwen3.5-4b": Model(2560, 16, 4, **_QWEN3_5, linear=(16, 32), mlp=9216),
    "qwen3.5-9b": Model(4096, 16, 4, **_QWEN3_5, linear=(16, 32), mlp=12288),
    "qwen3.5-27b": Model(5120, 24, 4, **_QWEN3_5, linear=(16, 48), mlp=17408),
    "qwen3.5-35b-a3b": Model(2048, 16, 2, **_QWEN3_5, linear=(16, 32), expert=512),
}


def divided(model: Model, tp: int) -> Model:
    """Return the shapes that each of `tp` tensor-parallel ranks has of a model.

    Raises:
        ValueError: `tp` does not divide the number of heads.
    """

    def share(heads: int) -> int:
        if tp < 1 or heads % tp:
            raise ValueError(f"tp: got {tp}, needs a divisor of {heads} heads")
        return heads // tp

    return dataclasses.replace(
        model,
        heads=share(model.heads),
        kv_heads=max(1, model.kv_heads // tp),
        vision=model.vision and (share(model.vision[0]), model.vision[1]),
        linear=model.linear and tuple(map(share, model.linear)),
        mlp=model.mlp and model.mlp // tp,
    )
