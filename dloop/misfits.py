"""Whether a drafter fits a target: what its config says of the target against what the target is."""

from collections.abc import Iterator
from typing import NamedTuple

from dloop.checkpoint import brief
from dloop.drafters.config import BlockConfig
from dloop.drafters.host import HostConfig
from dloop.drafters.mtp import MODEL_TYPES, MTPConfig
from dloop.errors import UserError
from dloop.targets.hf import HFTarget


class Misfit(NamedTuple):
    """Why a drafter does not fit a target: the key of its config.json, and the whole message."""

    key: str
    message: str


def misfits(config: HostConfig, target: HFTarget, name: str) -> Iterator[Misfit]:
    """A drafter fits one target only: every mismatch would lower acceptance silently."""
    if config.vocab_size != target.vocab_size:
        yield Misfit(
            "vocab_size",
            f"{name} has a vocabulary of {config.vocab_size} tokens, {target.name} one of {target.vocab_size}; "
            "they must be the same: use the drafter trained for this target",
        )
    if config.feature_size != target.hidden_size:
        yield Misfit(
            "hidden_size",
            f"{name} expects hidden size {config.feature_size}, {target.name} has {target.hidden_size}; use its target",
        )
    if config.num_target_layers != target.num_layers:
        yield Misfit(
            "num_target_layers",
            f"{name} was trained on a target of {config.num_target_layers} layers, {target.name} has "
            f"{target.num_layers}; use the drafter trained for this target",
        )
    taps = config.target_layer_ids
    if config.reads_layers and (
        not taps or list(taps) != sorted(set(taps)) or taps[-1] >= target.num_layers - 1 or taps[0] < -1
    ):
        yield Misfit(
            "target_layer_ids",
            f"{name} taps the layers {brief(list(taps))} of a target with layers 0..{target.num_layers - 1}; taps must "
            f"increase and stay below {target.num_layers - 1} (the last layer's state is normed): use its target",
        )
    if isinstance(config, MTPConfig):
        yield from not_its_head(config, target, name)
    yield from turned_otherwise(config, target, name)
    if isinstance(config, BlockConfig) and config.mask_token_id >= config.vocab_size:
        yield Misfit(
            "mask_token_id",
            f"{name}: mask_token_id={config.mask_token_id} is out of range; the vocabulary has "
            f"{config.vocab_size} tokens: correct config.json",
        )


def not_its_head(config: MTPConfig, target: HFTarget, name: str) -> Iterator[Misfit]:
    """A built-in head goes on as the layers of its target do, with its embedding and its output matrix."""
    if (kind := target.config.model_type) not in MODEL_TYPES:
        yield Misfit(
            "model_type",
            f"{name} is a head of Qwen3.5, {target.name} is a {kind} model; use a drafter trained for this target",
        )
    elif (theirs := target.config.rope_parameters["partial_rotary_factor"]) != config.partial_rotary_factor:
        yield Misfit(
            "partial_rotary_factor",
            f"{name} turns {config.partial_rotary_factor:g} of each head with the position, {target.name} {theirs:g}; "
            "correct partial_rotary_factor in its config.json, or use its target",
        )


def turned_otherwise(config: HostConfig, target: HFTarget, name: str) -> Iterator[Misfit]:
    """RoPE must be the target's; a drafter that reads its target's keys must find them as it expects them."""
    if config.borrows:
        yield from not_lent(config, target, name)
    elif config.rope_theta != target.rope_theta and not config.own_rope:
        yield Misfit(
            "rope_theta",
            f"{name} has RoPE base {config.rope_theta:g}, {target.name} {target.rope_theta:g}; a drafter run "
            "with another base than it was trained with accepts almost nothing: correct rope_theta in its config.json"
            + ("" if isinstance(config, BlockConfig) else ", or name the right one (--draft-rope-theta)"),
        )


def not_lent(config: HostConfig, target: HFTarget, name: str) -> Iterator[Misfit]:
    """Keys and values that are not there, or of another shape or rotation."""
    for kind, wanted in config.borrows.items():
        given = target.lends.get(kind)
        if given is None:
            yield Misfit(
                "model_type",
                f"{name} reads keys and values of {kind} that a Gemma 4 target lends, {target.name} lends none; use "
                "the target it was trained for",
            )
            return
        for key in ("heads", "head_dim", "window", "rope_theta", "turning"):
            if (ours := getattr(wanted, key)) != (theirs := getattr(given, key)):
                yield Misfit(
                    "text_config",
                    f"{name} expects {key} {ours:g} of {kind}, {target.name} has {theirs:g}; use the drafter trained "
                    "for this target",
                )


def check_pair(config: HostConfig, target: HFTarget, name: str) -> None:
    """Refuse a drafter at its first misfit."""
    for misfit in misfits(config, target, name):
        raise UserError(misfit.message)
