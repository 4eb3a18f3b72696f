"""Qwen3.5: layers of linear attention, whose state cannot be shortened, among layers of full attention.

A verification moves the state on by all of its rows. What was rejected is undone without a forward: the state from
before is kept, and what each linear layer read of each row; once the verdict is known, the accepted rows run through
the recurrence alone, for all layers at once. Neither outlives the `commit`.
Sources: the gated delta rule of Hugging Face transformers (Qwen3.5); replay of a rejected draft as in vLLM's ReplaySSM.
"""

import importlib.util
import logging
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple, Protocol, cast, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import DynamicCache

from dloop.loop import Target
from dloop.targets.branches import KeyValueLayer
from dloop.targets.hf import HFMemory, HFTarget, in_this_thread
from dloop.targets.release import EXTRA
from dloop.targets.release import is_offered as is_offered
from dloop.types import Seen

RECURRENT = ("qwen3_5", "qwen3_5_text")  # with and without the part that sees images, which is not read
LINEAR = "linear_attention"
PROJECTIONS = ("in_proj_qkv", "in_proj_a", "in_proj_b")  # one name in all releases
EPSILON = 1e-6  # under the root of a key's norm
ONE_PATH = "has recurrent layers, whose state follows one path: branches of a tree cannot be verified at once"
NO_BRANCHES = f"{ONE_PATH}; use 0 (a chain)"

log = logging.getLogger("dloop")


class State(NamedTuple):
    """What all linear layers remember of one sequence. C channels of the convolution, K its width."""

    window: Float[Tensor, "L C K"]  # the last inputs of the convolution
    memory: Float[Tensor, "L H dk dv"]  # float32


class Reads(NamedTuple):
    """What all linear layers read of n rows: outputs of their projections."""

    mixed: Float[Tensor, "L n C"]  # queries, keys and values, before the convolution
    decay: Float[Tensor, "L n H"]
    strength: Float[Tensor, "L n H"]

    def first(self, count: int) -> "Reads":
        return Reads(*(part[:, :count] for part in self))


