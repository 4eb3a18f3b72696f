"""Gemma 4's assistant: layers of queries alone, over the keys and values of its target's last layers.

A step joins the target's embedding of a token with a state of the target's width, and hands on a state of that width;
between the two it works in a width of its own, and its tied embedding is its output matrix. Nothing of it is kept from
step to step but that state: keys, values and the position stay those of the round's anchor.
Source: the Gemma 4 assistants of Hugging Face transformers (names, arithmetic, ordered embeddings).
"""

from collections.abc import Callable, Mapping
from functools import partial

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from dloop.checkpoint import identical
from dloop.drafters.chain import ChainModel
from dloop.drafters.gemma4_config import FAMILY as FAMILY
from dloop.drafters.gemma4_config import AssistantConfig
from dloop.drafters.gemma4_config import read_assistant as read_assistant
from dloop.drafters.layers import MLP, Rotary, WideRMSNorm
from dloop.errors import UserError
from dloop.lent import LentKind
from dloop.types import Vocabulary

TIED, HEAD = "model.embed_tokens.weight", "lm_head.weight"
ORDERING = "masked_embedding.token_ordering"

# From rotated queries and the kind of layer to what each head mixed: the caller knows what a row sees of that kind.
Look = Callable[[Float[Tensor, "B H n d"], str], Float[Tensor, "B H n d"]]


def untied(tensors: Mapping[str, Tensor], source: str) -> dict[str, Tensor]:
    """Without the second name of the tied matrix. Raises UserError for one of its own, and for a broken order."""
    found = dict(tensors)
    head = found.pop(HEAD, None)
    if head is not None and not (TIED in found and identical(head, found[TIED])):
        raise UserError(f"{source}: {HEAD} is not {TIED}, to which it is tied; fetch the checkpoint again")
    order = found.get(ORDERING)
    if order is not None and not names_each_token(order):
        raise UserError(f"{source}: {ORDERING} does not name every token once; fetch the checkpoint again")
    return found


def names_each_token(order: Tensor) -> bool:
    """Whether this is a list of all tokens in some order."""
    listed = order.ndim == 1 and not order.is_floating_point()
    return listed and torch.equal(order.sort().values.long(), torch.arange(len(order)))


class QueryAttention(nn.Module):
    """Attention without keys and values of its own; scores are not scaled."""

    def __init__(self, config: AssistantConfig, kind: str) -> None:
        super().__init__()
        self.kind, self.head_dim = kind, config.borrows[kind].head_dim
        width = config.num_heads * self.head_dim
        self.q_proj = nn.Linear(config.hidden_size, width, bias=config.attention_bias)
        self.q_norm = WideRMSNorm(self.head_dim, config.rms_norm_eps)
        self.o_proj = nn.Linear(width, config.hidden_size, bias=config.attention_bias)

    def forward(self, rows: Float[Tensor, "B n D"], rotary: Rotary, look: Look) -> Float[Tensor, "B n D"]:
        heads = self.q_proj(rows).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        return self.o_proj(look(rotary.rotate(self.q_norm(heads)), self.kind).transpose(1, 2).flatten(2))


class AssistantLayer(nn.Module):
    """A Gemma 4 layer: what each half adds is normed before and after, and the whole is scaled."""

    layer_scalar: Float[Tensor, " 1"]

    def __init__(self, config: AssistantConfig, kind: str) -> None:
        super().__init__()
        norm = partial(WideRMSNorm, config.hidden_size, config.rms_norm_eps)
        self.input_layernorm, self.post_attention_layernorm = norm(), norm()
        self.pre_feedforward_layernorm, self.post_feedforward_layernorm = norm(), norm()
        self.self_attn = QueryAttention(config, kind)
        self.mlp = MLP(config, partial(F.gelu, approximate="tanh"))
        self.register_buffer("layer_scalar", torch.ones(1))

    def forward(self, x: Float[Tensor, "B n D"], rotary: Rotary, look: Look) -> Float[Tensor, "B n D"]:
        x = x + self.post_attention_layernorm(self.self_attn(self.input_layernorm(x), rotary, look))
        x = x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))
        return x * self.layer_scalar


