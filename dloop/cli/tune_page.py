"""A choice of gate as Markdown."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dloop.bench.pages import markdown
from dloop.bench.table import figure

CURVE = ("sum", "g", "cap", "tau", "stages/round", "tokens/s", "over host")
ROWS = ("rows", "verify ms", "ms a row more", "pays from tokens a round")


def page(made: Mapping[str, Any], place: Path) -> str:
    """The choice, why, the curve, and what a row costs."""
    verdict = "recommended" if made["pays"] else "the loop is not recommended; the host's own gate"
    lines = [
        f"{made['texts']} texts, {made['starts']} starts, {made['family']}, stages of {made['stage_len']} tokens; "
        f"costs: {made['costs']['source']}",
        "",
        f"**{verdict}:** `{made['recommended']['flags']}`",
        "",
        f"{made['reason']}.",
        "",
        *warnings(made),
        f"{len(made['curve'])} settings; of each sum and threshold the best cap, in sample:",
        "",
        *markdown(CURVE, [cells(row) for row in best_caps(made["curve"])]),
        "",
        made["trees"],
        "",
        *markdown(ROWS, [row_cells(row) for row in made["row_costs"]]),
        "",
        f"Written to {place}. No command reads it by itself: give the flags above to dloop generate or dloop bench.",
    ]
    return "\n".join(lines)


def warnings(made: Mapping[str, Any]) -> list[str]:
    """Where no drafting at all would be faster, or a deeper draft than was recorded might be."""
    lines: list[str] = []
    top = max(row["tokens_per_s"] for row in made["curve"])
    if top <= made["plain_tokens_per_s"]:
        lines.append(f"Plain decoding is as fast as any of these or faster: {made['plain_tokens_per_s']:.1f} tokens/s.")
    if made["pays"] and made["best"]["max_stages"] == made["max_stages"]:
        lines.append("The best cap is the deepest that was tried; a trace with more stages may have a better one.")
    return [part for line in lines for part in (line, "")]


def best_caps(curve: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The fastest cap of each sum and threshold; the first of these that tie."""
    found: dict[tuple[str, Any], Mapping[str, Any]] = {}
    for row in curve:
        key = (row["gate_sum"], row["loop_gate"])
        if key not in found or row["tokens_per_s"] > found[key]["tokens_per_s"]:
            found[key] = row
    return list(found.values())


def cells(row: Mapping[str, Any]) -> list[str]:
    """One setting."""
    is_host = row["loop_gate"] == 1
    name = ["-", "host", "-"] if is_host else [row["gate_sum"], str(row["loop_gate"]), str(row["max_stages"])]
    forms = {"acceptance_length": ".2f", "stages_per_round": ".2f", "tokens_per_s": ".1f", "gain": ".3f"}
    return [*name, *(figure(row[key], form) for key, form in forms.items())]


def row_cells(row: Mapping[str, Any]) -> list[str]:
    """One number of rows."""
    forms = {"ms": ".3f", "each_more_ms": ".4f", "pays_from": ".4f"}
    return [str(row["rows"]), *(figure(row[key], form) for key, form in forms.items())]
