"""From records to figures: pure functions, so that a summary can always be made again from `rounds.jsonl`."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypedDict

import numpy as np
from jaxtyping import Float

from dloop.records import Json, Number, RoundJson, mean_of, number, rebuild, repetition_share
from dloop.types import FinishReason

RESAMPLES, BOOTSTRAP_SEED, LEVEL = 2000, 0, 0.95


class HeaderJson(TypedDict):
    """One response; `rounds` lines of rounds follow it. Every turn of a conversation is a response."""

    schema: int
    sample: int  # row of the unshuffled set
    turn: int  # from 0
    turns: int  # of the sample
    prompt_sha256: str | None  # null: the prompt could not be made
    num_prompt_tokens: int
    first: int | None  # the token that prefill gave; null: failed
    seed: int  # the sample's own
    finish_reason: FinishReason | None
    exact: bool  # whether the bit-identical mode was on
    num_tokens: int  # the first one included
    rounds: int
    prefill_s: float  # until the first token
    decode_s: float  # from the first token to the last
    peak_memory_bytes: int
    error: str | None  # why there is no text


@dataclass(frozen=True)
class Response:
    """One finished (or failed) answer."""

    header: HeaderJson
    rounds: list[RoundJson]

    @property
    def tokens(self) -> list[int]:
        """The text, from the records alone."""
        first = self.header["first"]
        return [] if first is None else rebuild(first, self.rounds).tokens

    @property
    def acceptance_length(self) -> float:
        return mean_of([record["accepted"] + 1 for record in self.rounds])


class Figures(TypedDict):
    """What was measured. Means over responses leave out failed ones and those that prefill ended."""

    responses: int
    tokens: int
    exact: bool  # whether the bit-identical mode was on in all of them
    acceptance_length: Number  # paper: mean over responses of the mean over rounds of accepted + 1, never cut
    acceptance_length_pooled: Number  # tokens that reached the text / rounds
    acceptance_length_accepted_plus_one: Number  # 1 + accepted / rounds, over all rounds, never cut
    acceptance_length_deepspec: Number  # over all rounds of first turns; a round with an accepted stop: no bonus
    accepted_histogram: dict[str, int]  # rounds by accepted + 1
    tokens_per_s: Number  # after the first token: prefill is left out
    time_per_output_token_ms: Number  # mean over responses of decode time / tokens, as in the official benchmark
    time_to_first_token_ms: Number
    rounds: int
    stages: int
    stage_counts: dict[str, int]  # rounds by number of stages
    draft_passes: int  # forwards of the drafter: block families need one a stage
    verified_tokens: int  # rows of all verifications, anchors included
    full_acceptance_rate: dict[str, float]  # by stage (1 the first): of the rounds that drafted it, accepted whole
    output_share_looped: Number  # of the text's tokens: drafted in a second or later stage
    time_share: dict[str, Number]  # of the decode time
    peak_memory_bytes: int  # GPU: allocated while decoding; CPU: of the process
    intervals: dict[str, Json]  # 95 %, bootstrap over samples
    repetition_share: Number  # of 8-grams that stood in the answer before: repetition flatters every drafter
    failures: int
    failure_messages: list[dict[str, Json]]


def figures(responses: Sequence[Response]) -> Figures:
    """Every figure of a set; figures that nothing was measured for are null."""
    failed = [response for response in responses if response.header["error"] is not None]
    good = [response for response in responses if response.header["error"] is None]
    decoded = [response for response in good if response.rounds]
    rounds = [record for response in decoded for record in response.rounds]
    texts = {id(response): response.tokens for response in good}
    tokens, decode_s = sum(map(len, texts.values())), sum(response.header["decode_s"] for response in decoded)
    stages = Counter(len(record["stages"]) for record in rounds)
    per_token = [response.header["decode_s"] / response.header["num_tokens"] for response in decoded]
    return {
        "responses": len(responses),
        "tokens": tokens,
        "exact": bool(good) and all(response.header["exact"] for response in good),
        **acceptance(decoded),
        "tokens_per_s": number(ratio(sum(len(texts[id(response)]) - 1 for response in decoded), decode_s)),
        "time_per_output_token_ms": number(1000 * mean_of(per_token)),
        "time_to_first_token_ms": number(1000 * mean_of([response.header["prefill_s"] for response in good])),
        "rounds": len(rounds),
        "stages": (num_stages := sum(count * n for count, n in stages.items())),
        "stage_counts": {str(count): stages[count] for count in sorted(stages)},
        "draft_passes": num_stages,
        "verified_tokens": sum(1 + num_drafted(record) for record in rounds),
        "full_acceptance_rate": full_acceptance_rate(rounds),
        "output_share_looped": number(ratio(sum(map(looped_tokens, rounds)), tokens)),
        "time_share": time_share(rounds, decode_s),
        "peak_memory_bytes": max((response.header["peak_memory_bytes"] for response in responses), default=0),
        "intervals": intervals(decoded),
        "repetition_share": number(mean_of([repetition_share(text) for text in texts.values()])),
        "failures": len(failed),
        "failure_messages": [
            {"sample": h["sample"], "turn": h["turn"], "error": h["error"]} for h in (r.header for r in failed)
        ],
    }


class Acceptance(TypedDict):
    """One text's rounds counted in the four ways met in the field; the paper's comes first."""

    acceptance_length: Number
    acceptance_length_pooled: Number
    acceptance_length_accepted_plus_one: Number
    acceptance_length_deepspec: Number
    accepted_histogram: dict[str, int]


def acceptance(decoded: Sequence[Response]) -> Acceptance:
    """All definitions of the acceptance length. Source: dflash's benchmark, speculators, vLLM, DeepSpec."""
    rounds = [record for response in decoded for record in response.rounds]
    lengths = Counter(record["accepted"] + 1 for record in rounds)
    first_turns = [response for response in decoded if response.header["turn"] == 0]
    return {
        "acceptance_length": number(mean_of([response.acceptance_length for response in decoded])),
        "acceptance_length_pooled": number(mean_of([len(record["emitted"]) for record in rounds])),
        "acceptance_length_accepted_plus_one": number(mean_of([record["accepted"] + 1 for record in rounds])),
        "acceptance_length_deepspec": number(mean_of([n for response in first_turns for n in deepspec(response)])),
        "accepted_histogram": {str(length): lengths[length] for length in sorted(lengths)},
    }


