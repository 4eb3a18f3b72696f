"""A model's weights in the form the fast path reads: one tensor where several products read the same input."""

from dataclasses import dataclass
from typing import NamedTuple, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from dloop.drafters.block import BlockModel, Layer
from dloop.drafters.chain import ChainModel
from dloop.drafters.eagle3 import Eagle3
from dloop.drafters.host import HostConfig
from dloop.errors import UserError
from dloop.kernels.shapes import Heads, HeadWeights
from dloop.targets.hf import HFTarget


class LayerWeights(NamedTuple):
    """One layer. `qkv` stacks queries, keys and values; `gate_up` the gate rows, then the up rows."""

    input_gain: Float[Tensor, " D"]
    qkv: Float[Tensor, "W D"]
    head: HeadWeights
    o: Float[Tensor, "D A"]
    post_gain: Float[Tensor, " D"]
    gate_up: Float[Tensor, "I2 D"]
    down: Float[Tensor, "D I"]


@dataclass(frozen=True)
class Stack:
    """Layers that share their shape, and the norm after the last."""

    layers: list[LayerWeights]
    heads: Heads
    gain: Float[Tensor, " D"]
    eps: float


@dataclass(frozen=True)
class ChainStack(Stack):
    """EAGLE-3's layer reads pairs: the token's embedding, normed by the layer's input gain, and the state."""

    fc: Float[Tensor, "D F"]  # from features to states
    state_gain: Float[Tensor, " D"]
    head: Float[Tensor, "W D"]
    kept: Int[Tensor, " W"]  # the target's ids of the head's tokens


def fuse(*modules: nn.Module) -> Float[Tensor, "N K"]:
    """Stack the weights of linear layers, and make each a view of the stack: no second copy stays."""
    weights = [cast(nn.Linear, module).weight for module in modules]
    stack = torch.cat([weight.data for weight in weights])
    start = 0
    for weight in weights:
        weight.data = stack[start : start + weight.shape[0]]
        start += weight.shape[0]
    return stack


def bias_of(*modules: nn.Module) -> Float[Tensor, " N"] | None:
    """Their biases, stacked; None if they have none."""
    biases = [cast(Tensor | None, module.bias) for module in modules]
    return torch.cat([bias.data for bias in biases if bias is not None]) if biases[0] is not None else None


def fuse_layer(layer: nn.Module, name: str) -> LayerWeights:
    """Qwen3, Qwen2 and Llama layers, and the block drafters', name their parts alike."""
    attention, mlp = cast(nn.Module, layer.self_attn), cast(nn.Module, layer.mlp)
    parts = [getattr(attention, f"{kind}_proj") for kind in "qkv"]
    gates = [mlp.gate_proj, mlp.up_proj]
    for module in (attention.o_proj, *gates, mlp.down_proj):
        if getattr(module, "bias", None) is not None:
            raise UserError(
                f"{name}: biases on the output or MLP projections are not on the fast path; use --engine twin"
            )
    norms = [getattr(attention, f"{kind}_norm", None) for kind in "qk"]
    return LayerWeights(
        input_gain=gain_of(layer.input_layernorm),
        qkv=fuse(*parts),
        head=HeadWeights(bias_of(*parts), *(None if norm is None else gain_of(norm) for norm in norms)),
        o=cast(nn.Linear, attention.o_proj).weight.data,
        post_gain=gain_of(layer.post_attention_layernorm),
        gate_up=fuse(*cast(list[nn.Module], gates)),
        down=cast(nn.Linear, mlp.down_proj).weight.data,
    )


def gain_of(norm: object) -> Float[Tensor, " D"]:
    """The weight of a norm."""
    return cast(Tensor, cast(nn.Module, norm).weight).data


def target_stack(target: HFTarget) -> Stack:
    """The layers of a Qwen3-, Qwen2- or Llama-like target. Raises UserError for what the fast path does not compute."""
    config, backbone = target.config, target.backbone
    if getattr(config, "hidden_act", "silu") != "silu":
        raise UserError(f"{target.name}: hidden_act={config.hidden_act!r} is not on the fast path; use --engine twin")
    windows = getattr(config, "layer_types", None) or []
    if any(kind != "full_attention" for kind in windows):
        raise UserError(f"{target.name}: sliding-window layers are not on the fast path; use --engine twin")
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rotary = cast(nn.Module, backbone.rotary_emb)
    heads = Heads(
        queries=config.num_attention_heads,
        keys=config.num_key_value_heads,
        dim=head_dim,
        eps=config.rms_norm_eps,
        frequency=cast(Tensor, rotary.inv_freq).float(),
        scaling=float(cast(float, rotary.attention_scaling)),
    )
    layers = [fuse_layer(layer, target.name) for layer in cast(nn.ModuleList, backbone.layers)]
    return Stack(layers=layers, heads=heads, gain=gain_of(backbone.norm), eps=config.rms_norm_eps)


def drafter_stack(model: BlockModel, name: str) -> Stack:
    """The layers of a block drafter."""
    layers = [fuse_layer(layer, name) for layer in model.layers if isinstance(layer, Layer)]
    return Stack(
        layers=layers,
        heads=heads_of(model.config, model.norm.weight),
        gain=gain_of(model.norm),
        eps=model.config.rms_norm_eps,
    )


def chain_stack(model: ChainModel, name: str) -> ChainStack:
    """The one layer of an EAGLE-3 drafter, and what stands around it. Raises UserError for other families."""
    if not isinstance(model, Eagle3):
        raise UserError(f"{name}: the fast path has no {model.config.family} yet; use --engine twin")
    return ChainStack(
        layers=[fuse_layer(model.midlayer, name)],
        heads=heads_of(model.config, model.norm.weight),
        gain=gain_of(model.norm),
        eps=model.config.rms_norm_eps,
        fc=model.fc.weight.data,
        state_gain=gain_of(model.midlayer.hidden_norm),
        head=model.lm_head.weight.data,
        kept=model.kept,
    )


def heads_of(config: HostConfig, like: Tensor) -> Heads:
    """A drafter's attention, its frequencies where this tensor lies."""
    steps = torch.arange(0, config.head_dim, 2, device=like.device, dtype=torch.float32)
    return Heads(
        queries=config.num_heads,
        keys=config.num_kv_heads,
        dim=config.head_dim,
        eps=config.rms_norm_eps,
        frequency=1.0 / config.rope_theta ** (steps / config.head_dim),
        scaling=1.0,
    )
