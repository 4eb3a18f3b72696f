"""Tiny models and scripted doubles, for tests of dloop and of code built on it. All seeded; nothing is fetched."""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, cast

import torch
from torch import nn

from dloop.checkpoint import write_checkpoint
from dloop.detect import FAMILIES
from dloop.doubles import Script as Script
from dloop.doubles import ScriptedDrafter as ScriptedDrafter
from dloop.doubles import TableTarget as TableTarget
from dloop.doubles import chain as chain
from dloop.doubles import knowing as knowing
from dloop.doubles import replay as replay
from dloop.drafters.chain import ChainDrafter
from dloop.drafters.config import BlockConfig, DSparkConfig, MarkovHeadType
from dloop.drafters.dflash import DFlashConfig
from dloop.drafters.domino import DominoConfig
from dloop.drafters.draft_vocab import maps_of
from dloop.drafters.dspark import DSpark
from dloop.drafters.eagle3 import Eagle3, Eagle3Config
from dloop.drafters.families import build, loaded, write_config
from dloop.drafters.gemma4 import FAMILY as GEMMA_FAMILY
from dloop.drafters.gemma4 import Assistant, read_assistant
from dloop.drafters.host import HostDrafter
from dloop.drafters.mtp import FAMILY as MTP_FAMILY
from dloop.drafters.mtp import read_mtp
from dloop.errors import UserError
from dloop.export import Layout, in_layout
from dloop.lent import FULL, SLIDING
from dloop.lent import KINDS as KINDS_LENT
from dloop.loop import Session, Task, run_many
from dloop.targets.hf import HFTarget
from dloop.tiny import CHAIN_KINDS as CHAIN_KINDS
from dloop.tiny import HIDDEN_SIZE, PARTIAL, fill, settle_linear
from dloop.tiny import KINDS as KINDS
from dloop.tiny import WINDOW_KINDS as WINDOW_KINDS
from dloop.tiny import tiny_target as tiny_target
from dloop.train.batch import TrainBatch
from dloop.train.objective import ObjectiveSettings
from dloop.train.objectives import objective_of
from dloop.types import FinishReason, First, GapRows, Round


def tiny_drafter(
    target: HFTarget,
    *,
    family: str = "dspark",
    stage_len: int = 4,
    head: MarkovHeadType | None = "vanilla",
    gap_rows: GapRows = "producing",
) -> HostDrafter:
    """A random drafter for this target: it is hardly ever right. `head` is DSpark's, beside its confidence head.

    EAGLE-3 leaves every sixteenth token out of its vocabulary.
    """
    shape = dict[str, object](
        hidden_size=HIDDEN_SIZE,
        intermediate_size=2 * HIDDEN_SIZE,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        vocab_size=target.vocab_size,
        rms_norm_eps=1e-6,
        rope_theta=target.rope_theta,
        max_positions=target.context,
        attention_bias=False,
        target_layer_ids=(0, target.num_layers - 2),
        num_target_layers=target.num_layers,
    )
    if family == "eagle3":
        model = tiny_eagle3(shape).to(target.dtype)
    elif family == MTP_FAMILY:
        model = build(read_mtp(tiny_qwen35(target), "tiny")).to(target.dtype)
    elif family == GEMMA_FAMILY:
        model = build(read_assistant(tiny_assistant(target), "tiny").for_target(target.num_layers)).to(target.dtype)
    else:
        label_shift = int(family == "dflash")
        shape |= {"num_layers": 2, "mask_token_id": target.vocab_size - 1, "gap_rows": gap_rows}
        shape |= {"block_size": stage_len + label_shift, "label_shift": label_shift}
        model = build(tiny_config(family, shape, head)).to(target.dtype)
    fill(model, seed=1)
    if family == MTP_FAMILY:
        settle_linear(model)
    if family == GEMMA_FAMILY:
        settle_assistant(cast(Assistant, model))
    drafter = loaded(f"tiny {family}", model.eval().requires_grad_(False), target.vocabulary)
    return drafter.at_depth(stage_len) if isinstance(drafter, ChainDrafter) else drafter


