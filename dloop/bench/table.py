"""The figures of some sets as tables, with the reasons for what is missing."""

from collections.abc import Mapping, Sequence
from typing import cast

from rich import box
from rich.console import Console
from rich.table import Table

from dloop.records import Json

Summary = Mapping[str, Json]
COLUMNS = ("set", "n", "tau", "95 %", "tok/s", "speed-up", "repeats", "stages", "2nd on", "failed")


def show(summaries: Sequence[Summary], console: Console | None = None) -> None:
    """Print a table for each setting, and below them what the columns mean and what is missing."""
    console = console or Console(highlight=False)
    settings: dict[tuple[Json, Json], list[Summary]] = {}
    for summary in summaries:
        settings.setdefault((summary["draft"], summary["setting_name"]), []).append(summary)
    for alike in settings.values():
        console.print(title(alike[0]))
        console.print(table_of(alike))
    for line in notes(summaries):
        console.print(line, style="dim")


def title(summary: Summary) -> str:
    """What was measured, and on what."""
    pair = " + ".join(str(name) for name in (summary["target"], summary["draft"]) if name)
    hardware = cast(Summary, summary["hardware"])
    return f"{pair}, {summary['setting_name']}, {summary['dtype']} on {hardware['gpu'] or hardware['cpu']}"


def table_of(summaries: Sequence[Summary]) -> Table:
    """A row a set."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=0, pad_edge=False, header_style="bold")
    for index, name in enumerate(COLUMNS):
        table.add_column(name, justify="right" if index else "left", no_wrap=True)
    for summary in summaries:
        table.add_row(*cells(summary))
    return table


def cells(summary: Summary) -> list[str]:
    """One set's row."""
    complete = cast(Summary, summary["subset"])["complete"]
    bounds = cast(list[float] | None, cast(Summary, summary["intervals"])["acceptance_length"])
    rounds, stages = cast(int, summary["rounds"]), cast(int, summary["stages"])
    most = max(map(int, cast(Summary, summary["stage_counts"])), default=0)
    drafts = summary["draft"] is not None and rounds > 0
    return [
        str(summary["dataset"]),
        f"{len(cast(list[int], summary['samples']))}{'' if complete else '*'}",
        figure(summary["acceptance_length"], ".2f"),
        f"{bounds[0]:.2f}-{bounds[1]:.2f}" if bounds else "-",
        figure(summary["tokens_per_s"], ".1f"),
        speed(summary),
        figure(summary["repetition_share"], ".0%"),
        f"{stages / rounds:.1f}/{most}" if drafts else "-",
        figure(summary["output_share_looped"], ".0%") if drafts else "-",
        str(summary["failures"]),
    ]


def figure(value: Json, form: str) -> str:
    """A number, or a dash for none."""
    return format(value, form) if isinstance(value, float | int) else "-"


def speed(summary: Summary) -> str:
    """The speed-up; the reason for a missing one stands below the table."""
    if summary["draft"] is None:
        return "baseline"
    return figure(summary["speedup"], ".2f") + ("x" if summary["speedup"] is not None else "")


def notes(summaries: Sequence[Summary]) -> list[str]:
    """What the numbers are, what lacks, and what failed."""
    lines = [
        "n: samples. tau: mean over responses of the mean over rounds of accepted + 1, never cut. tok/s: prefill left "
        "out. repeats: share of 8-grams seen before in the answer. stages: mean and most in a round. 2nd on: share of "
        "the text drafted in a second or later stage."
    ]
    if not all(cast(Summary, summary["subset"])["complete"] for summary in summaries):
        lines.append("*: not the published samples of this set: other rows, or --max-samples.")
    reasons: dict[str, list[str]] = {}
    for summary in summaries:
        if summary["draft"] is not None and summary["speedup_reason"] is not None:
            reasons.setdefault(str(summary["speedup_reason"]), []).append(str(summary["dataset"]))
    lines += [f"no speed-up for {', '.join(names)}: {reason}." for reason, names in reasons.items()]
    for summary in summaries:
        for failure in cast(list[Summary], summary["failure_messages"]):
            where = f"{summary['dataset']}, sample {failure['sample']}, turn {failure['turn']}"
            lines.append(f"failed: {where}: {failure['error']}")
    return lines
