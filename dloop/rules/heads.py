"""Small heads that stop rules read, trained on a frozen drafter; their files.

Sources: SpecDec++ (arXiv 2405.19715, Kaffaljidhmah2/SpecDec_pp), DISCO (2405.04304), AdaEAGLE (2412.18910), PACER
(2602.01274; its method section was not to be had, so its head is in its style). A head's folder holds `config.json`
and `model.safetensors`.
"""

import json
from abc import abstractmethod
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import ClassVar, Literal, NamedTuple, get_args

import torch
from jaxtyping import Float, Float32, Int64
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

from dloop.checkpoint import read_json
from dloop.errors import UserError
from dloop.stop import Row

HeadKind = Literal["specdec++", "adaeagle", "disco", "pacer"]
RES_BLOCKS = 3  # SpecDec++'s, and AdaEAGLE's layers
REJECTED_WEIGHT = 6.0  # SpecDec++'s
UNDER_WEIGHT = 2.0  # ours: AdaEAGLE says only that a length predicted too short costs more
FFN_SIZE = 64  # ours, as small as DISCO's is said to be
PACER_BLOCK, PACER_SIZE, PACER_HEADS = 4, 128, 4  # ours: "blocks of 2-4 drafting steps", one light layer
CONFIG, WEIGHTS = "config.json", "model.safetensors"  # in a head's folder
NUM_FIGURES = 5  # what a head reads of a row beside its state


@dataclass(frozen=True, kw_only=True)
class HeadConfig:
    """What a head was made for."""

    kind: HeadKind
    family: str
    hidden_size: int
    longest: int  # drafted tokens of the stages it was trained on
    reads_token: bool  # whether a row's state has read the token before, as autoregressive drafters' have
    block: int = PACER_BLOCK  # PACER's


class Examples(NamedTuple):
    """n stages of k rows, drafted from places of texts that reach beyond them."""

    hidden: Float[Tensor, "n k D"]  # the state that gave each row's law
    figures: Float[Tensor, "n k 3"]
    soft: Float[Tensor, "n k"]  # min(1, p / q) of the drawn token; told up to the first that the text does not hold
    accepted: Int64[Tensor, " n"]  # leading tokens that are the text's

    def known(self) -> Tensor:
        """Rows whose tokens were judged: up to the first that was rejected."""
        return torch.arange(self.soft.shape[1], device=self.soft.device) <= self.accepted[:, None]

    def matched(self) -> Float32[Tensor, "n k"]:
        """1 where the token is the text's."""
        return (torch.arange(self.soft.shape[1], device=self.soft.device) < self.accepted[:, None]).float()


class Head(nn.Module):
    """Reads rows, gives a logit or a length."""

    kind: ClassVar[HeadKind]
    draws: ClassVar[bool] = False  # whether it learns from drawn drafts, not from the likeliest ones

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.config = config

    @abstractmethod
    def loss(self, examples: Examples) -> Float[Tensor, ""]:
        """What training minimises."""