def tiny_config(family: str, shape: dict[str, object], head: MarkovHeadType | None) -> BlockConfig:
    """The config of a tiny block drafter: what all share, and what the family adds."""
    match family:
        case "dflash":
            return DFlashConfig(**shape)  # pyright: ignore[reportArgumentType]
        case "domino":
            return DominoConfig(**shape, emb_dim=12, gru_hidden_dim=20, pure_draft_prefix_len=1)  # pyright: ignore[reportArgumentType]
        case "dspark":
            return DSparkConfig(
                **shape,  # pyright: ignore[reportArgumentType]
                markov_rank=0 if head is None else cast(int, shape["vocab_size"]),
                markov_head_type=head or "vanilla",
                confidence_head=True,
                confidence_with_markov=head is not None,
            )
        case _:
            raise UserError(f"family={family!r} is none of {', '.join(FAMILIES)}")


def tiny_qwen35(target: HFTarget) -> dict[str, object]:
    """A Qwen3.5 config of this target's sizes, for a head."""
    return {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "dtype": "float32",
        "hidden_size": HIDDEN_SIZE,
        "intermediate_size": 2 * HIDDEN_SIZE,
        "num_hidden_layers": target.num_layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": target.vocab_size,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": target.rope_theta, **PARTIAL},
        "max_position_embeddings": target.context,
        "mtp_num_hidden_layers": 1,
    }


def tiny_assistant(target: HFTarget) -> dict[str, object]:
    """A config of a Gemma 4 assistant for this target, narrower than it; in the released form."""
    sliding, full = (target.lends[kind] for kind in KINDS_LENT)
    return {
        "architectures": ["Gemma4UnifiedAssistantForCausalLM"],
        "model_type": "gemma4_unified_assistant",
        "dtype": "float32",
        "backbone_hidden_size": target.hidden_size,
        "use_ordered_embeddings": False,
        "tie_word_embeddings": True,
        "text_config": {
            "model_type": "gemma4_unified_text",
            "hidden_size": 24,
            "intermediate_size": 40,
            "num_hidden_layers": 3,
            "num_kv_shared_layers": 3,
            "layer_types": [SLIDING, SLIDING, FULL],
            "num_attention_heads": 4,
            "num_key_value_heads": sliding.heads,
            "num_global_key_value_heads": full.heads,
            "head_dim": sliding.head_dim,
            "global_head_dim": full.head_dim,
            "attention_k_eq_v": True,
            "hidden_activation": "gelu_pytorch_tanh",
            "vocab_size": target.vocab_size,
            "rms_norm_eps": 1e-6,
            "max_position_embeddings": target.context,
            "sliding_window": sliding.window,
            "rope_parameters": {
                SLIDING: {"rope_type": "default", "rope_theta": sliding.rope_theta},
                FULL: {
                    "rope_type": "proportional",
                    "rope_theta": full.rope_theta,
                    "partial_rotary_factor": full.turning,
                },
            },
        },
    }


@torch.no_grad()
def settle_assistant(model: Assistant) -> None:
    """The state counts beside the scaled embedding, and no token is preferred much."""
    model.pre_projection.weight[:, : model.config.backbone_size] *= 0.2
    model.model.embed_tokens.weight *= 0.3


def tiny_eagle3(shape: dict[str, object]) -> Eagle3:
    """A tiny EAGLE-3 model; -1 taps the embedding."""
    vocab_size = cast(int, shape["vocab_size"])
    taps = (-1, *cast(tuple[int, ...], shape["target_layer_ids"]))
    kept = torch.tensor([token for token in range(vocab_size) if token % 16 != 3])
    sizes = {"target_layer_ids": taps, "target_hidden_size": HIDDEN_SIZE, "draft_vocab_size": len(kept)}
    model = Eagle3(Eagle3Config(**shape | sizes))  # pyright: ignore[reportArgumentType]
    model.load_state_dict(maps_of(kept, vocab_size), strict=False)
    return model


