"""Work on the vocabulary in pieces: the same values and gradients as all at once, and no tensor of all rows x words."""

from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dloop.bench.training import Kept
from dloop.detect import BLOCK_FAMILIES, CHAIN_FAMILIES
from dloop.drafters.gemma4_config import FAMILY as GEMMA_FAMILY
from dloop.testing import tiny_drafter, tiny_target
from dloop.train import pieces
from dloop.train.anchors import sample_anchors
from dloop.train.batch import TrainBatch
from dloop.train.objective import ObjectiveSettings
from dloop.train.objectives import objective_of
from dloop.train.pieces import Worked, even, in_pieces, together

KINDS = {family: "qwen3" for family in (*BLOCK_FAMILIES, *CHAIN_FAMILIES)} | {GEMMA_FAMILY: "gemma4"}
VOCAB, ROWS = 67, 80  # fewer words than rows in a piece, so that no weight can be taken for logits


class Largest(TorchDispatchMode):
    """Notes the most rows of any tensor made with a float for every word."""

    def __init__(self, words: int) -> None:
        super().__init__()
        self.words, self.rows = words, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, tuple | list) else [made]:
            if isinstance(tensor, torch.Tensor) and tensor.is_floating_point() and tensor.ndim > 1:
                if tensor.shape[-1] == self.words:  # a weight that is expanded looks larger than what is stored
                    stored = tensor.untyped_storage().nbytes() // tensor.element_size()
                    self.rows = max(self.rows, min(tensor.numel(), stored) // self.words)
        return made


def setting(family: str, dtype: torch.dtype):
    """(objective, batch, its features, anchors) of a pair; some rows weigh nothing."""
    target = tiny_target(KINDS[family], num_layers=4, seed=3, vocab_size=VOCAB)
    target.model.to(dtype)
    drafter = tiny_drafter(target, family=family)
    objective = objective_of(drafter.model.to(dtype).requires_grad_(True), target.vocabulary, ObjectiveSettings())
    generator = torch.Generator().manual_seed(4)
    tokens = torch.randint(3, VOCAB, (3, 96), generator=generator)
    lengths = torch.tensor([96, 70, 41])
    mask = (torch.arange(96) >= 5) & (torch.arange(96) < lengths[:, None]) & (torch.arange(96) % 11 != 7)
    batch = TrainBatch(tokens, mask, lengths, torch.zeros(3, dtype=torch.long))
    anchors = sample_anchors(mask, 48, torch.rand(3, 95, generator=generator)) if family in BLOCK_FAMILIES else None
    return objective, batch, target.features(tokens, drafter.taps), anchors


def measured(objective, batch, features, depth, anchors, summed):
    """(loss, terms, gradients, most rows of logits at once) of one forward and backward."""
    given: list[torch.Tensor] = []

    def noting(work, parts, parameters):
        for part in parts:
            part.retain_grad()
        given.extend(parts)
        return summed(work, parts, parameters)

    objective.model.zero_grad()
    objective.summed = noting
    with Largest(VOCAB if objective.model.config.family != "eagle3" else len(objective.model.kept)) as largest:
        loss = objective(batch, features, depth, anchors)
        (3 * loss.total).backward()
    terms = [loss.host.terms, loss.host.weight, loss.loop.terms, loss.loop.weight]
    steps, axis = (1, 0) if anchors is not None else (depth, 1)  # an unroll's pieces go round its steps
    by_step = [[part.grad for part in given[step::steps]] for step in range(steps)]
    gradients = {f"states {step}": torch.cat(parts, axis) for step, parts in enumerate(by_step)}
    if features.last.dtype == torch.float64:  # in float32 deep layers tell their own rounding, not that of the pieces
        gradients |= {name: p.grad.clone() for name, p in objective.model.named_parameters() if p.grad is not None}
    return loss.total.detach(), terms, gradients, largest.rows


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-12)], ids=["32", "64"])
@pytest.mark.parametrize("family", KINDS)
def test_pieces_give_the_values_and_gradients_of_the_whole(family, dtype, tolerance, monkeypatch):
    objective, batch, features, anchors = setting(family, dtype)
    if family == "domino":
        objective.set_lambda(0.3)  # both terms learn
    depth = 2 if anchors is not None else 2 * objective.model.config.stage_len
    monkeypatch.setattr(pieces, "ROWS", ROWS)
    found = measured(objective, batch, features, depth, anchors, in_pieces)
    monkeypatch.setattr(pieces, "ROWS", 10**6)
    whole = measured(objective, batch, features, depth, anchors, together)
    assert abs(found[0] - whole[0]) <= tolerance * abs(whole[0])
    for mine, theirs in zip(found[1], whole[1], strict=True):
        assert torch.allclose(mine, theirs, rtol=tolerance, atol=0)
    assert found[2].keys() == whole[2].keys() and (dtype == torch.float32 or len(found[2]) > 10)
    for name, gradient in whole[2].items():
        assert (found[2][name] - gradient).abs().max() <= tolerance * max(1.0, gradient.abs().max().item()), name
        assert gradient.abs().max() > 0, name
    all_rows = 3 * 48 * objective.model.config.stage_len if anchors is not None else 3 * 96
    assert found[3] <= ROWS < all_rows <= whole[3], "the dense twin holds what the pieces must not"


