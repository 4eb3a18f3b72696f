"""A trace: what a pair would draft from every position of fixed texts, and how far the target agrees.

Stages follow the drafter's own tokens, right or wrong, so any gate's rounds can be read off: a round that starts at i
and drafts s stages accepts min(accepted[i], s k) tokens. Chains only; a file is one .npz, whole or not there.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
from jaxtyping import Float32, Float64, Int32, Int64

from dloop.data.answers import whole
from dloop.errors import UserError
from dloop.loop import Limits


@dataclass(frozen=True, kw_only=True)
class Ground:
    """What all texts of a trace share: the drafter's stage, and the limits under which the texts were written."""

    family: str
    stage_len: int
    limits: Limits


@dataclass(frozen=True, kw_only=True)
class Text:
    """One text of T tokens from its n = T - 1 starts (the last token is nobody's anchor), S stages of k tokens each.

    Start i has answer[i] as its anchor. Stages that cannot follow are empty: score and logp nan, tokens -1.
    """

    prompt: Int32[np.ndarray, " P"]
    answer: Int32[np.ndarray, " T"]  # the first one comes from prefill
    stages: Int64[np.ndarray, " n"]  # how many can follow: limits and stop tokens end a draft whatever a gate says
    accepted: Int64[np.ndarray, " n"]  # the judge's count if all of them are drafted; beyond the text's end too
    score: Float64[np.ndarray, "n S"]  # what the gate reads: summed top-1 log-probability
    tokens: Int32[np.ndarray, "n S k"]
    logp: Float32[np.ndarray, "n S k"]  # of each token; greedy drafts are the top-1 tokens
    features: Float32[np.ndarray, "n S k F"]  # by `Trace.features`

    def __len__(self) -> int:
        return len(self.stages)


PER_START = ("stages", "accepted", "score", "tokens", "logp", "features")


@dataclass(frozen=True, kw_only=True)
class Trace:
    """Texts of one pair."""

    ground: Ground
    texts: list[Text]
    features: tuple[str, ...] = ()  # names of what is kept of each row beside its log-probability

    @property
    def starts(self) -> int:
        return sum(map(len, self.texts))


def joined(traces: Sequence[Trace]) -> Trace:
    """At least one trace of one pair and one setting, as one."""
    first = traces[0]
    if any((trace.ground, trace.features) != (first.ground, first.features) for trace in traces):
        raise UserError("these traces are of different pairs or limits, and cannot be joined; record them apart")
    texts = [text for trace in traces for text in trace.texts]
    return Trace(ground=first.ground, texts=texts, features=first.features)


def save(path: Path, trace: Trace) -> None:
    """Write a trace of at least one text, all of it or nothing."""
    ground, limits, texts = trace.ground, trace.ground.limits, trace.texts
    arrays = {
        "family": np.array(ground.family),
        "stage_len": np.array(ground.stage_len),
        "max_new_tokens": np.array(limits.max_new_tokens),
        "max_stages": np.array(limits.max_stages),
        "context": np.array(limits.context),
        "stop_ids": np.array(sorted(limits.stop_ids), np.int64),
        "feature_names": np.array(trace.features, np.str_),
        "flat": np.concatenate([part for text in texts for part in (text.prompt, text.answer)]),
        "lens": np.array([(len(text.prompt), len(text.answer)) for text in texts], np.int64),
        **{name: np.concatenate([getattr(text, name) for text in texts]) for name in PER_START},
    }
    with whole(path) as file:
        np.savez_compressed(file, **arrays)  # pyright: ignore[reportArgumentType]


def load(path: Path) -> Trace:
    """Read a trace. Raises UserError where the file is none."""
    try:
        with np.load(path) as data:
            return from_arrays(dict(data))
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror or error}); give the .npz of dloop trace") from error
    except Exception as error:  # a damaged archive raises whatever zipfile, zlib, struct and numpy trip over
        raise UserError(
            f"{path} is no trace ({type(error).__name__}: {error}); write one with dloop trace record"
        ) from error


def from_arrays(data: dict[str, np.ndarray]) -> Trace:
    """A trace from the arrays of its file."""
    limits = Limits(
        max_new_tokens=int(data["max_new_tokens"]),
        max_stages=int(data["max_stages"]),
        context=int(data["context"]),
        stop_ids=frozenset(data["stop_ids"].tolist()),
    )
    ground = Ground(family=str(data["family"]), stage_len=int(data["stage_len"]), limits=limits)
    lens = data["lens"]
    parts = np.split(data["flat"], lens.ravel().cumsum()[:-1])
    cuts = (lens[:, 1] - 1).cumsum()[:-1]
    columns = {name: np.split(data[name], cuts) for name in PER_START}
    texts = [
        Text(prompt=parts[2 * i], answer=parts[2 * i + 1], **{name: columns[name][i] for name in PER_START})
        for i in range(len(lens))
    ]
    return Trace(ground=ground, texts=texts, features=tuple(data["feature_names"].tolist()))


def is_same(one: Text, other: Text) -> bool:
    """Whether two texts and all that is known of them agree to the last bit."""
    pairs = [(getattr(one, each.name), getattr(other, each.name)) for each in fields(Text)]
    return all(np.array_equal(a, b, equal_nan=a.dtype.kind == "f") for a, b in pairs)
