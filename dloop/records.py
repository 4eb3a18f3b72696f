"""What a decode leaves behind: rounds as JSON, one document a text, and the numbers read from rounds.

Everything here is strict JSON: infinities are the words "inf" and "-inf", what is undefined is null.
"""

import hashlib
import json
import math
import os
import platform
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Literal, TypeAlias, TypedDict, cast

import torch

from dloop import __version__
from dloop.api import Generation
from dloop.drafters.host import HostDrafter
from dloop.targets.hf import HFTarget
from dloop.types import FinishReason, Round, StageEnd

SCHEMA = 1
Number = float | Literal["inf", "-inf"] | None
Json: TypeAlias = "None | bool | int | float | str | Sequence[Json] | dict[str, Json]"


class StageJson(TypedDict):
    """One stage's nodes. Nodes of a round are numbered through: 0 is the anchor, then the drafts in order."""

    tokens: list[int]
    parents: list[int]  # nodes of the whole draft
    logp: list[Number]  # natural log, of each token
    score: Number  # summed top-1 log-probability, what the gate reads
    gate: Number  # the threshold in force
    reason: StageEnd  # why drafting ended after this stage, or "open"


class RoundJson(TypedDict):
    """One target forward and the stages before it."""

    context_len: int
    stages: list[StageJson]
    path: list[int]  # accepted nodes
    accepted: int  # the judge's count, never cut
    emitted: list[int]  # tokens that reached the text
    bonus: int | None
    draft_s: float
    verify_s: float


class GenerationJson(TypedDict):
    """One text, all that decided it, and how it came about."""

    schema: int
    target: str
    draft: str | None
    family: str | None
    setting: dict[str, Json]
    prompt_ids: list[int]
    prompt_sha256: str  # of the ids in decimal, joined by commas
    tokens: list[int]
    text: str | None  # null: the target has no tokenizer
    first: int  # the token that prefill gave
    finish_reason: FinishReason
    seed: int | None
    acceptance_length: Number  # mean over rounds of accepted + 1
    tokens_per_s: Number  # after the first token: prefill is left out
    exact: bool
    rounds: list[RoundJson]
    versions: dict[str, str]
    hardware: dict[str, Json]
    dtype: str
    device: str
    engine: str
    attention: str


