"""Any croppable Hugging Face causal LM of the Qwen3, Qwen2 and Llama kind: the slow, plain twin of the fast path."""

import inspect
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Literal, cast

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import DynamicCache, PretrainedConfig, PreTrainedModel

from dloop.chat import Tokenizer, load_tokenizer
from dloop.errors import UserError
from dloop.judge import PLAIN, Sampler
from dloop.lent import LentKind
from dloop.loop import Target
from dloop.targets.branches import KeyValueLayer, ancestry, is_chain, shorten
from dloop.targets.frozen import run_layers, runs_directly
from dloop.types import Features, Rows, Seen, Vocabulary
from dloop.vocabulary import capped

SUPPORTED = ("qwen3", "qwen2", "llama")
Output = Tensor | tuple[Tensor, ...]  # of a module


@dataclass(frozen=True)
class HFTarget:
    """A loaded target: weights and facts, no memory. `open` gives memory."""

    name: str
    model: PreTrainedModel
    stop_ids: frozenset[int]
    folder: Path | None = None  # where the weights and the tokenizer lie

    @property
    def config(self) -> PretrainedConfig:
        return self.model.config

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype

    @property
    def num_layers(self) -> int:
        return self.config.num_hidden_layers

    @property
    def hidden_size(self) -> int:
        return self.config.hidden_size

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def context(self) -> int:
        """Positions the model was built for."""
        return self.config.max_position_embeddings

    @property
    def rope_theta(self) -> float:
        """Transformers 5 keeps the base under `rope_parameters`."""
        parameters = getattr(self.config, "rope_parameters", None) or {}
        return float(parameters["rope_theta"] if "rope_theta" in parameters else self.config.rope_theta)

    @property
    def backbone(self) -> nn.Module:
        return self.model.base_model

    @property
    def vocabulary(self) -> Vocabulary:
        embedding = self.model.get_input_embeddings().weight
        head = cast(nn.Linear, self.model.get_output_embeddings()).weight
        return Vocabulary(embedding=cast(Tensor, embedding), head=head, softcap=self.softcap)

    @property
    def softcap(self) -> float | None:
        """What its logits are bent towards; None: they are as the head gives them."""
        return getattr(self.config, "final_logit_softcapping", None)

    @cached_property
    def lends(self) -> Mapping[str, LentKind]:
        """Layers whose keys and values a drafter may read, by kind."""
        return {}

    @property
    def beyond_fast(self) -> str | None:
        """The kind of layers that the fast path lacks; None: it is asked."""
        return None

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer beside the weights; None if there is none."""
        return load_tokenizer(self.folder, self.name)

    @property
    def engine(self) -> Literal["fast", "twin"]:
        """What decodes: this adapter, or the fast path built on it."""
        return "twin"

    @property
    def attention(self) -> str:
        """The attention backend, for the records."""
        return str(getattr(self.config, "_attn_implementation", None))

    @property
    def is_exact(self) -> bool:
        """Whether a row's logits never depend on the other rows of its forward."""
        return False

    @property
    def forks(self) -> bool:
        """Whether branches of a tree can be verified in one forward."""
        return True

    @property
    def sampler(self) -> Sampler:
        """What is done with logits, ending in one copy to the host."""
        return PLAIN

    def open(self, taps: tuple[int, ...] = ()) -> Target:
        """Fresh memory; the features hold the raw outputs of the decoder layers `taps`, in this order."""
        return HFMemory(self, taps)

    @torch.no_grad()
    def features(
        self,
        tokens: Int[Tensor, "B T"],
        taps: tuple[int, ...],
        *,
        positions: Int[Tensor, "#B T"] | None = None,
        last: bool = True,
        compiled: bool = False,
    ) -> "BatchFeatures":
        """Features of whole right-padded sequences, for training: no memory, no gradient, no head. `positions`: 0..T-1.

        Where the layers run directly, those above the last tap are left out without `last`, and fused if `compiled`.
        """
        if runs_directly(self.config):
            return BatchFeatures(*run_layers(self.backbone, tokens, taps, positions, last=last, compiled=compiled))
        inputs: dict[str, object] = {"input_ids": tokens, "position_ids": positions, "use_cache": False}
        return BatchFeatures(*self.run(inputs, taps))

    def run(self, inputs: dict[str, object], taps: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """Run the layers without the head; return (what the taps give, side by side; last state after the norm)."""
        return run_backbone(self, inputs, taps)

    def width_of(self, taps: tuple[int, ...]) -> int:
        """Columns of what the taps give."""
        return len(taps) * self.hidden_size

    def logits(self, states: Float[Tensor, "... D"]) -> Float[Tensor, "... V"]:
        """Of last states after the norm."""
        head = cast(Callable[[Tensor], Tensor], self.model.get_output_embeddings())
        return capped(head(states), self.softcap)


@dataclass(frozen=True)
class BatchFeatures:
    """Frozen target states of a training batch."""

    taps: Float[Tensor, "B T F"]
    last: Float[Tensor, "B T D"]  # after the final norm; no columns where it was not asked for


@dataclass
class HFMemory:
    """Key/value memory of any number of slots, one cache a slot. Law: committed rows + a speculative tail."""

    target: HFTarget
    taps: tuple[int, ...]
    caches: dict[int, DynamicCache] = field(default_factory=dict[int, DynamicCache])
    committed: dict[int, int] = field(default_factory=dict[int, int])

    @torch.no_grad()
    def prefill(self, slot: int, tokens: list[int]) -> Seen:
        self.caches[slot] = self._cache()
        self.committed[slot] = len(tokens)
        seen = self._forward(slot, tokens, list(range(len(tokens))), mask=None, keep=1)
        check_logits(seen.logits, self.target)
        return seen

    @torch.no_grad()
    def verify(self, rows: Rows) -> Seen:
        """One forward a slot (this twin does not pack); rows of one slot stand together."""
        parts: list[Seen] = []
        start = 0
        while start < len(rows):
            slot = rows.slot[start]
            stop = start + sum(1 for other in rows.slot[start:] if other == slot)
            parents = [p - start if p >= 0 else -1 for p in rows.parent[start:stop]]
            parts.append(self._verify(slot, rows.token[start:stop], rows.position[start:stop], parents))
            start = stop
        return Seen(
            logits=torch.cat([part.logits for part in parts]),
            features=Features(
                taps=torch.cat([part.features.taps for part in parts]),
                last=torch.cat([part.features.last for part in parts]),
            ),
        )

    def commit(self, slot: int, path: list[int]) -> None:
        base = self.committed[slot]
        shorten(self._attention(slot), base, path)
        self.committed[slot] = base + len(path)

    def _cache(self) -> DynamicCache:
        """Fresh memory of one slot."""
        return DynamicCache(config=self.target.config)

    def _verify(self, slot: int, tokens: list[int], positions: list[int], parents: list[int]) -> Seen:
        """The rows of one slot."""
        mask = None if is_chain(parents) else self._tree_mask(slot, parents)
        return self._forward(slot, tokens, positions, mask, keep=0)

    def _attention(self, slot: int) -> "list[KeyValueLayer]":
        """Where the slot's keys and values lie."""
        return cast(list[KeyValueLayer], self.caches[slot].layers)

    def _forward(
        self, slot: int, tokens: list[int], positions: list[int], mask: Tensor | dict[str, Tensor] | None, keep: int
    ) -> Seen:
        device = self.target.device
        inputs: dict[str, object] = {
            "input_ids": torch.tensor([tokens], device=device),
            "position_ids": torch.tensor([positions], device=device),
            "attention_mask": mask,
            cache_argument(self.target.backbone): self.caches[slot],
            "use_cache": True,
        }
        taps, last = self.target.run(inputs, self.taps)
        return Seen(logits=self.target.logits(last[0, -keep:]), features=Features(taps=taps[0], last=last[0]))

    def _tree_mask(self, slot: int, parents: list[int]) -> Tensor | dict[str, Tensor]:
        """Additive mask: every row sees the committed memory, its ancestors and itself."""
        return self._additive(ancestry(self.committed[slot], parents))

    def _additive(self, seen: np.ndarray) -> Float[Tensor, "1 1 n K"]:
        mask = torch.zeros(seen.shape, dtype=self.target.dtype)
        mask.masked_fill_(torch.from_numpy(~seen), torch.finfo(self.target.dtype).min)
        return mask.to(self.target.device)[None, None]


def check_logits(logits: Float[Tensor, "r V"], target: HFTarget) -> None:
    """Raises UserError unless all are finite."""
    if not bool(torch.isfinite(logits).all()):  # sync
        raise UserError(
            f"{target.name} gives logits that are not finite for this prompt; its weights hold NaN or "
            f"infinite values, or overflow in {target.dtype}: try another checkpoint or dtype float32"
        )


def cache_argument(backbone: nn.Module) -> str:
    """The name of the cache argument: `past_key_values` until transformers 5.2x, `cache` after."""
    return "cache" if "cache" in inspect.signature(backbone.forward).parameters else "past_key_values"


def in_this_thread(note: Callable[[Tensor], object]) -> Callable[[nn.Module, object, Output], None]:
    """A forward hook that notes outputs of this thread's forwards alone: others may decode with the same model."""
    return partial(hear, note, threading.get_ident())


def hear(note: Callable[[Tensor], object], thread: int, _module: nn.Module, _inputs: object, output: Output) -> None:
    """Note what a module gave, if this thread ran it."""
    if threading.get_ident() == thread:
        note(output if isinstance(output, Tensor) else output[0])


def run_backbone(target: HFTarget, inputs: dict[str, object], taps: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Run the layers without the head; return (tapped raw layer outputs side by side, last state after the norm).

    Hooks rather than `output_hidden_states`: only the tapped layers are kept, and the last entry of that tuple is
    normed while a tap is always a raw layer output.
    """
    caught: dict[int, Tensor] = {}
    layers = cast(nn.ModuleList, target.backbone.layers)
    embedding = target.model.get_input_embeddings()

    tapped_modules = {index: layers[index] if index >= 0 else embedding for index in taps}  # -1: the embedding
    handles = [
        module.register_forward_hook(in_this_thread(partial(caught.__setitem__, index)))
        for index, module in tapped_modules.items()
    ]
    try:
        last = cast(Tensor, target.backbone(**inputs).last_hidden_state)
    finally:
        for handle in handles:
            handle.remove()
    tapped = torch.cat([caught[index] for index in taps], -1) if taps else last[..., :0]
    return tapped, last
