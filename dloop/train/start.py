"""A new drafter for a target: weights that start from the target's own layers."""

from typing import cast

import numpy as np
import torch
from torch import Tensor, nn

from dloop.drafters.block import BlockModel
from dloop.drafters.config import BlockConfig
from dloop.drafters.domino import Domino
from dloop.drafters.draft_vocab import maps_of, most_frequent
from dloop.drafters.dspark import DSpark
from dloop.drafters.eagle3 import Eagle3Config
from dloop.drafters.families import build
from dloop.drafters.host import HostConfig, HostModel
from dloop.errors import UserError
from dloop.targets.hf import HFTarget
from dloop.train.batch import TokenFile

COPIED = (
    *(f"self_attn.{name}_proj" for name in "qkvo"),
    *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
    *("input_layernorm", "post_attention_layernorm"),
)
SMALL = 0.02  # standard deviation of what has no counterpart in the target


def fresh(config: HostConfig, target: HFTarget, layers: tuple[int, ...], seed: int) -> HostModel:
    """A new float32 drafter: one of blocks from these layers of the target, an autoregressive one at random."""
    if isinstance(config, BlockConfig):
        return from_target(config, target, layers, seed)
    torch.manual_seed(seed)
    model = build(config)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.normal_(std=SMALL)
    return model


def choose_vocabulary(model: HostModel, data: TokenFile) -> None:
    """Let the head of a new drafter know the tokens that the target writes most often in these data.

    Source: the public trainers' rule. A drafter that was trained before keeps its own: another would permute its head.
    """
    config = model.config
    if not isinstance(config, Eagle3Config | BlockConfig) or config.draft_vocab_size is None:
        return
    samples = [data.sample(index) for index in range(len(data))]
    written = torch.from_numpy(np.concatenate([sample.tokens[sample.labels] for sample in samples]))
    kept = most_frequent(written, config.draft_vocab_size, config.vocab_size)
    model.load_state_dict(maps_of(kept, config.vocab_size), strict=False)


@torch.no_grad()
def from_target(config: BlockConfig, target: HFTarget, layers: tuple[int, ...], seed: int) -> BlockModel:
    """A float32 drafter whose layers copy these layers of the target.

    `fc` passes on the last tapped layer and `hidden_norm` takes the last copied layer's input norm, so that this
    layer starts with the target's own keys and values; corrections of the logits start at zero.
    Raises UserError if a copied layer does not fit.
    """
    if not config.num_layers:
        raise UserError("num_hidden_layers=0 leaves the drafter without a layer; give its config at least 1")
    if len(layers) != config.num_layers or not all(0 <= layer < target.num_layers for layer in layers):
        raise UserError(
            f"init layers {list(layers)} must name {config.num_layers} layers of the target, 0..{target.num_layers - 1}"
        )
    torch.manual_seed(seed)
    model = build(config)
    assert isinstance(model, BlockModel)
    sources = cast(nn.ModuleList, target.backbone.layers)
    for layer, index in zip(model.layers, layers, strict=True):
        for name in COPIED:
            copy(sources[index], layer, name)
    hidden = config.hidden_size
    model.fc.weight.normal_(std=SMALL)
    model.fc.weight[:, -hidden:] += torch.eye(hidden)
    model.hidden_norm.weight.copy_(cast(Tensor, sources[layers[-1]].get_submodule("input_layernorm").weight))
    model.norm.weight.copy_(cast(Tensor, cast(nn.Module, target.backbone.norm).weight))
    silence(model)
    return model


def silence(model: BlockModel) -> None:
    """Let a fresh head add nothing to the backbone's logits."""
    match model:
        case DSpark(markov_head=head) if head is not None:
            head.markov_w1.weight.normal_(std=0.1)
            head.markov_w2.weight.zero_()
        case Domino():
            model.embed_proj[-1].get_parameter("weight").zero_()
        case _:
            pass


def copy(source: nn.Module, target: nn.Module, name: str) -> None:
    """Copy one submodule's parameters. Raises UserError if a shape differs."""
    theirs, ours = source.get_submodule(name), target.get_submodule(name)
    for key, value in ours.named_parameters():
        found = cast(Tensor, theirs.get_parameter(key))
        if found.shape != value.shape:
            raise UserError(f"{name}.{key} is {tuple(found.shape)} in the target, {tuple(value.shape)} in the drafter")
        value.copy_(found)