def deepspec(response: Response) -> list[int]:
    """A round counts accepted + 1; with an accepted stop token, what was accepted up to it. Source: DeepSpec."""
    counts = [record["accepted"] + (record["bonus"] is not None) for record in response.rounds]
    last = response.rounds[-1]
    if last["bonus"] is None and response.header["finish_reason"] == "stop":
        counts[-1] = len(last["emitted"])
    return counts


def num_drafted(record: RoundJson) -> int:
    """Drafted nodes of a round."""
    return sum(len(stage["tokens"]) for stage in record["stages"])


def looped_tokens(record: RoundJson) -> int:
    """Emitted tokens that a second or later stage drafted."""
    start = 1 + len(record["stages"][0]["tokens"]) if record["stages"] else 0
    return sum(node >= start for node in record["path"][: len(record["emitted"])])


def full_acceptance_rate(rounds: Sequence[RoundJson]) -> dict[str, float]:
    """By stage: of the rounds that drafted it, the share whose accepted path reaches the stage's last depth."""
    drafted: Counter[int] = Counter()
    whole: Counter[int] = Counter()
    for record in rounds:
        path, depths = set(record["path"]), [0]
        for index, stage in enumerate(record["stages"], 1):
            start = len(depths)
            for parent in stage["parents"]:
                depths.append(depths[parent] + 1)
            if start == len(depths):  # a stop rule admitted nothing
                continue
            deepest = max(depths[start:])
            drafted[index] += 1
            whole[index] += any(node in path and depths[node] == deepest for node in range(start, len(depths)))
    return {str(index): whole[index] / drafted[index] for index in sorted(drafted)}


def time_share(rounds: Sequence[RoundJson], decode_s: float) -> dict[str, Number]:
    """Shares of the decode time; verification includes the judge and both models' bookkeeping."""
    draft = ratio(sum(record["draft_s"] for record in rounds), decode_s)
    verify = ratio(sum(record["verify_s"] for record in rounds), decode_s)
    return {"draft": number(draft), "verify": number(verify), "other": number(1 - draft - verify)}


def intervals(decoded: Sequence[Response]) -> dict[str, Json]:
    """Percentile bootstrap over samples: the turns of one conversation stay together."""
    samples: dict[int, list[Response]] = {}
    for response in decoded:
        samples.setdefault(response.header["sample"], []).append(response)
    groups = list(samples.values())
    lengths = [(sum(r.acceptance_length for r in group), float(len(group))) for group in groups]
    speeds = [
        (float(sum(r.header["num_tokens"] - 1 for r in group)), sum(r.header["decode_s"] for r in group))
        for group in groups
    ]
    return {
        "level": LEVEL,
        "resamples": RESAMPLES,
        "seed": BOOTSTRAP_SEED,
        "acceptance_length": interval(lengths),
        "tokens_per_s": interval(speeds),
    }


def interval(parts_and_wholes: Sequence[tuple[float, float]]) -> list[float] | None:
    """Bounds of sum(parts) / sum(wholes); None for fewer than two samples."""
    if len(parts_and_wholes) < 2:
        return None
    sums = resample(np.array(parts_and_wholes, dtype=np.float64))
    return bounds(sums[:, 0] / sums[:, 1])


def resample(samples: Float[np.ndarray, "n c"], stream: int = 0) -> Float[np.ndarray, "r c"]:
    """Sums over samples drawn with replacement; one `stream` draws the same samples again, another one others."""
    generator = np.random.default_rng([BOOTSTRAP_SEED, stream] if stream else BOOTSTRAP_SEED)
    return samples[generator.integers(len(samples), size=(RESAMPLES, len(samples)))].sum(1)


def bounds(draws: Float[np.ndarray, " r"]) -> list[float]:
    """The percentile interval of a figure's draws."""
    tail = 50 * (1 - LEVEL)
    low, high = np.percentile(draws, [tail, 100 - tail])
    return [float(low), float(high)]


def ratio(part: float, whole: float) -> float:
    """nan where there is nothing to divide by."""
    return part / whole if whole else math.nan
