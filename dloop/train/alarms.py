"""What quietly spoils a training run, told while it can still be mended: frozen tensors, labels off by one."""

import torch
from jaxtyping import Bool, Int
from torch import Tensor, nn

from dloop.drafters.block import BlockModel
from dloop.drafters.chain import ChainModel
from dloop.targets.hf import BatchFeatures
from dloop.train.anchors import sample_anchors
from dloop.train.batch import TrainBatch
from dloop.train.block import states_at
from dloop.train.objective import Objective
from dloop.train.packed import PackedStages
from dloop.train.parallel import whole
from dloop.train.unroll import UnrollObjective
from dloop.vocabulary import told

STEPS = 8  # a tensor whose neighbour starts at zero has no gradient in the first step
ANCHORS = 64  # of a sequence: enough to tell, few enough to hold their logits
ALARMING, TIMES = 0.2, 2.0  # share of right guesses one place off; how many times those in place


class Frozen:
    """Watches which tensors have ever had a gradient."""

    def __init__(self, model: nn.Module) -> None:
        self.left = STEPS
        self.silent = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}

    def look(self) -> str | None:
        """After a step, with its gradients still there. A line for the user after the last look, if there is reason."""
        if not self.left:
            return None
        self.left -= 1
        for name, parameter in list(self.silent.items()):
            if parameter.grad is not None and bool(
                whole(parameter.grad).count_nonzero()
            ):  # sync, in the first steps alone
                del self.silent[name]
        if self.left or not self.silent:
            return None
        names = ", ".join(self.silent)
        return f"no gradient in {STEPS} steps for {names}: they stay as they are; a term of weight 0, or a fault"


@torch.no_grad()
def shift_of_labels(objective: Objective, batch: TrainBatch, features: BatchFeatures) -> int | None:
    """How far off the drafter's predictions stand, if they fit the token before (-1) or after (1) their label much
    better than the label itself: a drafter trained with other labels, or features of another position. None: no sign.
    """
    half = features.taps.dtype == torch.bfloat16 or features.last.dtype == torch.bfloat16
    with torch.autocast(batch.tokens.device.type, torch.bfloat16, enabled=half):
        guesses, places, counted = predictions(objective, batch, features)
    width = batch.tokens.shape[1]
    right: dict[int, float] = {}
    for shift in (-1, 0, 1):
        at = (places + shift).clamp(max=width - 1)
        same = guesses == batch.tokens.gather(1, at.flatten(1)).view_as(guesses)
        right[shift] = float(same[counted].float().mean()) if counted.any() else 0.0  # sync
    other = max((-1, 1), key=lambda shift: right[shift])
    return other if right[other] > max(ALARMING, TIMES * right[0]) else None


def predictions(
    objective: Objective, batch: TrainBatch, features: BatchFeatures
) -> tuple[Int[Tensor, "B r k"], Int[Tensor, "B r k"], Bool[Tensor, "B r k"]]:
    """(first stages' likeliest tokens given the true ones before, where their labels stand, which of them count)."""
    model, words, width = objective.model, objective.vocabulary, batch.tokens.shape[1]
    if isinstance(objective, UnrollObjective):
        assert isinstance(model, ChainModel)
        states = objective.begin(batch, features).forward()[:, : 8 * ANCHORS]
        places = (torch.arange(states.shape[1], device=states.device) + 2).expand(len(states), -1)[..., None]
        guesses = model.told(model.logits(states, words).argmax(-1))[..., None]
    else:
        assert isinstance(model, BlockModel)
        anchors = sample_anchors(batch.loss_mask, ANCHORS)
        stages = PackedStages.begin(model, words, batch.tokens, features.taps, anchors, offsets=batch.offsets)
        places = anchors.positions[..., None] + torch.arange(1, model.config.stage_len + 1, device=batch.tokens.device)
        previous = states_at(batch.tokens[..., None], places - 1)[..., 0]
        logits, _ = model.teacher_forced(stages.forward().flatten(0, 1), previous.flatten(0, 1), words)
        guesses = told(logits.argmax(-1), words.kept).view_as(places)
    marked = batch.loss_mask.gather(1, places.clamp(max=width - 1).flatten(1)).view_as(places)
    return guesses, places, marked & (places + 1 < width)