@dataclass(frozen=True, kw_only=True)
class Recurrence:
    """The weights and sizes that move a state on, those of all linear layers stacked."""

    kernels: Float[Tensor, "LC 1 K"]
    log_rate: Float[Tensor, "L 1 H"]
    bias: Float[Tensor, "L 1 H"]
    key_heads: int
    key_size: int  # of all key heads

    def replay(self, state: State, reads: Reads) -> State:
        """The state after these rows, as if it had seen them alone."""
        if not reads.mixed.shape[1]:
            return state
        inputs = torch.cat([state.window, reads.mixed.transpose(1, 2)], -1)
        keys, values = self._convolved(inputs, reads.mixed.shape[1])
        rates = self.log_rate.float().exp() * F.softplus(reads.decay.float() + self.bias)
        kept, strengths = (-rates).exp(), reads.strength.sigmoid().float()
        memory = state.memory.float()
        for key, value, keep, strength in zip(*(x.unbind(1) for x in (keys, values, kept, strengths)), strict=True):
            memory = memory * keep[..., None, None]
            correction = (value - (memory * key[..., None]).sum(-2)) * strength[..., None]
            memory = memory + key[..., None] * correction[..., None, :]
        return State(inputs[..., -state.window.shape[-1] :].contiguous(), memory)

    def _convolved(
        self, inputs: Float[Tensor, "L C T"], count: int
    ) -> tuple[Float[Tensor, "L n H dk"], Float[Tensor, "L n H dv"]]:
        """Normed keys and values of the last rows; the queries move nothing."""
        layers, heads = len(inputs), self.log_rate.shape[-1]
        mixed = F.silu(F.conv1d(inputs.flatten(0, 1)[None], self.kernels, groups=len(self.kernels)))
        rows = mixed[0, :, -count:].unflatten(0, (layers, -1)).transpose(1, 2).float()
        _, keys, values = rows.split([self.key_size, self.key_size, rows.shape[-1] - 2 * self.key_size], -1)
        keys = keys.unflatten(-1, (self.key_heads, -1))
        keys = keys * torch.rsqrt(keys.pow(2).sum(-1, keepdim=True) + EPSILON)
        return keys.repeat_interleave(heads // self.key_heads, 2), values.unflatten(-1, (heads, -1))


@dataclass(frozen=True)
class RecurrentTarget(HFTarget):
    """A loaded Qwen3.5: its texts alone, and chains alone."""

    @property
    def forks(self) -> bool:
        return False

    @property
    def beyond_fast(self) -> str:
        return "recurrent"

    @cached_property
    def mixers(self) -> list[nn.Module]:
        """The linear-attention parts, in the order of the layers."""
        layers = zip(cast(nn.ModuleList, self.backbone.layers), self.config.layer_types, strict=True)
        return [cast(nn.Module, layer.linear_attn) for layer, kind in layers if kind == LINEAR]

    @cached_property
    def recurrence(self) -> Recurrence:
        """The recurrence's own weights; small."""
        mixers, config = self.mixers, self.config
        return Recurrence(
            kernels=torch.cat([cast(nn.Conv1d, mixer.conv1d).weight for mixer in mixers]),
            log_rate=torch.stack([mixer.get_parameter("A_log") for mixer in mixers])[:, None],
            bias=torch.stack([mixer.get_parameter("dt_bias") for mixer in mixers])[:, None],
            key_heads=config.linear_num_key_heads,
            key_size=config.linear_num_key_heads * config.linear_key_head_dim,
        )

    def open(self, taps: tuple[int, ...] = ()) -> Target:
        return RecurrentMemory(self, taps)


@runtime_checkable
class StateLayer(Protocol):
    """What transformers stores for one linear-attention layer of one sequence; written in place."""

    conv_states: dict[int, Float[Tensor, "1 C K"]]
    recurrent_states: dict[int, Float[Tensor, "1 H dk dv"]]


@dataclass(frozen=True)
class Tail:
    """A slot's last verification, until its verdict."""

    before: State
    reads: Reads


@dataclass
class RecurrentMemory(HFMemory):
    """Keys and values, and states. Law: committed rows + a speculative tail; only chains."""

    target: RecurrentTarget  # pyright: ignore[reportIncompatibleVariableOverride]
    tails: dict[int, Tail] = field(default_factory=dict[int, Tail])

    def prefill(self, slot: int, tokens: list[int]) -> Seen:
        self.tails.pop(slot, None)
        return super().prefill(slot, tokens)

    @torch.no_grad()
    def commit(self, slot: int, path: list[int]) -> None:
        if path != list(range(len(path))):
            raise ValueError(f"path {path}: {self.target.name} {NO_BRANCHES}")
        tail = self.tails.pop(slot)
        if len(path) < tail.reads.mixed.shape[1]:
            self._put_back(slot, self.target.recurrence.replay(tail.before, tail.reads.first(len(path))))
        super().commit(slot, path)

    def _verify(self, slot: int, tokens: list[int], positions: list[int], parents: list[int]) -> Seen:
        before = self._state(slot)
        with reading(self.target.mixers) as reads:
            seen = super()._verify(slot, tokens, positions, parents)
        self.tails[slot] = Tail(before, gathered(reads))
        return seen

    def _tree_mask(self, slot: int, parents: list[int]) -> Tensor:
        raise ValueError(f"parents {parents}: {self.target.name} {NO_BRANCHES}")

    def _state(self, slot: int) -> State:
        """A copy of what the linear layers remember."""
        layers = self._linear(slot)
        windows, memories = (
            [layer.conv_states[0] for layer in layers],
            [layer.recurrent_states[0] for layer in layers],
        )
        return State(torch.cat(windows), torch.cat(memories))

    def _put_back(self, slot: int, state: State) -> None:
        """Each layer's part of one tensor; transformers goes on writing there."""
        for index, layer in enumerate(self._linear(slot)):
            layer.conv_states[0] = state.window[index : index + 1]
            layer.recurrent_states[0] = state.memory[index : index + 1].to(layer.recurrent_states[0].dtype)

    def _linear(self, slot: int) -> list[StateLayer]:
        return [cast(StateLayer, layer) for layer in self._of_kind(slot, linear=True)]

    def _attention(self, slot: int) -> list[KeyValueLayer]:
        return [cast(KeyValueLayer, layer) for layer in self._of_kind(slot, linear=False)]

    def _of_kind(self, slot: int, *, linear: bool) -> Iterator[object]:
        cache: DynamicCache = self.caches[slot]
        pairs = zip(cache.layers, self.target.config.layer_types, strict=True)
        return (layer for layer, kind in pairs if (kind == LINEAR) == linear)


@contextmanager
def reading(mixers: list[nn.Module]) -> Generator[list[list[Tensor]], None, None]:
    """Note what these layers' projections give in the forwards inside: three lists, in the order of `Reads`."""
    found: list[list[Tensor]] = [[], [], []]

    handles = [
        mixer.get_submodule(name).register_forward_hook(in_this_thread(part.append))
        for mixer in mixers
        for name, part in zip(PROJECTIONS, found, strict=True)
    ]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def gathered(reads: list[list[Tensor]]) -> Reads:
    """One tensor for all layers of each part."""
    return Reads(*(torch.cat(part) for part in reads))


def tell_path(name: str) -> None:
    """Say that the linear layers take the slow path, where they do."""
    if importlib.util.find_spec("fla") is None:
        log.warning("%s: without flash-linear-attention its linear layers run in plain PyTorch (%s)", name, EXTRA)
