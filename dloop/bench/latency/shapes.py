"""Named shapes: the numbers of published models, without their weights. Imports no torch.

Source: config.json of each model on the Hugging Face hub (Qwen/Qwen3-*, Qwen/Qwen2.5-7B-Instruct,
meta-llama/Llama-3.1-8B, HuggingFaceTB/SmolLM2-*); parameter counts are those the hub shows, tied heads counted once.
"""

import difflib
from dataclasses import dataclass
from typing import Literal

from dloop.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A target's sizes. Positions are rotated by the plain rule: Llama 3.1's scaled one costs the same."""

    name: str
    kind: Literal["qwen3", "qwen2", "llama"]
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    positions: int  # the longest context
    rope_theta: float
    is_tied: bool  # the head is the embedding
    num_parameters: int  # published
    drafter_layers: int = 5


def qwen3(name: str, sizes: tuple[int, int, int, int], *, is_tied: bool, num_parameters: int) -> Shape:
    """What all dense Qwen3 models share; sizes are hidden, intermediate, layers, heads."""
    hidden_size, intermediate_size, num_layers, num_heads = sizes
    return Shape(
        name=name,
        kind="qwen3",
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=8,
        head_dim=128,
        vocab_size=151_936,
        positions=40_960,
        rope_theta=1e6,
        is_tied=is_tied,
        num_parameters=num_parameters,
    )


def smollm2(name: str, sizes: tuple[int, int, int, int], num_kv_heads: int, num_parameters: int) -> Shape:
    """What all SmolLM2 models share; sizes are hidden, intermediate, layers, heads."""
    hidden_size, intermediate_size, num_layers, num_heads = sizes
    return Shape(
        name=name,
        kind="llama",
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=64,
        vocab_size=49_152,
        positions=8192,
        rope_theta=100_000.0,
        is_tied=True,
        num_parameters=num_parameters,
    )


LLAMA = Shape(
    name="llama-3.1-8b",
    kind="llama",
    hidden_size=4096,
    intermediate_size=14_336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    vocab_size=128_256,
    positions=131_072,
    rope_theta=500_000.0,
    is_tied=False,
    num_parameters=8_030_261_248,
)
QWEN2 = Shape(
    name="qwen2.5-7b",
    kind="qwen2",
    hidden_size=3584,
    intermediate_size=18_944,
    num_layers=28,
    num_heads=28,
    num_kv_heads=4,
    head_dim=128,
    vocab_size=152_064,
    positions=32_768,
    rope_theta=1e6,
    is_tied=False,
    num_parameters=7_615_616_512,
)
TINY = Shape(
    name="tiny",
    kind="qwen3",
    hidden_size=64,
    intermediate_size=128,
    num_layers=6,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    vocab_size=512,
    positions=4096,
    rope_theta=1e6,
    is_tied=True,
    num_parameters=254_976,
    drafter_layers=2,
)
SHAPES = {
    shape.name: shape
    for shape in (
        qwen3("qwen3-0.6b", (1024, 3072, 28, 16), is_tied=True, num_parameters=596_049_920),
        qwen3("qwen3-1.7b", (2048, 6144, 28, 16), is_tied=True, num_parameters=1_720_574_976),
        qwen3("qwen3-4b", (2560, 9728, 36, 32), is_tied=True, num_parameters=4_022_468_096),
        qwen3("qwen3-8b", (4096, 12_288, 36, 32), is_tied=False, num_parameters=8_190_735_360),
        qwen3("qwen3-14b", (5120, 17_408, 40, 40), is_tied=False, num_parameters=14_768_307_200),
        qwen3("qwen3-32b", (5120, 25_600, 64, 64), is_tied=False, num_parameters=32_762_123_264),
        LLAMA,
        QWEN2,
        smollm2("smollm2-135m", (576, 1536, 30, 9), 3, 134_515_008),
        smollm2("smollm2-360m", (960, 2560, 32, 15), 5, 361_821_120),
        smollm2("smollm2-1.7b", (2048, 8192, 24, 32), 32, 1_711_376_384),
        TINY,
    )
}
ALIASES = {"smollm2": "smollm2-135m"}  # what other commands call it


def shape_of(name: str) -> Shape:
    """The shape of this name. Raises UserError with the choices."""
    found = SHAPES.get(ALIASES.get(name, name))
    if found is None:
        near = difflib.get_close_matches(name, [*SHAPES, *ALIASES], n=2)
        hint = f"did you mean {' or '.join(near)}?" if near else f"choose one of {', '.join([*SHAPES, *ALIASES])}"
        raise UserError(f"--shape {name} is not known; {hint}")
    return found


def taps_of(shape: Shape) -> tuple[int, ...]:
    """The layers its drafter taps: spread evenly over 1..n-3, as published."""
    layers, targets = shape.drafter_layers, shape.num_layers
    return tuple(round(1 + i * (targets - 4) / (layers - 1)) for i in range(layers))


def smaller(shape: Shape) -> Shape | None:
    """The smallest shape with the same vocabulary, as an assistant of transformers' kind; None: it is this one."""
    least = min((s for s in SHAPES.values() if s.vocab_size == shape.vocab_size), key=lambda s: s.num_parameters)
    return None if least is shape else least
