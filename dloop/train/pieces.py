"""Work on the vocabulary a piece of the rows at a time: no tensor of all rows times all words is ever made.

A piece's gradients are made right after its value, while its logits still exist, and scaled when the backward pass asks
for them: nothing is computed twice and nothing of a piece is kept. `together` is the plain twin.
Source of the idea: Liger Kernel's fused linear cross-entropy.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

T = TypeVar("T")
ROWS = 512  # of one piece: as few as still make a full matrix product


class Worked(NamedTuple):
    """What the rows came to."""

    value: Float[Tensor, ""]  # what is minimised; gradients flow through it alone
    terms: Float[Tensor, " t"]  # what is reported


Work = Callable[[int, Tensor], Worked]  # from a piece's number and its states


def in_pieces(work: Work, pieces: Sequence[Tensor], parameters: Sequence[Tensor]) -> Worked:
    """The sum of the work on all pieces. `parameters`: whatever else the work may read that learns."""
    if not (torch.is_grad_enabled() and any(x.requires_grad for x in (*pieces, *parameters))):
        return together(work, pieces, parameters)
    return Worked(*Early.apply(work, len(pieces), *pieces, *parameters))


def together(work: Work, pieces: Sequence[Tensor], parameters: Sequence[Tensor]) -> Worked:
    """The same, with whatever autograd keeps of every piece."""
    done = [work(number, piece) for number, piece in enumerate(pieces)]
    value, terms = (torch.stack(parts).sum(0) for parts in zip(*done, strict=True))
    return Worked(value, terms.detach())


class Early(torch.autograd.Function):
    """A sum over pieces that makes its gradients on the way."""

    @staticmethod
    def forward(ctx: Any, work: Work, count: int, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        found: list[Tensor | None] = [None] * len(inputs)
        learning = [number for number in range(count, len(inputs)) if inputs[number].requires_grad]
        done: list[Worked] = []
        for number in range(count):
            piece = inputs[number].detach().requires_grad_()
            with torch.enable_grad():
                one = work(number, piece.view_as(piece))  # hooks of FLOP counters do not take leaves here
            wanted = [piece, *(inputs[index] for index in learning)]
            gradients = torch.autograd.grad(one.value, wanted, allow_unused=True)
            for index, gradient in zip((number, *learning), gradients, strict=True):
                found[index] = added(found[index], gradient)
            done.append(Worked(one.value.detach(), one.terms.detach()))
        ctx.save_for_backward(*found)
        value, terms = (torch.stack(parts).sum(0) for parts in zip(*done, strict=True))
        ctx.mark_non_differentiable(terms)
        return value, terms

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        scaled = (None if gradient is None else gradient * upstream[0] for gradient in ctx.saved_tensors)
        return None, None, *scaled


def added(sum_before: Tensor | None, gradient: Tensor | None) -> Tensor | None:
    """Both gradients; None is none."""
    if gradient is None or sum_before is None:
        return sum_before if gradient is None else gradient
    return sum_before.add_(gradient)


def even(count: int, most: int) -> list[int]:
    """Sizes of pieces of at most so many: equal ones where twice as many pieces at most make them so, as a compiler
    likes them; else of two neighbouring sizes.
    """
    if not count:
        return []
    least = -(-count // most)
    pieces = next((n for n in range(least, min(2 * least, count) + 1) if count % n == 0), least)
    return [count // pieces + (index < count % pieces) for index in range(pieces)]


def recomputed(function: Callable[..., T], *given: object) -> T:
    """Call it, and once more for the gradient in place of keeping what it computed."""
    return checkpoint(  # pyright: ignore[reportUnknownVariableType, reportReturnType]
        function, *given, use_reentrant=False, preserve_rng_state=False
    )
