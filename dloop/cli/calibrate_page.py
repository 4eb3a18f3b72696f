"""A calibration as Markdown."""

from collections.abc import Mapping
from typing import Any

from dloop.bench.pages import markdown
from dloop.bench.table import figure

JUDGED = ("stage", "n", "whole", "AUROC", "precision", "recall", "predicted", "ECE", "Brier")
SWEPT = ("sum", "g", "tau", "asked", "opened", "precision", "stages/round", "tokens/ms")
MEANS = {
    "last": "the last stage's sum: is a stage accepted whole, given that all before it is?",
    "all": "all stages' sum: is the whole chain up to this stage accepted?",
}
NOTES = (
    "n: stages drafted from all starts. whole: share accepted whole. Precision and recall: of opening from {at} on. "
    "predicted: mean of exp(score); ECE ({bins} bins) and Brier score are those of exp(score) as a probability.",
    "In the sweep every row is decoding under that gate. asked: questions to the gate where a stage could follow. "
    "opened: share answered yes. precision: share of these after which everything drafted so far was accepted.",
)


def page(made: Mapping[str, Any]) -> str:
    """Tables of statistics, of features, of the sweep, and what their columns mean."""
    costs = made["costs"]
    lines = [
        f"{made['texts']} texts, {made['starts']} starts, {made['family']}, stages of {made['stage_len']} tokens, "
        f"at most {made['max_stages']}; costs: {costs['source'] if costs else 'none given, so no speeds'}",
        "",
    ]
    for over, groups in made["scores"].items():
        lines += [f"## Sum of {over}", "", MEANS[over], "", *judged(groups), *undefined(groups), ""]
        lines += [*features(groups, made["features"]), ""] if made["features"] else []
    lines += ["## Sweep", "", *markdown(SWEPT, [swept(row) for row in made["sweep"]]), ""]
    if made["features_left_out"]:
        lines += [f"Features of the trace that are not judged: {', '.join(made['features_left_out'])}.", ""]
    bins = len(next(iter(made["scores"].values()))["all"]["reliability"])
    return "\n".join([*lines, "\n\n".join(NOTES).format(at=made["at"], bins=bins)])


def judged(groups: Mapping[str, Any]) -> list[str]:
    """A row a group of stages."""
    forms = {"observed": ".1%", "auroc": ".3f", "precision": ".1%", "recall": ".1%", "predicted": ".1%"}
    forms |= {"ece": ".3f", "brier": ".3f"}
    cells = [
        [name, str(found["stages"]), *(figure(found[key], form) for key, form in forms.items())]
        for name, found in groups.items()
    ]
    return markdown(JUDGED, cells)


def undefined(groups: Mapping[str, Any]) -> list[str]:
    """Why there is no AUROC."""
    reasons = [f"AUROC of stage {name} is undefined: {g['undefined']}." for name, g in groups.items() if g["undefined"]]
    return ["", *reasons] if reasons else []


def features(groups: Mapping[str, Any], about: Mapping[str, str]) -> list[str]:
    """AUROC of the score, and of every feature in its place."""
    rows = [["log-probability, summed", *(figure(found["auroc"], ".3f") for found in groups.values())]]
    for name, text in about.items():
        rows.append([f"{name}: {text}", *(figure(found["features"][name], ".3f") for found in groups.values())])
    return markdown(("AUROC by stage", *groups), rows)


def swept(row: Mapping[str, Any]) -> list[str]:
    """One threshold."""
    threshold = "host" if row["threshold"] is None else str(row["threshold"])
    forms = {"acceptance_length": ".2f", "asked": "d", "opened_rate": ".1%", "precision": ".1%"}
    forms |= {"stages_per_round": ".2f", "tokens_per_ms": ".4f"}
    return [row["gate_sum"], threshold, *(figure(row[key], form) for key, form in forms.items())]
