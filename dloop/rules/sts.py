"""Sequential temperature scaling of DSpark's confidences: what each row's logit is divided by, fitted on a trace.

Left to right, each row takes the temperature for which the product of the confidences up to it is best calibrated, the
rows before being fixed: that product is what a cut, or a scheduler, reads.
Source: DSpark (arXiv 2607.05147); the grid is the one of vLLM's online form.
"""

import json
from pathlib import Path
from typing import NamedTuple, cast

import numpy as np
from jaxtyping import Bool, Float64

from dloop.errors import UserError

GRID = np.exp(np.linspace(np.log(1 / 8), np.log(8), 49))  # its middle is 1
BINS = 15


class Fit(NamedTuple):
    """One temperature a row, and the calibration error of the products, mean over the rows."""

    temperatures: list[float]
    before: float
    after: float


def fit(logits: Float64[np.ndarray, "n k"], accepted: Bool[np.ndarray, "n k"]) -> Fit:
    """`accepted`: whether a row and all before it were. Of equal errors the temperature nearest to 1 stays."""
    chosen, survival = list[float](), np.ones(len(logits))
    raw, errors = np.ones(len(logits)), list[tuple[float, float]]()
    order = GRID[np.argsort(np.abs(np.log(GRID)), kind="stable")]
    for row in range(logits.shape[1]):
        products = [survival * chance(logits[:, row] / scale) for scale in order]
        found = [calibration_error(each, accepted[:, row]) for each in products]
        best = int(np.argmin(found))
        raw = raw * chance(logits[:, row])
        chosen.append(float(order[best]))
        survival = products[best]
        errors.append((calibration_error(raw, accepted[:, row]), found[best]))
    before, after = np.mean(errors, axis=0)
    return Fit(chosen, float(before), float(after))


def chance(logits: Float64[np.ndarray, "*n"]) -> Float64[np.ndarray, "*n"]:
    """The logistic function."""
    return np.exp(-np.logaddexp(0, -logits))


def calibration_error(chances: Float64[np.ndarray, " n"], events: Bool[np.ndarray, " n"]) -> float:
    """ECE: over bins of equal width, the mean distance between what is said and what happens."""
    bins = np.minimum((chances * BINS).astype(int), BINS - 1)
    said, happened = (np.bincount(bins, each, BINS) for each in (chances, events.astype(float)))
    return float(np.abs(said - happened).sum() / len(chances))


def read_temperatures(path: Path) -> list[float]:
    """What `dloop trace sts` wrote. Raises UserError where the file holds no temperatures."""
    try:
        found = cast(dict[str, list[object]], json.loads(path.read_text(encoding="utf-8")))["temperatures"]
        if found and all(isinstance(each, float) and each > 0 for each in found):
            return cast(list[float], found)
        raise ValueError("no temperatures above 0")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"stop_rule dspark: sts={path} cannot be read ({error}); write it with dloop trace sts"
        ) from error
