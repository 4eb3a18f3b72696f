"""Tiny random targets of every supported kind, part of `dloop.testing`. All seeded; nothing is fetched."""

from typing import Literal, cast

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from dloop.lent import FULL, SLIDING
from dloop.targets.adapters import adapter_of
from dloop.targets.hf import HFTarget
from dloop.targets.recurrent import LINEAR
from dloop.targets.release import is_offered

Kind = Literal["qwen3", "qwen2", "llama", "llama_tied", "gemma4", "qwen3_5"]
KINDS: tuple[Kind, ...] = ("qwen3", "qwen2", "llama", "llama_tied")  # that can verify trees
WINDOW_KINDS: tuple[Kind, ...] = ("gemma4",) if is_offered() else ()  # that can too, with layers of a short window
CHAIN_KINDS: tuple[Kind, ...] = ("qwen3_5",) if is_offered() else ()  # that cannot
HIDDEN_SIZE = 32
WINDOW = 7
SOFTCAP = 30.0
PARTIAL = {"partial_rotary_factor": 0.5, "mrope_section": [2, 0, 0], "mrope_interleaved": True}
PLAIN = {"rope_type": "default", "rope_theta": 10_000.0}
MODEL_TYPES = {"llama_tied": "llama", "qwen3_5": "qwen3_5_text", "gemma4": "gemma4_unified"}


def tiny_target(kind: Kind = "qwen3", *, seed: int = 0, vocab_size: int = 97, num_layers: int = 4) -> HFTarget:
    """A random float32 target of 256 positions; its texts vary, and each weight, biases too, makes a difference."""
    config = tiny_config(kind, vocab_size, num_layers)
    model = cast(PreTrainedModel, AutoModelForCausalLM.from_config(config))  # pyright: ignore[reportUnknownMemberType]
    target = adapter_of(config.model_type, kind)(name=f"tiny {kind}", model=model.eval(), stop_ids=frozenset())
    fill(model, seed)
    tied = target.config.tie_word_embeddings
    with torch.no_grad():  # signs: a tied head would otherwise repeat the last token for ever
        target.backbone.get_parameter("norm.weight")[::3] *= -1
        target.vocabulary.head.mul_(0.7 if tied else 4.0)
    if kind == "qwen3_5":
        settle_linear(model)
    if kind == "gemma4":
        settle_windows(model)
    model.requires_grad_(False)
    return target


def tiny_config(kind: Kind, vocab_size: int, num_layers: int) -> PretrainedConfig:
    """What all kinds share, and what one adds."""
    sizes = dict[str, object](
        vocab_size=vocab_size,
        hidden_size=HIDDEN_SIZE,
        intermediate_size=2 * HIDDEN_SIZE,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=256,
        rope_parameters=PLAIN,
        tie_word_embeddings=kind in ("llama_tied", "gemma4"),
        eos_token_id=None,
    )
    if kind == "qwen3_5":
        sizes |= linear_layers(num_layers) | {"rope_parameters": PLAIN | PARTIAL}
    if kind == "gemma4":
        text = {"model_type": "gemma4_unified_text", **sizes, **window_layers(num_layers)}
        sizes = {"text_config": text, "vision_config": None, "audio_config": None}
    return AutoConfig.for_model(MODEL_TYPES.get(kind, kind), **sizes)  # pyright: ignore


def linear_layers(num_layers: int) -> dict[str, object]:
    """What Qwen3.5 adds to a config: layers of linear and of full attention in turn."""
    return {
        "layer_types": [(LINEAR, FULL)[i % 2] for i in range(num_layers)],
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
    }


def window_layers(num_layers: int) -> dict[str, object]:
    """What Gemma 4 adds to a config: layers of sliding and of full attention in turn, full the last."""
    return {
        "layer_types": [(FULL, SLIDING)[(num_layers - 1 - i) % 2] for i in range(num_layers)],
        "sliding_window": WINDOW,
        "global_head_dim": 16,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "final_logit_softcapping": SOFTCAP,
        "rope_parameters": {
            SLIDING: PLAIN,
            FULL: {"rope_type": "proportional", "rope_theta": 100_000.0, "partial_rotary_factor": 0.5},
        },
    }


@torch.no_grad()
def settle_linear(model: nn.Module) -> None:
    """Norms that add 1 to their weight have gains like the others; states forget slowly, so that a text counts."""
    for name, weight in model.named_parameters():
        if name.endswith("norm.weight") and "linear_attn" not in name:
            weight.sub_(1)
        elif name.endswith(("A_log", "dt_bias")):
            weight.sub_(3)


@torch.no_grad()
def settle_windows(model: nn.Module) -> None:
    """What a layer adds, normed, outweighs the scaled embedding, so that a text counts and not its last token alone;
    and logits reach for the cap.
    """
    for name, weight in model.named_parameters():
        if name.rpartition("layers.")[2].partition(".")[2].startswith("post_"):
            weight.mul_(4)
        elif name.endswith("language_model.norm.weight"):
            weight.mul_(2)


@torch.no_grad()
def fill(module: nn.Module, seed: int) -> None:
    """Random values for every parameter: matrices keep the scale of their input, gains lie around 1."""
    generator = torch.Generator().manual_seed(seed)
    for name, weight in module.named_parameters():
        noise = torch.randn(weight.shape, generator=generator)
        if weight.ndim == 1:
            weight.copy_(0.2 * noise + (0 if name.endswith("bias") else 1))
        else:
            weight.copy_(noise if "embed" in name or "markov_w1" in name else noise / weight.shape[-1] ** 0.5)
    for name, scalar in module.named_buffers():
        if name.endswith("layer_scalar"):
            scalar.copy_(0.8 + 0.2 * torch.rand(1, generator=generator))
