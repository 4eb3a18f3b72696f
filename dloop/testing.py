"""Tiny models and scripted doubles, for tests of dloop and of code built on it. All seeded; nothing is fetched.

The doubles need no model: a target with a table of logits, a drafter with a script; both check what the loop tells.
"""

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from dloop.checkpoint import write_checkpoint
from dloop.drafters.block import BlockDrafter
from dloop.drafters.config import BlockConfig, DSparkConfig, MarkovHeadType, write_config
from dloop.drafters.dflash import DFlashConfig
from dloop.drafters.domino import DominoConfig
from dloop.drafters.dspark import DSpark
from dloop.drafters.families import build
from dloop.export import Layout, in_layout
from dloop.loop import Session, Task, run_many
from dloop.targets.hf import HFTarget
from dloop.train.batch import TrainBatch
from dloop.train.block import ObjectiveSettings, objective_of
from dloop.types import Features, FinishReason, First, GapRows, Round, Rows, Seen, Stage, StageRequest

Kind = Literal["qwen3", "qwen2", "llama", "llama_tied"]
KINDS: tuple[Kind, ...] = ("qwen3", "qwen2", "llama", "llama_tied")
HIDDEN_SIZE = 32
Script = Callable[[list[int], int], Stage]  # (the text up to the anchor, included; index of the stage) -> the stage


def tiny_target(kind: Kind = "qwen3", *, seed: int = 0, vocab_size: int = 97, num_layers: int = 4) -> HFTarget:
    """A random float32 target of 256 positions; its texts vary, and each weight, biases too, makes a difference."""
    config = AutoConfig.for_model(  # pyright: ignore[reportUnknownMemberType]
        kind.removesuffix("_tied"),
        vocab_size=vocab_size,
        hidden_size=HIDDEN_SIZE,
        intermediate_size=2 * HIDDEN_SIZE,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=256,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        tie_word_embeddings=kind.endswith("_tied"),
        eos_token_id=None,
    )
    model = cast(PreTrainedModel, AutoModelForCausalLM.from_config(config))  # pyright: ignore[reportUnknownMemberType]
    fill(model, seed)
    head, gain = ("lm_head", 4.0) if not kind.endswith("_tied") else ("model.embed_tokens", 0.7)
    with torch.no_grad():  # signs: a tied head would otherwise repeat the last token for ever
        model.get_parameter("model.norm.weight")[::3] *= -1
        model.get_parameter(f"{head}.weight").mul_(gain)  # sure of its words
    return HFTarget(name=f"tiny {kind}", model=model.eval().requires_grad_(False), stop_ids=frozenset())


def tiny_drafter(
    target: HFTarget,
    *,
    family: str = "dspark",
    stage_len: int = 4,
    head: MarkovHeadType | None = "vanilla",
    gap_rows: GapRows = "producing",
) -> BlockDrafter:
    """A random drafter for this target: it is hardly ever right. `head` is DSpark's, beside its confidence head."""
    shape = dict[str, object](
        hidden_size=HIDDEN_SIZE,
        intermediate_size=2 * HIDDEN_SIZE,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        vocab_size=target.vocab_size,
        rms_norm_eps=1e-6,
        rope_theta=target.rope_theta,
        max_positions=target.context,
        attention_bias=False,
        block_size=stage_len + (family == "dflash"),
        label_shift=int(family == "dflash"),
        mask_token_id=target.vocab_size - 1,
        target_layer_ids=(0, target.num_layers - 2),
        num_target_layers=target.num_layers,
        gap_rows=gap_rows,
    )
    model = build(tiny_config(family, shape, head)).to(target.dtype)
    fill(model, seed=1)
    return BlockDrafter(
        name=f"tiny {family}", family=family, model=model.eval().requires_grad_(False), vocabulary=target.vocabulary
    )


def tiny_config(family: str, shape: dict[str, object], head: MarkovHeadType | None) -> BlockConfig:
    """The config of a tiny drafter: what all share, and what the family adds."""
    match family:
        case "dflash":
            return DFlashConfig(**shape)  # pyright: ignore[reportArgumentType]
        case "domino":
            return DominoConfig(**shape, emb_dim=12, gru_hidden_dim=20, pure_draft_prefix_len=1)  # pyright: ignore[reportArgumentType]
        case _:
            return DSparkConfig(
                **shape,  # pyright: ignore[reportArgumentType]
                markov_rank=0 if head is None else cast(int, shape["vocab_size"]),
                markov_head_type=head or "vanilla",
                confidence_head=True,
                confidence_with_markov=head is not None,
            )


