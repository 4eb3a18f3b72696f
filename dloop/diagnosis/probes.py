"""What is tried: one thing changed at a time, each with the remedy if it is the answer."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import combinations

import torch
from jaxtyping import Float
from torch import Tensor

from dloop.diagnosis.findings import Cause
from dloop.diagnosis.setup import Setup, Tap
from dloop.targets.hf import HFTarget
from dloop.types import Vocabulary
from dloop.vocabulary import narrowed

BASES = (1e4, 5e5, 1e6, 1e7)  # RoPE bases in use, beside the target's own
TAP_OFFSETS = (-1, 1, -2, 2)
MANY_LAYERS = 6  # above them only neighbours are swapped


@dataclass(frozen=True, kw_only=True)
class Probe:
    """A setup that differs in one thing."""

    cause: Cause
    change: str
    remedy: str
    setup: Setup


def all_probes(setup: Setup, target: HFTarget, mask_ids: list[int]) -> list[Probe]:
    """Everything that can be tried on this pair; `mask_ids` are the other ids that may have been the mask."""
    probes = [*tap_probes(setup, target), *norm_probes(setup), *rope_probes(setup, target), *position_probes(setup)]
    probes += [*mask_probes(setup, mask_ids), label_probe(setup), *order_probes(setup)]
    return probes + list(vocabulary_probes(setup, target))


def tap_probes(setup: Setup, target: HFTarget) -> Iterator[Probe]:
    """All taps some layers lower and higher, in reverse, and after the target's final norm."""
    layers = [tap.layer for tap in setup.taps]
    for step in TAP_OFFSETS:
        moved = [layer + step for layer in layers]
        if min(moved) < -1 or max(moved) >= target.num_layers:
            continue
        yield Probe(
            cause="taps",
            change=f"taps {step:+d}: {moved}",
            remedy=f"set target_layer_ids in config.json to {moved} (a tap is the output of layer id, counted from 0)"
            if max(moved) < target.num_layers - 1
            else f"it was trained on layers {moved}, the last of which only its own training code gives: train it anew",
            setup=replace(setup, taps=tuple(Tap(layer) for layer in moved)),
        )
    if len(layers) > 1:
        ascending = layers == sorted(layers)
        yield Probe(
            cause="tap_order",
            change=f"taps in reverse: {layers[::-1]}",
            remedy="the column slabs of fc.weight stand in reverse order: reverse them in model.safetensors"
            if ascending
            else f"set target_layer_ids in config.json to {layers[::-1]}",
            setup=replace(setup, taps=setup.taps[::-1]),
        )
    yield from normed_probes(setup, target)


def normed_probes(setup: Setup, target: HFTarget) -> Iterator[Probe]:
    """The last tap as hidden states of transformers give it where it is the last layer: after the final norm."""
    remedy = "it was trained on normed target states, which decoding does not hand out: train it on raw layer outputs"
    last = setup.taps[-1]
    yield Probe(
        cause="norm",
        change=f"the last tap (layer {last.layer}) after the target's final norm",
        remedy=remedy,
        setup=replace(setup, taps=(*setup.taps[:-1], Tap(last.layer, normed=True))),
    )
    moved = [tap.layer + 1 for tap in setup.taps]
    if moved[-1] == target.num_layers - 1:
        yield Probe(
            cause="taps",
            change=f"taps +1: {moved}, the last after the target's final norm",
            remedy=remedy,
            setup=replace(setup, taps=(*(Tap(layer) for layer in moved[:-1]), Tap(moved[-1], normed=True))),
        )


def norm_probes(setup: Setup) -> Iterator[Probe]:
    """`hidden_norm` left out, and with other gains."""
    gain = setup.model.hidden_norm.weight.detach()
    wrong = "hidden_norm.weight in model.safetensors is not what it was trained with"
    gains: list[tuple[str, Float[Tensor, " D"] | None, str]] = [
        ("hidden_norm left out", None, "it was trained without hidden_norm: train it anew with the norm in place"),
        ("hidden_norm with a gain of ones", torch.ones_like(gain), f"{wrong}: ones fit better; export it again"),
        (
            "hidden_norm with its gain scaled to 1",
            gain / gain.float().square().mean().sqrt().clamp(min=1e-6).to(gain.dtype),
            f"{wrong}: its scale is off; export it again",
        ),
        ("hidden_norm with its gain + 1", gain + 1, f"{wrong}: it is stored less 1, as Gemma's norms are; add 1"),
    ]
    for change, other, remedy in gains:
        yield Probe(cause="norm", change=change, remedy=remedy, setup=setup.gained(other))