@pytest.mark.parametrize("family", KINDS)
def test_gradient_checkpointing_keeps_less_and_changes_no_bit(family):
    found = []
    for recompute in (False, True):
        objective, batch, features, anchors = setting(family, torch.float32)
        objective.settings = replace(objective.settings, recompute=recompute)
        kept = Kept([])
        with kept:
            loss = objective(batch, features, 2 if anchors is not None else 12, anchors)
        loss.total.backward()
        gradients = [p.grad for p in objective.model.parameters() if p.grad is not None]
        found.append((loss.total.detach(), gradients, kept.most))
    (plain, before, much), (again, after, little) = found
    assert torch.equal(plain, again) and len(before) == len(after) > 5
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    assert little < 0.6 * much


def test_a_bfloat16_step_makes_no_large_float_either(monkeypatch):
    objective, batch, features, anchors = setting("dspark", torch.float32)
    monkeypatch.setattr(pieces, "ROWS", ROWS)
    half = replace(features, taps=features.taps.bfloat16(), last=features.last.bfloat16())
    words = objective.vocabulary
    objective.vocabulary = replace(words, embedding=words.embedding.bfloat16(), head=words.head.bfloat16())
    with torch.autocast("cpu", torch.bfloat16):
        assert measured(objective, batch, half, 2, anchors, in_pieces)[3] <= ROWS


def test_what_learns_nothing_is_only_summed():
    states = torch.arange(6.0).view(6, 1)
    done = in_pieces(lambda number, piece: Worked(piece.sum() * number, piece.sum()[None]), states.split(2), [])
    assert done.value == 0 * 1 + 1 * 5 + 2 * 9 and done.terms == 15 and not done.value.requires_grad


def test_gradients_scale_with_what_comes_from_above_and_skip_the_unused():
    states, weight, idle = (torch.ones(shape, requires_grad=True) for shape in ((4, 2), (2,), (3,)))

    def work(number, piece):
        return Worked((piece @ weight).pow(2).sum(), weight.sum()[None])

    done = in_pieces(work, states.split(3), [weight, idle])
    (done.value * 5).backward(retain_graph=True)
    first = states.grad.clone()
    (done.value * 5).backward()
    assert torch.equal(first, torch.full((4, 2), 5 * 4.0)) and torch.equal(states.grad, 2 * first)
    assert torch.equal(weight.grad, torch.full((2,), 2 * 5 * 16.0)) and idle.grad is None
    assert not done.terms.requires_grad


@pytest.mark.parametrize(
    ("count", "most", "sizes"),
    [(512, 73, [64] * 8), (10, 4, [2] * 5), (7, 3, [3, 2, 2]), (3, 9, [3]), (1, 1, [1]), (0, 5, [])],
)
def test_pieces_are_equal_where_few_more_make_them_so(count, most, sizes):
    assert even(count, most) == sizes
