"""One forward of a stack of layers over flat rows, and the static store it reads and writes."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from dloop.fast.graphs import cut
from dloop.fast.ops import Ops
from dloop.fast.plain import PlainOps
from dloop.fast.rows import RowBatch
from dloop.fast.weights import Stack
from dloop.kernels.shapes import Heads, Store

CUTS = (0, 6, 42)  # layers after which a graph ends: a layer runs six times as long as its launch takes the host
GRAIN = 256  # capacities are multiples of this


class PrefillOps(PlainOps):
    """A whole prompt of one sequence: PyTorch's causal attention over the rows themselves."""

    def attend(self, q: Float[Tensor, "R A"], store: Store, heads: Heads, batch: RowBatch) -> Float[Tensor, "R A"]:
        """Causal attention; the rows' keys and values are the store's first ones."""
        (run,) = batch.runs
        asked = q.view(1, run.count, heads.queries, heads.dim).transpose(1, 2)
        keys, values = store.k[run.slot, None, :, : run.count], store.v[run.slot, None, :, : run.count]
        mixed = F.scaled_dot_product_attention(asked, keys, values, is_causal=True, enable_gqa=True)
        return mixed[0].transpose(0, 1).flatten(1)


@dataclass
class Memory:
    """Keys and values of all layers and slots, and how many rows of each slot are stored. Grows by reallocation."""

    keys: Float[Tensor, "L slots H capacity d"]
    values: Float[Tensor, "L slots H capacity d"]

    @classmethod
    def empty(cls, stack: Stack, slots: int, context: int) -> "Memory":
        """Room for this many slots of this many rows."""
        heads, gain = stack.heads, stack.gain
        shape = (len(stack.layers), slots, heads.keys, -(-context // GRAIN) * GRAIN, heads.dim)
        return cls(keys=gain.new_zeros(shape), values=gain.new_zeros(shape))

    @property
    def slots(self) -> int:
        return self.keys.shape[1]

    @property
    def capacity(self) -> int:
        return self.keys.shape[3]

    def layer(self, index: int) -> Store:
        """One layer's part."""
        return Store(self.keys[index], self.values[index])

    def make_room(self, slot: int, rows: int) -> bool:
        """Whether the store had to move to hold `rows` rows of this slot; it then doubles."""
        slots, capacity = self.slots, self.capacity
        if slot < slots and rows <= capacity:
            return False
        while slots <= slot:
            slots *= 2
        while capacity < rows:
            capacity *= 2
        self.keys, self.values = (grown(old, slots, capacity) for old in (self.keys, self.values))
        return True

    def keep(self, slot: int, base: int, path: list[int]) -> None:
        """Move the rows of a branch to base, base + 1, ...; those of a chain stand there already."""
        if path != list(range(len(path))):
            here = torch.tensor(path, device=self.keys.device) + base
            for part in (self.keys, self.values):
                part[:, slot, :, base : base + len(path)] = part[:, slot][:, :, here]


def grown(old: Tensor, slots: int, capacity: int) -> Tensor:
    """A larger copy."""
    layers, had_slots, heads, had, dim = old.shape
    new = old.new_zeros(layers, slots, heads, capacity, dim)
    new[:, :had_slots, :, :had] = old
    return new


class Step(NamedTuple):
    """What all layers of a forward share."""

    ops: Ops
    stack: Stack
    batch: RowBatch
    memory: Memory


def run_layer(
    step: Step, index: int, normed: Float[Tensor, "R W"], residual: Float[Tensor, "R D"]
) -> Float[Tensor, "S R D"]:
    """What a layer's MLP adds to `residual`, in parts; what its attention adds, `residual` has taken up."""
    ops, stack, batch, memory = step
    layer, store = stack.layers[index], memory.layer(index)
    queries = ops.rope_store(ops.linear(normed, layer.qkv), layer.head, stack.heads, batch, store)
    mixed = ops.linear(ops.attend(queries, store, stack.heads, batch), layer.o)
    return ops.linear(ops.gated(ops.add_norm(residual, mixed, layer.post_gain, stack.eps), layer.gate_up), layer.down)


def run_stack(
    ops: Ops, stack: Stack, embedding: Float[Tensor, "V D"], batch: RowBatch, memory: Memory, taps: tuple[int, ...] = ()
) -> tuple[Float[Tensor, "R F"], Float[Tensor, "R D"]]:
    """(tapped raw layer outputs side by side, last state after the norm) of the rows' tokens.

    Tap -1 is the input. A layer's output exists once the next norm has added its MLP.
    """
    residual, normed = ops.embed_norm(batch.token, embedding, stack.layers[0].input_gain, stack.eps)
    caught: dict[int, Tensor] = {-1: residual.clone()} if -1 in taps else {}
    parts = run_layer(Step(ops, stack, batch, memory), 0, normed, residual)
    for index, layer in enumerate(stack.layers[1:], 1):
        normed = ops.add_norm(residual, parts, layer.input_gain, stack.eps)
        if index - 1 in taps:
            caught[index - 1] = residual.clone()
        parts = run_layer(Step(ops, stack, batch, memory), index, normed, residual)
        if index in CUTS:
            cut()
    last = ops.add_norm(residual, parts, stack.gain, stack.eps)
    caught[len(stack.layers) - 1] = residual
    tapped = torch.cat([caught[index] for index in taps], -1) if taps else residual[:, :0]
    return tapped, last
