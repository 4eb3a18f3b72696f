"""AdamW on float32 master weights, warm-up then cosine, global-norm clipping. Nothing here waits for the device."""

import math
from collections.abc import Iterable

import torch
from jaxtyping import Float
from torch import Tensor, nn

from dloop.train.parallel import whole


class Optimizer:
    """One optimiser step: clip, update, clear. The learning rate lives on the device, so that graphs see it."""

    def __init__(self, parameters: Iterable[nn.Parameter], max_grad_norm: float) -> None:
        self.parameters = [p for p in parameters if p.requires_grad]
        self.max_grad_norm = max_grad_norm
        device = self.parameters[0].device
        self.rate = torch.zeros((), device=device)
        self.adam = torch.optim.AdamW(
            self.parameters, lr=self.rate, weight_decay=0.0, fused=True, capturable=device.type == "cuda"
        )

    def set_rate(self, rate: float) -> None:
        self.rate.fill_(rate)

    def step(self) -> Float[Tensor, ""]:
        """Update from the gradients at hand; returns their norm before clipping."""
        norm = nn.utils.clip_grad_norm_(self.parameters, self.max_grad_norm)
        self.adam.step()
        return whole(norm)

    def clear(self) -> None:
        self.adam.zero_grad(set_to_none=True)


def learning_rate(step: int, num_steps: int, peak: float, warmup_ratio: float) -> float:
    """Rate of a 0-based step: linear warm-up over int(ratio * steps), then a cosine to 0."""
    warmup = int(warmup_ratio * num_steps)
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = (step - warmup) / max(1, num_steps - warmup)
    return peak * 0.5 * (1 + math.cos(math.pi * progress))
