"""Models of a shape with random weights, built on the device they stay on: no checkpoint, no copy.

Sources of the drafters' sizes: DeepSpec's DSpark releases for Qwen3-4B and 8B (five layers, rank 256, blocks of 7);
z-lab's DFlash and SpecForge's Domino releases for them (blocks of 16); SafeAILab's and SpecForge's EAGLE-3 releases.
"""

from typing import Literal, NamedTuple, cast

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from dloop.bench.latency.shapes import Shape, taps_of
from dloop.drafters.block import BlockDrafter
from dloop.drafters.chain import ChainDrafter
from dloop.drafters.config import BlockConfig, Json
from dloop.drafters.draft_vocab import maps_of
from dloop.drafters.eagle3 import Eagle3, Eagle3Config, published_taps
from dloop.drafters.families import READERS, build, loaded
from dloop.errors import UserError
from dloop.fast.drafter import FastBlockDrafter
from dloop.fast.target import FastTarget
from dloop.targets.hf import HFTarget

BLOCK_SIZE, MARKOV_RANK = 7, 256
Family = Literal["dspark", "dflash", "domino"]
BLOCK_SIZES: dict[Family, int] = {"dspark": BLOCK_SIZE, "dflash": 16, "domino": 16}
METHODS: dict[Family, Json] = {  # what their published configs say of their heads
    "dspark": {
        "projector_type": "dspark",
        "markov_rank": MARKOV_RANK,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    },
    "dflash": {},
    "domino": {
        "projector_type": "domino",
        "pure_draft_prefix_len": 1,
        "emb_dim": 256,
        "gru_hidden_dim": 1024,
        "shift_label": True,
    },
}
DRAFT_VOCAB = 32_000  # of EAGLE-3's releases


class Pair(NamedTuple):
    """A target and a drafter for it, as twins and on the fast path: one set of weights."""

    target: HFTarget
    drafter: BlockDrafter
    fast_target: FastTarget | None  # None: the fast path does not compute this one
    fast_drafter: FastBlockDrafter | None
    reason: str | None  # why there is no fast path


def random_pair(shape: Shape, device: torch.device, dtype: torch.dtype, block_size: int = BLOCK_SIZE) -> Pair:
    """Both models, seeded. The twins' weights become views of the fast path's."""
    target = random_target(shape, device, dtype)
    drafter = random_drafter(shape, target, block_size)
    try:
        return Pair(target, drafter, FastTarget.of(target), FastBlockDrafter.of(drafter), None)
    except UserError as error:
        return Pair(target, drafter, None, None, str(error))


def random_target(shape: Shape, device: torch.device, dtype: torch.dtype, seed: int = 0) -> HFTarget:
    """A target that never stops."""
    config = AutoConfig.for_model(  # pyright: ignore[reportUnknownMemberType]
        shape.kind,
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=shape.positions,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
        tie_word_embeddings=shape.is_tied,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    with device:
        built = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")  # pyright: ignore[reportUnknownMemberType]
    model = cast(PreTrainedModel, built).eval().requires_grad_(False)
    fill(model, seed)
    return HFTarget(name=f"{shape.name} with random weights", model=model, stop_ids=frozenset())


def drafter_config(shape: Shape, block_size: int | None = None, family: Family = "dspark") -> BlockConfig:
    """The published design of a family at this target's width, in blocks of its own size or another."""
    raw = {
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.drafter_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab_size,
        "rms_norm_eps": 1e-6,
        "rope_theta": shape.rope_theta,
        "max_position_embeddings": shape.positions,
        "attention_bias": False,
        "block_size": block_size or BLOCK_SIZES[family],
        "mask_token_id": shape.vocab_size - 1,
        "target_layer_ids": list(taps_of(shape)),
        "num_target_layers": shape.num_layers,
        "dflash_config": METHODS[family],
    }
    config = READERS[family](raw, f"{family} for {shape.name}")
    assert isinstance(config, BlockConfig)
    return config


def random_drafter(
    shape: Shape, target: HFTarget, block_size: int | None = None, family: Family = "dspark"
) -> BlockDrafter:
    """A block drafter on the target's device, in its dtype, with its embedding and head."""
    with torch.device("meta"):
        model = build(drafter_config(shape, block_size, family))
    model = model.to(target.dtype).to_empty(device=target.device).eval().requires_grad_(False)
    fill(model, seed=1)
    drafter = loaded(f"{family} for {target.name}", model, target.vocabulary)
    assert isinstance(drafter, BlockDrafter)
    return drafter


def random_eagle3(shape: Shape, target: HFTarget) -> ChainDrafter:
    """An EAGLE-3 drafter of the published design at this target's width: one layer, a vocabulary of 32,000."""
    vocab = min(DRAFT_VOCAB, shape.vocab_size)
    config = Eagle3Config(
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        vocab_size=shape.vocab_size,
        rms_norm_eps=1e-6,
        rope_theta=shape.rope_theta,
        max_positions=shape.positions,
        attention_bias=False,
        target_layer_ids=published_taps(shape.num_layers),
        num_target_layers=shape.num_layers,
        target_hidden_size=shape.hidden_size,
        draft_vocab_size=vocab,
    )
    model = Eagle3(config).to(device=target.device, dtype=target.dtype).eval().requires_grad_(False)
    model.load_state_dict(maps_of(torch.arange(vocab), shape.vocab_size), strict=False)
    fill(model, seed=2)
    return ChainDrafter(name=f"eagle3 for {target.name}", family="eagle3", model=model, vocabulary=target.vocabulary)


@torch.no_grad()
def fill(module: nn.Module, seed: int) -> None:
    """Matrices keep the scale of their input, gains are 1, biases small: activations stay finite at any depth."""
    generator = torch.Generator(next(module.parameters()).device).manual_seed(seed)
    for name, weight in module.named_parameters():
        if weight.ndim > 1:
            weight.normal_(0, weight.shape[-1] ** -0.5, generator=generator)
        elif name.endswith("bias"):
            weight.normal_(0, 0.02, generator=generator)
        else:
            weight.fill_(1)