@torch.no_grad()
def good_drafter(
    target: HFTarget, texts: Sequence[Sequence[int]], *, stage_len: int = 4, gap_rows: GapRows = "producing"
) -> BlockDrafter:
    """A DSpark drafter that is mostly right, and sure, on these texts: its Markov head holds their successors."""
    drafter = tiny_drafter(target, stage_len=stage_len, gap_rows=gap_rows)
    markov = cast(DSpark, drafter.model).markov_head
    assert markov is not None
    counts = torch.full((target.vocab_size, target.vocab_size), 1e-3)
    for previous, following in (pair for text in texts for pair in itertools.pairwise(text)):
        counts[previous, following] += 1
    markov.markov_w1.weight.copy_(torch.eye(target.vocab_size))
    markov.markov_w2.weight.copy_(counts.log().T)
    drafter.model.norm.weight.mul_(0.05)  # its own states add a little noise
    return drafter


def taught_drafter(
    target: HFTarget,
    texts: Sequence[Sequence[int]],
    *,
    family: str,
    stage_len: int = 3,
    steps: int = 60,
    gap_rows: GapRows = "producing",
) -> BlockDrafter:
    """A drafter trained on these texts (host and loop stage in turn) until it is mostly right on them."""
    drafter = tiny_drafter(target, family=family, stage_len=stage_len, gap_rows=gap_rows)
    teach(drafter, target, texts, steps)
    return drafter


def teach(drafter: BlockDrafter, target: HFTarget, texts: Sequence[Sequence[int]], steps: int) -> None:
    """Train a drafter in place."""
    lengths = torch.tensor([len(text) for text in texts])
    tokens = nn.utils.rnn.pad_sequence([torch.tensor(list(text)) for text in texts], batch_first=True)
    mask = torch.arange(tokens.shape[1]) < lengths[:, None]
    batch = TrainBatch(tokens, mask, lengths, torch.zeros_like(lengths))
    settings = ObjectiveSettings(num_anchors=tokens.shape[1], loss_decay_gamma=None)
    objective = objective_of(drafter.model.requires_grad_(True), drafter.vocabulary, settings)
    features = target.features(tokens, drafter.taps)
    optimizer = torch.optim.Adam(drafter.model.parameters(), lr=1e-2)
    for step in range(steps):
        optimizer.zero_grad()
        objective(batch, features, step % 2).total.backward()
        optimizer.step()
    drafter.model.requires_grad_(False)


@torch.no_grad()
def fill(module: nn.Module, seed: int) -> None:
    """Random values for every parameter: matrices keep the scale of their input, gains lie around 1."""
    generator = torch.Generator().manual_seed(seed)
    for name, weight in module.named_parameters():
        noise = torch.randn(weight.shape, generator=generator)
        if weight.ndim == 1:
            weight.copy_(0.2 * noise + (0 if name.endswith("bias") else 1))
        else:
            weight.copy_(noise if "embed" in name or "markov_w1" in name else noise / weight.shape[-1] ** 0.5)


def write_target(target: HFTarget, folder: Path, max_shard_size: str = "1GB") -> Path:
    """Save a target in Hugging Face's layout; give the folder."""
    target.model.save_pretrained(folder, max_shard_size=max_shard_size)  # pyright: ignore[reportUnknownMemberType]
    return folder


def write_drafter(drafter: BlockDrafter, folder: Path, layout: Layout, max_shard_bytes: int | None = None) -> Path:
    """Save a drafter in a published layout of its family; see `dloop.export`."""
    config = write_config(drafter.config, str(drafter.vocabulary.head.dtype).removeprefix("torch."))
    tensors = dict(drafter.model.state_dict())
    write_checkpoint(folder, *in_layout(layout, config, tensors, drafter.vocabulary), max_shard_bytes)
    return folder