class StateHead(Head):
    """A number from one state of the drafter, by residual blocks."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__(config)
        self.norm = nn.LayerNorm(config.hidden_size)
        self.blocks = nn.ModuleList([nn.Linear(config.hidden_size, config.hidden_size) for _ in range(RES_BLOCKS)])
        self.out = nn.Linear(config.hidden_size, 1)

    def forward(self, hidden: Float[Tensor, "... D"]) -> Float[Tensor, "..."]:
        states = self.norm(hidden.float())
        for block in self.blocks:
            states = states + F.silu(block(states))
        return self.out(states)[..., 0]


class AcceptanceHead(StateHead):
    """SpecDec++: the chance that a drafted token is accepted, from the drafter's state.

    Autoregressive drafters' rows have read the token that they judge, the one before; blocks' rows judge their own.
    """

    kind = "specdec++"
    draws = True

    def loss(self, examples: Examples) -> Float[Tensor, ""]:
        """Soft labels; a rejection weighs 6 times as much; normalised by the weighted labels."""
        shift = int(self.config.reads_token)
        rows = examples.soft.shape[1] - shift
        logits, labels = self(examples.hidden[:, shift:]), examples.soft[:, :rows]
        weights = torch.where(examples.known()[:, :rows], labels + REJECTED_WEIGHT * (1 - labels), 0.0)
        right, wrong = labels * F.logsigmoid(logits), REJECTED_WEIGHT * (1 - labels) * F.logsigmoid(-logits)
        return -torch.where(examples.known()[:, :rows], right + wrong, 0.0).sum() / weights.sum()


class LengthHead(StateHead):
    """AdaEAGLE: how many tokens to draft, from the state of the row that read the anchor.

    Published: from the anchor's embedding and the target's state before it, which this row has joined.
    """

    kind = "adaeagle"

    def loss(self, examples: Examples) -> Float[Tensor, ""]:
        """The distance to the accepted length; one that is predicted too short costs more."""
        short = examples.accepted - self(examples.hidden[:, 0])
        return torch.where(short > 0, UNDER_WEIGHT * short, -short).mean()


class FigureHead(Head):
    """DISCO: whether a row's likeliest token is accepted, from its two best probabilities, entropy and place."""

    kind = "disco"

    def __init__(self, config: HeadConfig) -> None:
        super().__init__(config)
        self.layers = nn.Sequential(nn.Linear(NUM_FIGURES - 1, FFN_SIZE), nn.SiLU(), nn.Linear(FFN_SIZE, 1))

    def forward(self, numbers: Float[Tensor, "... 3"], index: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        top, margin, entropy = numbers.unbind(-1)
        read = torch.stack([top.exp(), (top - margin).exp(), entropy, index / self.config.longest], -1)
        return self.layers(read)[..., 0]

    def loss(self, examples: Examples) -> Float[Tensor, ""]:
        """Binary cross-entropy on rows that were judged."""
        index = torch.arange(examples.soft.shape[1], device=examples.soft.device, dtype=torch.float32)
        logits = self(examples.figures, index.expand(examples.soft.shape))
        return of_known(logits, examples)


class BlockHead(Head):
    """PACER-style: how likely the tokens of one freshly drafted block are accepted, by one light layer over it."""

    kind = "pacer"

    def __init__(self, config: HeadConfig) -> None:
        super().__init__(config)
        self.inward = nn.Sequential(nn.LayerNorm(config.hidden_size), nn.Linear(config.hidden_size, PACER_SIZE))
        self.index = nn.Embedding(config.block, PACER_SIZE)
        self.layer = nn.TransformerEncoderLayer(
            PACER_SIZE, PACER_HEADS, 2 * PACER_SIZE, dropout=0.0, batch_first=True, norm_first=True
        )
        self.out = nn.Linear(PACER_SIZE, 1)

    def forward(self, hidden: Float[Tensor, "n b D"]) -> Float[Tensor, "n b"]:
        count = hidden.shape[1]
        rows = self.inward(hidden.float()) + self.index.weight[:count]
        later = torch.ones(count, count, dtype=torch.bool, device=rows.device).triu(1)
        return self.out(self.layer(rows, src_mask=later))[..., 0]

    def loss(self, examples: Examples) -> Float[Tensor, ""]:
        """Binary cross-entropy on rows that were judged, block by block."""
        blocks = [self(part) for part in examples.hidden.split(self.config.block, 1)]
        return of_known(torch.cat(blocks, 1), examples)


def of_known(logits: Float[Tensor, "n k"], examples: Examples) -> Float[Tensor, ""]:
    """Mean binary cross-entropy over the rows whose tokens were judged."""
    losses = F.binary_cross_entropy_with_logits(logits, examples.matched(), reduction="none")
    return losses[examples.known()].mean()


HEADS: dict[str, type[Head]] = {each.kind: each for each in (AcceptanceHead, LengthHead, FigureHead, BlockHead)}


def save_head(head: Head, folder: Path) -> None:
    """Write config and weights."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG).write_text(json.dumps(asdict(head.config), indent=1) + "\n")
    save_file(
        {name: value.detach().cpu().contiguous() for name, value in head.state_dict().items()},
        folder / WEIGHTS,
    )


def read_config(folder: Path) -> HeadConfig:
    """Raises UserError where the folder holds no head."""
    raw = read_json(folder / CONFIG, str(folder))
    try:
        if raw["kind"] not in HEADS:
            raise ValueError(f"kind {raw['kind']!r} is none of {', '.join(get_args(HeadKind))}")
        return HeadConfig(**raw)  # pyright: ignore[reportArgumentType]
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"gate_head {folder} is no head ({error}); write one with dloop train gate-head") from error


def load_head(folder: Path, device: torch.device) -> Head:
    """A head, ready to be read. Raises UserError where the folder holds none."""
    config = read_config(folder)
    head = HEADS[config.kind](config)
    try:
        head.load_state_dict(load_file(folder / WEIGHTS))
    except Exception as error:  # a damaged file raises whatever its reader trips over
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"gate_head {folder}: model.safetensors cannot be read ({reason}); train it again") from error
    return head.to(device).eval().requires_grad_(False)


def figures_of(row: Row) -> Float32[Tensor, " 3"]:
    """What `figures` gave for a row."""
    return torch.tensor([row.top_logp, row.margin, row.entropy])
