"""Which tables `dloop report --tables` prints, and what each needs; imports neither torch nor NumPy."""

from typing import NamedTuple

from dloop.errors import UserError

SETS, ALL = "sets", "all"


class Known(NamedTuple):
    """A table of the paper."""

    title: str
    needs: str  # told where there is nothing to print


KNOWN = {
    "1": Known(
        "Speed-up over plain decoding and acceptance length, temperature 0", "a host or dloop run at temperature 0"
    ),
    "2": Known("Ablation of the loop and of loop-aware training", "a loop or trained run beside host and dloop"),
    "3": Known("Against adaptive draft lengths", "a run with --stop-rule"),
    "4": Known(
        "Time and output tokens per loop by number of drafting stages; their sums are Figure 3",
        "a run whose gate opened: dloop bench --loop-gate",
    ),
    "5": Known("With tree verification", "a run with --tree-budget"),
    "A1": Known(
        "Speed-up over plain decoding and acceptance length when sampling",
        "a host or dloop run at a temperature above 0",
    ),
    "A3": Known("Number of drafting stages and of verifications", "a run with a drafter"),
    "A4": Known("Latency and peak GPU memory by number of drafting stages", "a run with a drafter"),
    "A5": Known("Gate threshold sweep", "runs of one drafter that differ in --loop-gate alone, two thresholds or more"),
    "A6": Known("Confidence scores for the gate", "--calibrations with what dloop calibrate --output wrote"),
    "A7": Known(
        "Loop-aware training by depths and by what has a loss", "--train-runs with the folders that dloop train wrote"
    ),
    "F1": Known("Figure 1: share of stages accepted whole, by stage", "a run with a drafter"),
}


def chosen(given: tuple[str, ...]) -> list[str]:
    """The names given to --tables, each once, `all` spelled out. Raises UserError for one that is not known."""
    names = {name.lower(): name for name in (SETS, ALL, *KNOWN)}
    if unknown := [name for name in given if name.lower() not in names]:
        raise UserError(f"--tables {unknown[0]!r} is no table here; there are {', '.join(names.values())}")
    found = [names[name.lower()] for name in given]
    if not found:
        raise UserError(f"--tables names no table; there are {', '.join(names.values())}")
    return list(dict.fromkeys(one for name in found for one in (KNOWN if name == ALL else [name])))