class Layers(nn.Module):
    """The layers, the norm after them, and the matrix of its tokens."""

    def __init__(self, config: AssistantConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList([AssistantLayer(config, kind) for kind in config.layer_types])
        self.norm = WideRMSNorm(config.hidden_size, config.rms_norm_eps)


class OrderedHead(nn.Module):
    """Tokens in clusters of one size: those of the likeliest clusters alone have logits, the rest a floor below them.

    The values are the published ones; all logits are computed, and then those of the other clusters replaced.
    """

    token_ordering: Int[Tensor, " V"]  # cluster after cluster

    def __init__(self, config: AssistantConfig) -> None:
        super().__init__()
        self.top, self.size = config.top_centroids, config.vocab_size // config.num_centroids
        self.centroids = nn.Linear(config.hidden_size, config.num_centroids, bias=False)
        self.register_buffer("token_ordering", torch.arange(config.vocab_size))

    def forward(self, states: Float[Tensor, "*n D"], logits: Float[Tensor, "*n V"]) -> Float[Tensor, "*n V"]:
        scores = self.centroids(states)
        clusters = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, scores.topk(self.top, -1).indices, True)
        chosen = torch.empty_like(logits, dtype=torch.bool)
        chosen[..., self.token_ordering.long()] = clusters.repeat_interleave(self.size, -1)
        floor = logits.detach().masked_fill(~chosen, float("inf")).amin(-1, keepdim=True) - 1
        return torch.where(chosen, logits, floor)


class Assistant(ChainModel):
    """The assistant as a drafter: one step a token."""

    config: AssistantConfig  # pyright: ignore[reportIncompatibleVariableOverride]

    def __init__(self, config: AssistantConfig) -> None:
        super().__init__(config)
        self.model = Layers(config)
        self.pre_projection = nn.Linear(2 * config.backbone_size, config.hidden_size, bias=False)
        self.post_projection = nn.Linear(config.hidden_size, config.backbone_size, bias=False)
        self.masked_embedding = OrderedHead(config) if config.num_centroids else None

    def reads(self, taps: Float[Tensor, "*n F"], last: Float[Tensor, "*n D"]) -> Float[Tensor, "*n D"]:
        return last

    def first(self, features: Float[Tensor, "B n D"]) -> Float[Tensor, "B n D"]:
        return features

    def handed(self, states: Float[Tensor, "B n _"]) -> Float[Tensor, "B n _"]:
        return self.post_projection(states)

    def rows(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        states: Float[Tensor, "B n T"],
        embedded: Float[Tensor, "B n T"],
        positions: Int[Tensor, "#B n"],
        attend: Look,
    ) -> Float[Tensor, "B n D"]:
        """Source of the scale: the target's own, rounded like its weights."""
        scale = torch.full((), self.config.backbone_size**0.5, dtype=embedded.dtype, device=embedded.device)
        x = self.pre_projection(torch.cat([embedded * scale, states.to(embedded.dtype)], -1))
        rotary = {kind: turning(positions, lent, x.dtype) for kind, lent in self.config.borrows.items()}
        for layer, kind in zip(self.model.layers, self.config.layer_types, strict=True):
            x = layer(x, rotary[kind], attend)
        return self.model.norm(x)

    def logits(self, states: Float[Tensor, "... D"], vocabulary: Vocabulary) -> Float[Tensor, "... V"]:
        logits = F.linear(states, self.model.embed_tokens.weight)
        return logits if self.masked_embedding is None else self.masked_embedding(states, logits)

    @property
    def kept(self) -> None:
        return None


def turning(positions: Int[Tensor, "B n"], lent: LentKind, dtype: torch.dtype) -> Rotary:
    """The rotation of layers of one kind: of a head that turns in part, the other pairs have frequency 0."""
    wide = torch.promote_types(dtype, torch.float32)
    pairs = torch.arange(lent.head_dim // 2, device=positions.device)
    frequencies = 1.0 / lent.rope_theta ** (2 * pairs.to(wide) / lent.head_dim)
    turned = int(lent.turning * lent.head_dim // 2)
    return Rotary.turning(positions, torch.where(pairs < turned, frequencies, 0.0), dtype)