@dataclass
class TableTarget:
    """A target without a model: the whole text chooses a row of the table, so a forgotten token shows at once.

    Features hold (token, position). Rows at a wrong position and paths that are no branch are assertion errors.
    """

    table: Float[Tensor, "M V"]
    texts: dict[int, list[int]] = field(default_factory=dict[int, list[int]])  # committed, by slot
    tails: dict[int, list[list[int]]] = field(default_factory=dict[int, list[list[int]]])  # text at each verified row

    @classmethod
    def random(cls, vocab_size: int, seed: int = 0, scale: float = 2.0) -> "TableTarget":
        """A table of 997 rows of normal logits."""
        return cls(scale * torch.randn(997, vocab_size, generator=torch.Generator().manual_seed(seed)))

    def logits(self, text: Sequence[int]) -> Float[Tensor, " V"]:
        mark = 1
        for token in text:
            mark = (mark * 31 + token + 1) % 1_000_003
        return self.table[mark % len(self.table)]

    def prefill(self, slot: int, tokens: list[int]) -> Seen:
        self.texts[slot], self.tails[slot] = list(tokens), []
        facts = torch.tensor([[token, position] for position, token in enumerate(tokens)], dtype=torch.float32)
        return Seen(logits=self.logits(tokens)[None], features=Features(taps=facts, last=facts))

    def verify(self, rows: Rows) -> Seen:
        texts: list[list[int]] = []
        for token, slot, position, parent in zip(rows.token, rows.slot, rows.position, rows.parent, strict=True):
            texts.append([*(texts[parent] if parent >= 0 else self.texts[slot]), token])
            assert position == len(texts[-1]) - 1, f"the row at position {position} stands after {position} others"
        for slot in set(rows.slot):
            self.tails[slot] = [text for text, owner in zip(texts, rows.slot, strict=True) if owner == slot]
        facts = torch.tensor(list(zip(rows.token, rows.position, strict=True)), dtype=torch.float32)
        logits = torch.stack([self.logits(text) for text in texts])
        return Seen(logits=logits, features=Features(taps=facts, last=facts))

    def commit(self, slot: int, path: list[int]) -> None:
        for node in path:
            text = self.tails[slot][node]
            assert text[:-1] == self.texts[slot], f"path {path} is not a branch of what was verified"
            self.texts[slot] = text
        self.tails[slot] = []


@dataclass
class ScriptedDrafter:
    """A drafter that does what its script says. It keeps the text it was told, and checks that nothing is missing."""

    stage_len: int
    script: Script
    texts: dict[int, list[int]] = field(default_factory=dict[int, list[int]])  # committed, by slot
    tails: dict[int, list[int]] = field(default_factory=dict[int, list[int]])  # anchor and spines of this round

    def extend(self, slot: int, position: int, tokens: list[int], features: Features) -> None:
        before = self.texts[slot] if position else []
        assert len(before) == position and len(features.taps) == len(tokens), "tokens missing or given twice"
        self.texts[slot], self.tails[slot] = before + tokens, []

    def draft(self, requests: Sequence[StageRequest]) -> list[Stage]:
        return [self._stage(request) for request in requests]

    def _stage(self, request: StageRequest) -> Stage:
        tail = self.tails[request.slot] if request.index else [request.anchor]
        assert tail[-1:] == [request.anchor], f"anchor {request.anchor} does not continue the tail {tail}"
        stage = self.script(self.texts[request.slot] + tail, request.index)
        self.tails[request.slot] = tail + [stage.tokens[node] for node in stage.spine]
        return stage


def chain(tokens: list[int], score: float = -0.1) -> Stage:
    """A stage without branches."""
    order = list(range(len(tokens)))
    return Stage(tokens=tokens, parents=[i - 1 for i in order], logp=[score] * len(tokens), spine=order, score=score)


def replay(stages: Iterable[Stage]) -> Script:
    """The script that gives these stages one after the other."""
    remaining = iter(stages)
    return lambda text, index: next(remaining)


def knowing(text: list[int], stage_len: int, num_right: int, score: float = -0.1) -> Script:
    """The script that knows the whole text: the first `num_right` tokens of every round are right, the others wrong."""

    def script(before: list[int], index: int) -> Stage:
        truth = (text[len(before) :] + [0] * stage_len)[:stage_len]
        right = max(0, num_right - index * stage_len)
        return chain([token if i < right else (token + 1) % 2 for i, token in enumerate(truth)], score)

    return script


class Decoded(NamedTuple):
    """A finished sequence."""

    tokens: list[int]
    rounds: list[Round]
    finish: FinishReason | None


def gather(tasks: Sequence[Task], session: Session) -> list[Decoded]:
    """Run sequences together to their ends."""
    texts = [Decoded([], [], None) for _ in tasks]
    for index, event in run_many(tasks, session):
        texts[index].tokens.extend([event.token] if isinstance(event, First) else event.emitted)
        if isinstance(event, Round):
            texts[index].rounds.append(event)
        texts[index] = texts[index]._replace(finish=event.finish)
    return texts
