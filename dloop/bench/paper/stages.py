"""What loops of S drafting stages bring and take: tables 4, A3 and A4 of the paper, and its Figures 1 and 3."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from dloop.bench.loops import Looped, Loops, total
from dloop.bench.naming import Column
from dloop.bench.pages import heading, meaning
from dloop.bench.paper.choose import TREES, Families, base, grouped, has_rule
from dloop.bench.paper.shape import Cell, Field, Part
from dloop.bench.report import Found, mean, place_of_set, shared_sets
from dloop.bench.results import SECONDS, Condition, Result
from dloop.bench.speedup import facts

DEEPEST = 5  # the paper counts loops of so many stages and of more together
GIB = 2**30
Rows = list[list[Cell]]


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What a table shows of each setting."""

    fields: Sequence[Field]
    rows: Callable[[Column, Found], Rows]  # of one setting, among those of its family
    needs: Callable[[Found], bool] = bool
    notes: Callable[[Condition, Found], Sequence[str]] = lambda condition, mine: ()


def stages(found: Found, shape: Shape) -> list[Part]:
    """A part a condition; what is summed or compared is of the sets that all settings of a family have."""
    parts: list[Part] = []
    for condition, families in grouped(found, lambda column, runs: True).items():
        shared = {name: on_shared(mine) for name, mine in families.items() if shape.needs(mine)}
        kept = {name: mine for name, mine in shared.items() if mine}
        lost = [f"{name}: nothing is summed, as no set has all its settings" for name in shared if name not in kept]
        if shared:
            rows = [
                [name, column.setting, *cells]
                for name, mine in kept.items()
                for column in mine
                for cells in shape.rows(column, mine)
            ]
            told = [over(name, mine, families[name]) for name, mine in kept.items()]
            told += [f"{name}: {line}" for name, mine in kept.items() for line in shape.notes(condition, mine)]
            fields = [Field("family"), Field("setting"), *shape.fields]
            notes = [*lost, *told]
            parts.append(
                Part(heading=heading(condition), fields=fields, rows=rows, notes=notes, legend=legend_of(kept))
            )
    return parts


def on_shared(mine: Found) -> Found:
    """The runs on the sets that all settings have; no settings where there is no such set."""
    sets = shared_sets(mine)
    return {column: {name: runs[name] for name in sets} for column, runs in mine.items()} if sets else {}


def legend_of(families: Families) -> list[str]:
    """What each setting is."""
    return [
        meaning(column, next(iter(runs.values())), {name})
        for name, mine in families.items()
        for column, runs in mine.items()
    ]


def over(name: str, mine: Found, whole: Found) -> str:
    """The sets that were summed."""
    sets = shared_sets(mine)
    others = sorted({each for runs in whole.values() for each in runs if each not in sets}, key=place_of_set)
    rest = f"; without {', '.join(others)}, which not every setting has" if others else ""
    return f"{name}: over {', '.join(sets)}{rest}"


def responses(runs: Mapping[str, Result]) -> list[Looped]:
    """All good responses of a setting."""
    return [response for run in runs.values() for response in run.looped]


def group(stages: int) -> str:
    """S as the tables write it."""
    return str(stages) if stages < DEEPEST else f"{DEEPEST}+"


def by_group(responses: Sequence[Looped]) -> dict[str, Loops]:
    """The loops of all these responses by S, the fewest first."""
    found: dict[int, list[Loops]] = {}
    for response in responses:
        for stages, loops in response.by_stages.items():
            found.setdefault(min(stages, DEEPEST), []).append(loops)
    return {group(stages): total(found[stages]) for stages in sorted(found)}


def share(part: float, whole: float) -> float | None:
    """None of nothing."""
    return part / whole if whole else None


def loop_rows(column: Column, mine: Found) -> Rows:
    """Table 4: a row an S, and one of all."""
    found = by_group(responses(mine[column]))
    whole = total(found.values())
    return [
        [
            name,
            loops.rounds,
            1000 * loops.seconds / loops.rounds,
            loops.tokens / loops.rounds,
            share(1000 * loops.seconds, loops.tokens),
            loops.seconds,
            share(loops.seconds, whole.seconds),
            loops.tokens,
            share(loops.tokens, whole.tokens),
        ]
        for name, loops in [*found.items(), ("all", whole)]
        if loops.rounds
    ]


def opened(mine: Found) -> bool:
    """Whether a loop of these settings has a second stage."""
    return any(max(each.by_stages) > 1 for runs in mine.values() for each in responses(runs))


def latency_rows(column: Column, mine: Found) -> Rows:
    """Table A4: a row an S."""
    runs = mine[column]
    found = responses(runs)
    peaks: dict[str, int] = {}
    for each in found:
        longest = group(max(each.by_stages))
        peaks[longest] = max(peaks.get(longest, 0), each.peak_memory_bytes)
    on_gpu = all(is_gpu(run) for run in runs.values())
    return [
        [
            name,
            loops.rounds,
            1000 * loops.draft_s / loops.rounds,
            1000 * loops.verify_s / loops.rounds,
            1000 * loops.seconds / loops.rounds,
            peaks[name] / GIB if on_gpu and name in peaks else None,
        ]
        for name, loops in by_group(found).items()
    ]


def is_gpu(run: Result) -> bool:
    """Whether a run was measured on a GPU."""
    return cast(Mapping[str, object], run.summary["hardware"])["gpu"] is not None