@torch.no_grad()
def good_drafter(
    target: HFTarget, texts: Sequence[Sequence[int]], *, stage_len: int = 4, gap_rows: GapRows = "producing"
) -> HostDrafter:
    """A DSpark drafter that is mostly right, and sure, on these texts: its Markov head holds their successors."""
    drafter = tiny_drafter(target, stage_len=stage_len, gap_rows=gap_rows)
    model = cast(DSpark, drafter.model)
    markov = model.markov_head
    assert markov is not None
    counts = torch.full((target.vocab_size, target.vocab_size), 1e-3)
    for previous, following in (pair for text in texts for pair in itertools.pairwise(text)):
        counts[previous, following] += 1
    markov.markov_w1.weight.copy_(torch.eye(target.vocab_size))
    markov.markov_w2.weight.copy_(counts.log().T)
    model.norm.weight.mul_(0.05)  # its own states add a little noise
    return drafter


def taught_drafter(
    target: HFTarget,
    texts: Sequence[Sequence[int]],
    *,
    family: str,
    stage_len: int = 3,
    steps: int = 60,
    gap_rows: GapRows = "producing",
) -> HostDrafter:
    """A drafter trained on these texts (host and loop stage in turn) until it is mostly right on them."""
    drafter = tiny_drafter(target, family=family, stage_len=stage_len, gap_rows=gap_rows)
    teach(drafter, target, texts, steps)
    return drafter


def teach(
    drafter: HostDrafter, target: HFTarget, texts: Sequence[Sequence[int]], steps: int, rate: float = 1e-2
) -> None:
    """Train a drafter in place."""
    lengths = torch.tensor([len(text) for text in texts], device=target.device)
    rows = [torch.tensor(list(text), device=target.device) for text in texts]
    tokens = nn.utils.rnn.pad_sequence(rows, batch_first=True)
    mask = torch.arange(tokens.shape[1], device=target.device) < lengths[:, None]
    batch = TrainBatch(tokens, mask, lengths, torch.zeros_like(lengths))
    settings = ObjectiveSettings(num_anchors=tokens.shape[1], loss_decay_gamma=None)
    objective = objective_of(drafter.model.requires_grad_(True), drafter.vocabulary, settings)
    features = target.features(tokens, drafter.taps)
    optimizer = torch.optim.Adam(drafter.model.parameters(), lr=rate)
    for step in range(steps):
        optimizer.zero_grad()
        objective(batch, features, depth_of(drafter, step)).total.backward()
        optimizer.step()
    drafter.model.requires_grad_(False)


def depth_of(drafter: HostDrafter, step: int) -> int:
    """How deep a step goes: the host and a loop stage in turn; or an unroll of one, two or three stages."""
    return drafter.stage_len * (1 + step % 3) if isinstance(drafter, ChainDrafter) else step % 2


def write_target(target: HFTarget, folder: Path, max_shard_size: str = "1GB") -> Path:
    """Save a target in Hugging Face's layout; give the folder."""
    target.model.save_pretrained(folder, max_shard_size=max_shard_size)  # pyright: ignore[reportUnknownMemberType]
    return folder


def write_drafter(drafter: HostDrafter, folder: Path, layout: Layout, max_shard_bytes: int | None = None) -> Path:
    """Save a drafter in a published layout of its family; see `dloop.export`."""
    config = write_config(drafter.config, str(drafter.vocabulary.head.dtype).removeprefix("torch."))
    tensors = dict(drafter.model.state_dict())
    write_checkpoint(folder, *in_layout(layout, config, tensors, drafter.vocabulary), max_shard_bytes)
    return folder


class Decoded(NamedTuple):
    """A finished sequence."""

    tokens: list[int]
    rounds: list[Round]
    finish: FinishReason | None


def gather(tasks: Sequence[Task], session: Session) -> list[Decoded]:
    """Run sequences together to their ends."""
    texts = [Decoded([], [], None) for _ in tasks]
    for index, event in run_many(tasks, session):
        texts[index].tokens.extend([event.token] if isinstance(event, First) else event.emitted)
        if isinstance(event, Round):
            texts[index].rounds.append(event)
        texts[index] = texts[index]._replace(finish=event.finish)
    return texts
