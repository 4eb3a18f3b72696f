"""What flows through the loop: rows, features, stages, drafts, rounds. Nothing here computes with a model.

Letters used everywhere: n rows of one forward, k tokens of one stage, D hidden size, V vocabulary, F width of
the tapped features. Token ids, positions and indices are host integers; tensors stay on the device they came from.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from jaxtyping import Float, Int
from torch import Tensor

from dloop.errors import UserError

GapRows = Literal["producing", "position", "anchor_included"]
FinishReason = Literal["stop", "length"]
StageEnd = Literal["open", "gate", "rule", "max_stages", "stop_token", "length", "context"]

GREEDY_BELOW = 1e-5  # temperatures under this mean argmax, as in the public implementations


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How tokens are drawn. `top_k=0` and `top_p=1.0` are off; one seed a sequence."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise UserError(f"temperature={self.temperature} must be a finite number >= 0; 0 is greedy decoding")
        if self.top_k < 0:
            raise UserError(f"top_k={self.top_k} must be >= 0; 0 switches it off")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p={self.top_p} must lie in (0, 1]; 1.0 switches it off")
        if not 0 <= self.seed < 2**63:
            raise UserError(f"seed={self.seed} must lie in [0, 2**63)")

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW


@dataclass(frozen=True, kw_only=True)
class Rows:
    """What a target verifies: flat rows of any number of sequences. Filled by the runner from the drafts."""

    token: list[int]
    slot: list[int]
    position: list[int]  # absolute position in the row's sequence
    parent: list[int]  # index of the parent row in this forward; -1: follows the slot's committed memory

    def __len__(self) -> int:
        return len(self.token)

    @classmethod
    def pack(cls, requests: "Sequence[VerifyRequest]") -> "Rows":
        """Concatenate the drafts of all live sequences; parents are shifted to the packed numbering."""
        token, slot, position, parent = list[int](), list[int](), list[int](), list[int]()
        for request in requests:
            base = len(token)
            token += request.draft.tokens
            slot += [request.slot] * len(request.draft.tokens)
            position += request.draft.positions
            parent += [p + base if p >= 0 else -1 for p in request.draft.parents]
        return cls(token=token, slot=slot, position=position, parent=parent)


@dataclass(frozen=True, kw_only=True)
class Features:
    """What the target knows about n positions and hands to the drafter. Filled by the target adapter."""

    taps: Float[Tensor, "n F"]  # tapped layers' raw outputs side by side, in the drafter's order
    last: Float[Tensor, "n D"]  # after the final norm

    def select(self, rows: list[int]) -> "Features":
        if rows == list(range(len(rows))):  # what a chain keeps: no copy
            return self.between(0, len(rows))
        return Features(taps=self.taps[rows], last=self.last[rows])

    def between(self, start: int, stop: int) -> "Features":
        return Features(taps=self.taps[start:stop], last=self.last[start:stop])


@dataclass(frozen=True)
class Vocabulary:
    """The target's embedding and head, shared with drafters that have none of their own. Never trained."""

    embedding: Float[Tensor, "V D"]
    head: Float[Tensor, "W D"]
    softcap: float | None = None  # the target's logits are softcap * tanh(logits / softcap)
    kept: Int[Tensor, " W"] | None = None  # the target's ids of the head's rows, increasing; None: all, W = V


@dataclass(frozen=True, kw_only=True)
class Seen:
    """The target's answer for n rows. Prefill gives the logits of the last prompt position only (one row)."""

    logits: Float[Tensor, "r V"]
    features: Features

    def between(self, start: int, stop: int) -> "Seen":
        return Seen(logits=self.logits[start:stop], features=self.features.between(start, stop))


@dataclass(frozen=True, kw_only=True)
class Stage:
    """What one drafting stage produced: n nodes, of which the spine is the path that a further stage extends.

    The last `reserve` nodes serve the spine alone: the loop keeps them only when the gate opens. Filled by the drafter.
    """

    tokens: list[int]
    parents: list[int]  # index within the stage; -1: hangs on the anchor
    logp: list[float]  # natural log, given the path above, after the host's own corrections, un-tempered
    spine: list[int]  # indices into tokens, anchor outwards
    score: float  # sum of the top-1 log-probability of the spine's rows (float32)
    probs: Float[Tensor, "n V"] | None = None  # the law each token was drawn from; only when the drafter samples
    reserve: int = 0  # a chain, and a tree that holds its spine, need none
    cut: bool = False  # a stop rule ended it: no further stage follows


@dataclass(frozen=True, kw_only=True)
class StageRecord:
    """One stage of a finished draft: its share of the nodes, and why drafting went on or ended after it."""

    start: int  # first node index in the draft
    stop: int
    score: float
    gate: float | None  # the threshold in force; None: the gate has no threshold
    reason: StageEnd