def rope_probes(setup: Setup, target: HFTarget) -> Iterator[Probe]:
    """Other RoPE bases."""
    config = setup.model.config
    for base in dict.fromkeys((target.rope_theta, *BASES)):
        if base != config.rope_theta:
            yield Probe(
                cause="rope_theta",
                change=f"RoPE base {base:g}",
                remedy=f"set rope_theta (and rope_parameters.rope_theta) in config.json to {base:g}",
                setup=setup.configured(replace(config, rope_theta=base)),
            )


def position_probes(setup: Setup) -> Iterator[Probe]:
    """Block rows one position earlier and later, against the context."""
    for offset in (-1, 1):
        yield Probe(
            cause="positions",
            change=f"rotary positions of the block rows {offset:+d}",
            remedy="it was trained with other positions of its rows against the context (row 0 stands at the "
            "anchor's own): correct the positions in its training code and train it anew",
            setup=replace(setup, row_offset=setup.row_offset + offset),
        )


def mask_probes(setup: Setup, mask_ids: list[int]) -> Iterator[Probe]:
    """Other ids in the rows that wait for a token."""
    config = setup.model.config
    for token in dict.fromkeys(mask_ids):
        if token != config.mask_token_id and 0 <= token < config.vocab_size:
            yield Probe(
                cause="mask_token_id",
                change=f"mask token {token}",
                remedy=f"set mask_token_id in config.json to {token}, or to the id it was trained with if you know it",
                setup=setup.configured(replace(config, mask_token_id=token)),
            )


def label_probe(setup: Setup) -> Probe:
    """Rows read with the other label shift."""
    config = setup.model.config
    shift = 1 - config.label_shift
    meaning = "same-position" if shift else "next-token"
    remedies = {
        "dflash": 'its rows carry next-token labels, as DeepSpec\'s "DFlash" does: in config.json set architectures to '
        '["DSparkDraftModel"], projector_type to "dspark" and markov_rank to 0',
        "domino": f"set shift_label in config.json to {'false' if shift else 'true'}",
    }
    return Probe(
        cause="label_shift",
        change=f"label shift {shift}: {meaning} rows",
        remedy=remedies.get(
            config.family, f"it was trained with {meaning} labels, which DSpark has not: train it anew"
        ),
        setup=setup.configured(replace(config, label_shift=shift)),
    )


def order_probes(setup: Setup) -> Iterator[Probe]:
    """Layers swapped two at a time, reversed, and moved round by one."""
    count = setup.model.config.num_layers
    whole = list(range(count))
    orders = [whole[::-1], whole[1:] + whole[:1], whole[-1:] + whole[:-1]]
    for first, second in combinations(whole, 2):
        if count <= MANY_LAYERS or second == first + 1:
            order = whole.copy()
            order[first], order[second] = second, first
            orders.append(order)
    for order in dict.fromkeys(map(tuple, orders)):
        if order != tuple(whole):
            yield Probe(
                cause="layer_order",
                change=f"layers in the order {list(order)}",
                remedy=f"layers.N.* in model.safetensors are numbered wrongly: in order they belong under the numbers "
                f"{[order.index(index) for index in whole]}",
                setup=setup.reordered(list(order)),
            )


def vocabulary_probes(setup: Setup, target: HFTarget) -> Iterator[Probe]:
    """The target's embedding and head in place of the drafter's own; without its own, a head tied to the embedding."""
    own, shared = setup.vocabulary, narrowed(target.vocabulary, setup.model.kept)
    others: list[tuple[str, Vocabulary, str]] = []
    drop = "remove {} from model.safetensors, so that the target's is used, or fetch the checkpoint again"
    if own.embedding is not shared.embedding:
        other = replace(own, embedding=shared.embedding)
        others.append(("the target's embedding", other, drop.format("embed_tokens.weight and lm_head.weight")))
    if own.head is not shared.head and not torch.equal(own.head, shared.head):
        other = replace(own, head=shared.head)
        others.append(("the target's head", other, drop.format("lm_head.weight and embed_tokens.weight")))
    if len(others) == 2:
        both = drop.format("embed_tokens.weight and lm_head.weight")
        others.append(("the target's embedding and head", shared, both))
    if not others and target.vocabulary.embedding is not target.vocabulary.head:
        tied = narrowed(Vocabulary(embedding=own.embedding, head=own.embedding), setup.model.kept)
        others.append(
            ("the embedding as head", tied, "it was trained with a head tied to the embedding: train it anew")
        )
    for change, vocabulary, remedy in others:
        yield Probe(cause="vocabulary", change=change, remedy=remedy, setup=replace(setup, vocabulary=vocabulary))