def round_record(round: Round) -> RoundJson:
    """Write a round down: enough to rebuild the text, the tree and every gate decision."""
    draft = round.draft
    return {
        "context_len": round.context_len,
        "stages": [
            {
                "tokens": draft.tokens[stage.start : stage.stop],
                "parents": draft.parents[stage.start : stage.stop],
                "logp": [number(logp) for logp in draft.logp[stage.start : stage.stop]],
                "score": number(stage.score),
                "gate": number(stage.gate),
                "reason": stage.reason,
            }
            for stage in round.stage_records
        ],
        "path": round.path,
        "accepted": round.accepted,
        "emitted": round.emitted,
        "bonus": round.bonus,
        "draft_s": round.draft_s,
        "verify_s": round.verify_s,
    }


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A finished text with its prompt and its time."""

    prompt_ids: list[int]
    generation: Generation
    text: str | None
    decode_s: float  # from the first token to the last: without prefill and printing

    @property
    def tokens_per_s(self) -> float:
        """After the first token; nan if there is no further one."""
        return (len(self.generation.tokens) - 1) / self.decode_s if self.generation.rounds else math.nan


def document(target: HFTarget, drafter: HostDrafter | None, setting: dict[str, Json], answer: Answer) -> GenerationJson:
    """The one document that `dloop generate --json` prints."""
    generation = answer.generation
    return {
        "schema": SCHEMA,
        "target": target.name,
        "draft": drafter.name if drafter else None,
        "family": drafter.family if drafter else None,
        "setting": setting,
        "prompt_ids": answer.prompt_ids,
        "prompt_sha256": prompt_sha256(answer.prompt_ids),
        "tokens": generation.tokens,
        "text": answer.text,
        "first": generation.first,
        "finish_reason": generation.finish_reason,
        "seed": generation.seed,
        "acceptance_length": number(generation.acceptance_length),
        "tokens_per_s": number(answer.tokens_per_s),
        "exact": generation.exact,
        "rounds": [round_record(round) for round in generation.rounds],
        "versions": versions(),
        "hardware": hardware(target.device),
        "dtype": str(target.dtype).removeprefix("torch."),
        "device": str(target.device),
        "engine": target.engine,
        "attention": target.attention,
    }


def dumps(value: object) -> str:
    """Strict JSON in ASCII, so that no terminal or pipe can spoil it."""
    return json.dumps(value, allow_nan=False)


@dataclass(frozen=True)
class Rebuilt:
    """What records alone tell about a text."""

    tokens: list[int]
    acceptance_length: float


def rebuild(first: int, rounds: Sequence[RoundJson]) -> Rebuilt:
    """Read the text and the acceptance length out of records.

    Raises ValueError where a round's emitted tokens are not what its own drafts, path and bonus give.
    """
    tokens, anchor = [first], first
    for index, record in enumerate(rounds):
        nodes = [anchor, *(token for stage in record["stages"] for token in stage["tokens"])]
        chosen = [nodes[node] for node in record["path"]]
        chosen += [] if record["bonus"] is None else [record["bonus"]]
        if chosen[: len(record["emitted"])] != record["emitted"]:
            raise ValueError(f"round {index} emitted {record['emitted']}, but its path and bonus give {chosen}")
        tokens += record["emitted"]
        anchor = chosen[-1]
    return Rebuilt(tokens, mean_of([record["accepted"] + 1 for record in rounds]))


def acceptance_length(rounds: Sequence[Round]) -> float:
    """Mean over rounds of accepted + 1, never cut; nan without a round."""
    return mean_of([round.accepted + 1 for round in rounds])


def stage_counts(rounds: Sequence[Round]) -> dict[int, int]:
    """How many rounds had 0, 1, 2 ... stages."""
    return dict(sorted(Counter(round.stages for round in rounds).items()))


def looped_tokens(rounds: Sequence[Round]) -> int:
    """How many emitted tokens were drafted in a second or later stage."""
    starts = [(round, round.stage_records[1].start) for round in rounds if round.stages > 1]
    return sum(node >= start for round, start in starts for node in round.path[: len(round.emitted)])


def repetition_share(tokens: Sequence[int], n: int = 8) -> float:
    """Share of the text's n-grams that stood in it before: looping texts flatter every drafter."""
    grams = [tuple(tokens[start : start + n]) for start in range(len(tokens) - n + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def mean_of(values: Sequence[float]) -> float:
    """The mean; nan of nothing."""
    return sum(values) / len(values) if values else math.nan


def number(value: float | None) -> Number:
    """A float as strict JSON allows it."""
    if value is None or math.isnan(value):
        return None
    return value if math.isfinite(value) else "inf" if value > 0 else "-inf"


def plain(value: object) -> Json:
    """Any setting as strict JSON."""
    if isinstance(value, float):
        return number(value)
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in cast(dict[object, object], value).items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in cast(Sequence[object], value)]
    return value if value is None or isinstance(value, bool | int | str) else str(value)


def prompt_sha256(prompt_ids: Sequence[int]) -> str:
    """Names a prompt without repeating it."""
    return hashlib.sha256(",".join(map(str, prompt_ids)).encode()).hexdigest()


def versions() -> dict[str, str]:
    """Releases of what decides a result."""
    return {
        "dloop": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": version("transformers"),
    }


def hardware(device: torch.device) -> dict[str, Json]:
    """What the figures were measured on."""
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    return {"cpu": cpu_name(), "cores": os.cpu_count(), "threads": torch.get_num_threads(), "gpu": gpu}


def cpu_name() -> str:
    """The processor, as the system tells it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