@dataclass(frozen=True, kw_only=True)
class Draft:
    """All tokens drafted in one round, as a tree in topological order; node 0 is the anchor.

    A chain is the draft whose parents count upwards; only the attention mask, `commit` and rejection sampling ask.
    """

    tokens: list[int]
    parents: list[int]  # parents[0] is -1; every parent stands before its children
    positions: list[int]
    logp: list[float]
    tip: int  # the node a further stage starts from
    depth: int  # drafted nodes on the path from the anchor to the tip
    scores: list[float] = field(default_factory=list[float])  # one a stage
    stops: list[int] = field(default_factory=list[int])  # number of nodes after each stage
    probs: list[Float[Tensor, "_ V"]] = field(default_factory=list[Tensor])  # one a sampled stage, until judged

    @classmethod
    def rooted(cls, anchor: int, position: int) -> "Draft":
        return cls(tokens=[anchor], parents=[-1], positions=[position], logp=[0.0], tip=0, depth=0)

    def graft(self, stage: Stage) -> "Draft":
        """Hang a stage below the tip; its spine's end becomes the new tip."""
        base = len(self.tokens)
        parents = [self.tip if p < 0 else base + p for p in stage.parents]
        positions = list(self.positions)
        for parent in parents:
            positions.append(positions[parent] + 1)
        return replace(
            self,
            tokens=self.tokens + stage.tokens,
            parents=self.parents + parents,
            positions=positions,
            logp=self.logp + stage.logp,
            tip=base + stage.spine[-1] if stage.spine else self.tip,
            depth=self.depth + len(stage.spine),
            scores=[*self.scores, stage.score],
            stops=[*self.stops, base + len(stage.tokens)],
            probs=self.probs if stage.probs is None else [*self.probs, stage.probs],
        )

    def shed(self, reserve: int) -> "Draft":
        """Without its last nodes, which end the spine; the tip becomes the last node above them."""
        if not reserve:
            return self
        count = len(self.tokens) - reserve
        tip = next(node for node in reversed(self.spine) if node < count)
        return replace(
            self,
            tokens=self.tokens[:count],
            parents=self.parents[:count],
            positions=self.positions[:count],
            logp=self.logp[:count],
            tip=tip,
            depth=self.positions[tip] - self.positions[0],
            stops=[*self.stops[:-1], count],
        )

    @property
    def spine(self) -> list[int]:
        """The nodes from the anchor to the tip, both included."""
        path, node = list[int](), self.tip
        while node >= 0:
            path.append(node)
            node = self.parents[node]
        return path[::-1]

    @property
    def num_stages(self) -> int:
        return len(self.scores)

    @property
    def is_chain(self) -> bool:
        return all(parent == index - 1 for index, parent in enumerate(self.parents))

    @property
    def drafted(self) -> list[int]:
        """All drafted tokens in order, without the anchor."""
        return self.tokens[1:]


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What the judge decided. `path` holds node indices from the first accepted node on, without the anchor."""

    path: list[int]
    bonus: int | None  # the target's own token after the path; None where an accepted token ended the text


@dataclass(frozen=True, kw_only=True)
class First:
    """The token that prefill gave."""

    token: int
    finish: FinishReason | None


@dataclass(frozen=True, kw_only=True)
class Round:
    """All stages and one verification. Filled by the loop when the target has answered."""

    context_len: int  # committed positions before this round; the anchor stands at this position
    draft: Draft
    stage_records: list[StageRecord]
    path: list[int]  # accepted nodes, without the anchor
    bonus: int | None  # None when an accepted token stops
    emitted: list[int]  # the tokens that reached the text
    draft_s: float  # seconds, host clock around answered requests
    verify_s: float
    finish: FinishReason | None

    @property
    def anchor(self) -> int:
        return self.draft.tokens[0]

    @property
    def stages(self) -> int:
        return len(self.stage_records)

    @property
    def drafted(self) -> list[int]:
        return self.draft.drafted

    @property
    def scores(self) -> list[float]:
        return self.draft.scores

    @property
    def accepted(self) -> int:
        """The judge's count: never cut by a stop token or by the length limit."""
        return len(self.path)

    @property
    def full_stages(self) -> int:
        """How many leading stages were accepted down to their last depth."""
        reached, positions = set(self.path), self.draft.positions
        count = 0
        for record in self.stage_records:
            deepest = max(positions[record.start : record.stop], default=-1)
            if not any(node in reached and positions[node] == deepest for node in range(record.start, record.stop)):
                break
            count += 1
        return count


@dataclass(frozen=True, kw_only=True)
class StageRequest:
    """Asks the drafter for one stage. `index` 0 is the round's first stage and drops any earlier speculative tail."""

    slot: int
    anchor: int
    index: int
    sampling: Sampling | None = None  # None: the drafter's most likely tokens


@dataclass(frozen=True, kw_only=True)
class VerifyRequest:
    """Asks the target for one verification of a whole draft."""

    slot: int
    draft: Draft
    meanwhile: Callable[[], None] | None = None  # for the host, while a device verifies
