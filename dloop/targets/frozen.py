"""The frozen target on a training batch: its own decoder layers, called one after the other and nothing beside them.

The model's forward prepares masks and caches on the host before the first layer, and prepares the mask otherwise while
a CUDA graph is captured. A right-padded batch needs neither: under causal attention no row sees the padding behind it.
"""

import functools
from collections.abc import Callable
from typing import cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PretrainedConfig

DIRECT = ("qwen3", "qwen2", "llama")  # layer, rotary module and norm have one form: read in their sources


def runs_directly(config: PretrainedConfig) -> bool:
    """Whether these layers without a mask are causal: full attention throughout, in PyTorch's own implementation."""
    full = set(getattr(config, "layer_types", None) or ()) <= {"full_attention"}
    return config.model_type in DIRECT and full and getattr(config, "_attn_implementation", None) == "sdpa"


def run_layer(layer: nn.Module, states: Tensor, positions: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """One decoder layer, causal."""
    return layer(states, attention_mask=None, position_ids=positions, position_embeddings=rotary)


@functools.cache
def compiled_layer() -> Callable[..., Tensor]:
    """The same, fused; one for all layers, whose weights are no part of what is compiled."""
    return torch.compile(run_layer)


@torch.no_grad()
def run_layers(
    backbone: nn.Module,
    tokens: Int[Tensor, "B T"],
    taps: tuple[int, ...],
    positions: Int[Tensor, "#B T"] | None = None,
    *,
    last: bool = True,
    compiled: bool = False,
) -> tuple[Float[Tensor, "B T F"], Float[Tensor, "B T D"]]:
    """(raw outputs of the tapped layers side by side, the last state after the norm). -1 taps the embedding.

    `positions`: 0..T-1 by default. Without `last` nothing above the last tapped layer runs, and it has no columns.
    `compiled`: norms, rotations and activations are fused, so that they round less often.
    """
    layers = cast(nn.ModuleList, backbone.layers)
    if positions is None:
        positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
    states = cast(nn.Module, backbone.embed_tokens)(tokens)
    rotary = cast(nn.Module, backbone.rotary_emb)(states, positions)
    caught, run = {-1: states}, compiled_layer() if compiled else run_layer
    for index, layer in enumerate(layers[: len(layers) if last else max(taps, default=-1) + 1]):
        states = run(layer, states, positions, rotary)
        if index in taps:
            caught[index] = states
    tapped = torch.cat([caught[index] for index in taps], -1) if taps else states[..., :0]
    return tapped, cast(nn.Module, backbone.norm)(states) if last else states[..., :0]
