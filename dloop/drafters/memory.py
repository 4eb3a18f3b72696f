"""Keys and values of one sequence's drafter: committed rows, then a speculative tail."""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor


class KeyValues(NamedTuple):
    """One layer's keys (normed, rotated) and values."""

    keys: Float[Tensor, "B Hkv n d"]
    values: Float[Tensor, "B Hkv n d"]


class SlotMemory:
    """Rows of all layers in one growing tensor. `append` writes the tail, `commit` keeps it, `drop_tail` forgets it."""

    def __init__(self) -> None:
        self._rows: Float[Tensor, "L 2 Hkv capacity d"] | None = None
        self.committed = 0
        self.length = 0

    def append(self, layers: list[KeyValues]) -> None:
        """Write rows after the tail; each layer's tensors have one batch entry."""
        count = layers[0].keys.shape[2]
        rows = self._room(layers, self.length + count)
        for index, layer in enumerate(layers):
            rows[index, 0, :, self.length : self.length + count] = layer.keys[0]
            rows[index, 1, :, self.length : self.length + count] = layer.values[0]
        self.length += count

    def commit(self, short: int = 0) -> None:
        """Keep the tail, all but its last `short` rows."""
        self.committed = self.length - short

    def keep(self, start: int, rows: list[int]) -> None:
        """Of what lies from row `start` on keep these rows (counted from row 0), moved together."""
        assert self._rows is not None and all(start <= row < self.length for row in rows)
        self._rows[:, :, :, start : start + len(rows)] = self._rows[:, :, :, rows]
        self.length = start + len(rows)

    def drop_tail(self) -> None:
        self.length = self.committed

    def layers(self) -> list[KeyValues]:
        """Views of everything stored, tail included."""
        assert self._rows is not None
        return [KeyValues(pair[0, None, :, : self.length], pair[1, None, :, : self.length]) for pair in self._rows]

    def _room(self, layers: list[KeyValues], needed: int) -> Float[Tensor, "L 2 Hkv capacity d"]:
        """Grow by doubling, so that a long text copies each row a bounded number of times."""
        old = self._rows
        if old is None or old.shape[3] < needed:
            _, heads, _, dim = layers[0].keys.shape
            new = layers[0].keys.new_empty(len(layers), 2, heads, max(2 * needed, 256), dim)
            if old is not None:
                new[:, :, :, : self.length] = old[:, :, :, : self.length]
            self._rows = new
            return new
        return old


def join(first: KeyValues, second: KeyValues) -> KeyValues:
    """The rows of one, then those of the other."""
    return KeyValues(torch.cat([first.keys, second.keys], 2), torch.cat([first.values, second.values], 2))