def memory_notes(condition: Condition, mine: Found) -> list[str]:
    """What the peaks are, or why there are none."""
    if all(is_gpu(run) for runs in mine.values() for run in runs.values()):
        return ["peak GiB: allocated by the responses whose longest loop has S stages; a dash: there is none"]
    return ["no peak GiB: a CPU's records hold the memory of the whole process since its start"]


def count_rows(column: Column, mine: Found) -> Rows:
    """Table A3: one row, its sums held against those of the setting without a loop."""
    runs, other = mine[column], compared(column, mine)
    rounds, drafted, tokens = (summed(runs, key) for key in ("rounds", "stages", "tokens"))
    changes: list[float | None] = [None, None]
    if isinstance(other, Column):
        changes[0] = change(rounds, summed(mine[other], "rounds"))
        changes[1] = change(decode_s(runs), decode_s(mine[other]))
    return [[drafted, rounds, share(drafted, rounds), tokens, changes[0], decode_s(runs), changes[1]]]


def change(now: float, before: float) -> float | None:
    """By what share more; below 0, less."""
    return now / before - 1 if before else None


def summed(runs: Mapping[str, Result], key: str) -> int:
    """A count of the summaries, of all sets."""
    return sum(cast(int, run.summary[key]) for run in runs.values())


def decode_s(runs: Mapping[str, Result]) -> float:
    """Seconds of decoding after prefill, of all sets."""
    return float(sum(sums[SECONDS] for run in runs.values() for sums in run.samples.values()))


def compared(column: Column, mine: Found) -> Column | str | None:
    """The setting without a loop that one is held against, or why it is not; None: it is that setting."""
    reference = reference_of(column, mine)
    if reference is None or reference == column:
        return None if reference else "no setting without a loop, or several, stand beside it"
    for name, run in mine[column].items():
        ours, theirs = facts(run.summary), facts(mine[reference][name].summary)
        if other := [fact for fact in ours if ours[fact] != theirs[fact]]:
            return f"{reference.setting} has another {other[0]} on {name}"
    return reference


def reference_of(column: Column, mine: Found) -> Column | None:
    """The host, else the trained drafter with its gate closed; of trees, those trees. None: neither, or several."""
    for wanted in ("tree", "tree_trained") if base(column) in TREES else ("host", "trained"):
        found = [each for each, runs in mine.items() if base(each) == wanted and not has_rule([*runs.values()])]
        exact = [each for each in found if each.setting == column.setting.replace(base(column), wanted, 1)]
        if found:
            return exact[0] if exact else found[0] if len(found) == 1 else None
    return None


def count_notes(condition: Condition, mine: Found) -> list[str]:
    """What is compared, and why something is not."""
    others = {column.setting: compared(column, mine) for column in mine}
    pairs = [f"{name} with {other.setting}" for name, other in others.items() if isinstance(other, Column)]
    lines = [f"changes compare {', '.join(pairs)}"] if pairs else []
    return lines + [f"{name} is compared with nothing: {why}" for name, why in others.items() if isinstance(why, str)]


SHAPES = {
    "4": Shape(
        fields=[
            Field("S"),
            Field("loops", "d"),
            Field("ms/loop", ".2f"),
            Field("tokens/loop", ".2f"),
            Field("ms/token", ".2f"),
            Field("time s", ".2f"),
            Field("of time", ".1%"),
            Field("tokens", "d"),
            Field("of tokens", ".1%"),
        ],
        rows=loop_rows,
        needs=opened,
    ),
    "A3": Shape(
        fields=[
            Field("stages", "d"),
            Field("verifications", "d"),
            Field("stages each", ".2f"),
            Field("tokens", "d"),
            Field("verif. change", "+.1%"),
            Field("time s", ".2f"),
            Field("time change", "+.1%"),
        ],
        rows=count_rows,
        notes=count_notes,
    ),
    "A4": Shape(
        fields=[
            Field("S"),
            Field("loops", "d"),
            Field("draft ms", ".2f"),
            Field("verify ms", ".2f"),
            Field("loop ms", ".2f"),
            Field("peak GiB", ".2f"),
        ],
        rows=latency_rows,
        notes=memory_notes,
    ),
}


def acceptance(found: Found) -> list[Part]:
    """Figure 1: a row a setting and stage, a column a set, and the mean of the sets that a family's settings share."""
    parts: list[Part] = []
    for condition, families in grouped(found, lambda column, runs: True).items():
        names = {name for mine in families.values() for runs in mine.values() for name in runs}
        sets = sorted(names, key=place_of_set)
        words = [Field("family"), Field("setting"), Field("stage")]
        fields = [*words, *(Field(name, ".1%") for name in (*sets, "mean"))]
        rows: Rows = []
        for name, mine in families.items():
            shared = shared_sets(mine)
            for column, runs in mine.items():
                for stage in range(1, 1 + max((int(each) for run in runs.values() for each in rates(run)), default=0)):
                    by_set = {each: rates(run).get(str(stage)) for each, run in runs.items()}
                    whole = mean([by_set[each] for each in shared])
                    rows.append([name, column.setting, str(stage), *map(by_set.get, sets), whole])
        legend = legend_of(families)
        parts.append(Part(heading=heading(condition), fields=fields, rows=rows, notes=[RATES], legend=legend))
    return parts


def rates(run: Result) -> Mapping[str, float]:
    """By stage, the first one 1."""
    return cast(Mapping[str, float], run.summary["full_acceptance_rate"])


RATES = (
    "of the rounds that drafted a stage, the share whose accepted path reaches its last depth; mean: of the sets that "
    "all settings of a family have, a dash where one of them never drafted so deep"
)
