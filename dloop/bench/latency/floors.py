"""The fewest bytes and operations of each piece of work: every input read once; weights that sit in a loop, each time.

Embedding tables count by the rows looked up, a tied head as the head it is.
"""

from collections.abc import Iterable
from typing import NamedTuple, cast

from torch import Tensor

from dloop.drafters.block import BlockDrafter, Layer
from dloop.drafters.chain import ChainDrafter
from dloop.drafters.domino import Domino
from dloop.drafters.dspark import DSpark
from dloop.drafters.eagle3 import Eagle3
from dloop.targets.hf import HFTarget


class Cost(NamedTuple):
    """What cannot be avoided."""

    num_bytes: float
    flop: float

    def __add__(self, other: "Cost") -> "Cost":  # pyright: ignore[reportIncompatibleMethodOverride]
        return Cost(self.num_bytes + other.num_bytes, self.flop + other.flop)

    def __rmul__(self, count: int) -> "Cost":  # pyright: ignore[reportIncompatibleMethodOverride]
        return Cost(count * self.num_bytes, count * self.flop)


def product(weights: Iterable[Tensor], rows: int) -> Cost:
    """Weights read once and multiplied with `rows` rows; vectors (norms, biases) are read only."""
    found = list(weights)
    matrices = sum(weight.numel() for weight in found if weight.ndim > 1)
    return Cost(sum(weight.numel() * weight.itemsize for weight in found), 2.0 * matrices * rows)


def moved(elements: int, like: Tensor) -> Cost:
    """Elements read or written, and not computed with."""
    return Cost(elements * like.itemsize, 0.0)


def verify_cost(target: HFTarget, rows: int, context: int) -> Cost:
    """One target forward over `rows` rows of one sequence."""
    config, vocabulary = target.config, target.vocabulary
    head_dim = config.head_dim
    kv_width = 2 * config.num_hidden_layers * config.num_key_value_heads * head_dim
    layers = [weight for name, weight in target.backbone.named_parameters() if "embed_tokens" not in name]
    pairs = rows * context + rows * (rows + 1) // 2  # every row sees the context, the rows before it, and itself
    attention = 4.0 * pairs * config.num_hidden_layers * config.num_attention_heads * head_dim
    return (
        product([*layers, vocabulary.head], rows)
        + moved(kv_width * (context + rows) + rows * target.hidden_size, vocabulary.head)
        + Cost(0.0, attention)
    )


def stage_cost(drafter: BlockDrafter, context: int) -> Cost:
    """One stage over `context` stored rows: the block's layers, the target's head, the family's own token by token."""
    model, vocabulary, config = drafter.model, drafter.vocabulary, drafter.config
    rows = config.block_size
    layers = [weight for layer in layers_of(drafter) for weight in layer.parameters()]
    kv_width = 2 * config.num_layers * config.num_kv_heads * config.head_dim
    attention = 4.0 * rows * (context + rows) * config.num_layers * config.num_heads * config.head_dim
    return (
        product([*layers, model.norm.weight], rows)
        + product([vocabulary.head], config.stage_len)
        + own_cost(drafter)
        + moved(kv_width * context + rows * config.hidden_size, vocabulary.head)
        + Cost(0.0, attention)
    )


def own_cost(drafter: BlockDrafter) -> Cost:
    """What a family's own head reads and computes: each token's pass waits for the token before."""
    model, like, count = drafter.model, drafter.vocabulary.head, drafter.stage_len
    if isinstance(model, DSpark) and model.markov_head is not None:
        return count * (product([model.markov_head.markov_w2.weight], 1) + moved(model.config.markov_rank, like))
    if isinstance(model, Domino):
        read = product(model.prefix_gru.parameters(), 1) + moved(model.config.hidden_size, like)
        corrected = count - model.config.pure_draft_prefix_len
        return count * read + corrected * product(model.embed_proj.parameters(), 1)
    return Cost(0.0, 0.0)


def steps_cost(drafter: ChainDrafter, rows: int, context: int) -> Cost:
    """One EAGLE-3 stage over `context` stored rows: its layer and its head once a step, for `rows` rows of a beam."""
    model, config = cast(Eagle3, drafter.model), drafter.config
    weights = [*model.midlayer.parameters(), model.norm.weight, model.lm_head.weight]
    width = 2 * config.num_kv_heads * config.head_dim
    attention = 4.0 * rows * context * config.num_heads * config.head_dim
    step = product(weights, rows) + moved(width * context + rows * config.hidden_size, model.lm_head.weight)
    return Cost(step.num_bytes * drafter.stage_len, (step.flop + attention) * drafter.stage_len)


def extend_cost(drafter: BlockDrafter, rows: int) -> Cost:
    """Context rows of verified positions: the fused taps, and every layer's keys and values."""
    config, model = drafter.config, drafter.model
    fused = [model.fc.weight, model.hidden_norm.weight]
    stored = [
        weight
        for layer in layers_of(drafter)
        for part in (layer.self_attn.k_proj, layer.self_attn.v_proj, layer.self_attn.k_norm)
        for weight in part.parameters()
    ]
    kv_width = 2 * config.num_layers * config.num_kv_heads * config.head_dim
    return product([*fused, *stored], rows) + moved(rows * (model.fc.in_features + kv_width), model.fc.weight)


def layers_of(drafter: BlockDrafter) -> list[Layer]:
    """The backbone's layers."""
    return [layer for layer in drafter.model.layers if isinstance(layer, Layer)]
