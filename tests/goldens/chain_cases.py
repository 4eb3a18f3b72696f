"""What the golden tests of autoregressive families share: a note of every row a drafter makes."""

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from dloop.drafters.host import HostDrafter


@dataclass(frozen=True)
class Rows:
    """One call of the model's row arithmetic."""

    states: Tensor
    embedded: Tensor
    positions: Tensor
    out: Tensor


@dataclass
class Listener:
    """A drafter's model that notes its rows; it still does its work."""

    drafter: HostDrafter
    rows: list[Rows] = field(default_factory=list)

    def __post_init__(self) -> None:
        model, made = self.drafter.model, self.drafter.model.rows

        def noted(states, embedded, positions, attend):
            out = made(states, embedded, positions, attend)
            self.rows.append(Rows(states[0], embedded[0], positions[0], out[0]))
            return out

        model.rows = noted

    def tokens(self, rows: Rows) -> Tensor:
        """The tokens whose embeddings these rows read."""
        table = self.drafter.vocabulary.embedding
        return torch.cdist(rows.embedded, table).argmin(-1)


def gradient_norms(model: nn.Module) -> dict[str, float]:
    return {name: p.grad.norm().item() for name, p in model.named_parameters() if p.grad is not None}
