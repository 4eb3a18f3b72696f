"""What a trace tells of rows: stop rules on it may read no more, and confidences are scaled by it."""

from collections.abc import Callable
from typing import cast

import numpy as np
from jaxtyping import Bool, Float64

from dloop.errors import UserError
from dloop.gates.trace import Trace
from dloop.rules.choose import HEAD_OF, NEEDS_CONFIDENCE, RULES, read_choice
from dloop.rules.headed import ConfidenceCut
from dloop.stop import StopRule


def replay_maker(stop_rule: str, trace: Trace) -> Callable[[], StopRule]:
    """What makes each text's rule. Raises UserError for a rule that reads what the trace does not hold."""
    choice = read_choice(stop_rule)
    assert choice is not None
    if not {"entropy", "margin", "confidence"} <= set(trace.features):
        raise UserError(
            f"stop_rule {choice.name} is not replayed on this trace, which keeps no figures of its rows; record "
            "a block drafter's with --engine twin"
        )
    has_confidence = not np.isnan(first_confidence(trace))
    if choice.name in HEAD_OF and not (choice.name == "specdec++" and has_confidence):
        raise UserError(f"stop_rule {choice.name} reads a head, and traces hold no states; decode with it instead")
    if choice.name in NEEDS_CONFIDENCE and not has_confidence:
        raise UserError(f"stop_rule {choice.name} reads confidences, and this trace of {trace.ground.family} has none")
    if "longest" in choice.values:
        raise UserError(f"stop_rule {choice.name}: longest is for autoregressive drafters; leave it out")
    kind = RULES[choice.name]
    made = kind(**choice.values)
    if isinstance(made, ConfidenceCut) and len(made.temperatures) not in (0, trace.ground.stage_len):
        raise UserError(f"stop_rule dspark: sts={made.sts} is not for stages of {trace.ground.stage_len}; fit it anew")
    return lambda: kind(**choice.values)


def pairs_of(trace: Trace, source: str) -> tuple[Float64[np.ndarray, "n k"], Bool[np.ndarray, "n k"]]:
    """(confidence logits of all first stages, which of their tokens were accepted). Raises UserError without any."""
    if "confidence" not in trace.features:
        raise UserError(f"{source} holds no confidences; record it with --engine twin and a DSpark drafter")
    where = trace.features.index("confidence")
    drafted = [(text.stages > 0) for text in trace.texts]
    logits = [text.features[rows, 0, :, where] for text, rows in zip(trace.texts, drafted, strict=True)]
    counts = [text.accepted[rows] for text, rows in zip(trace.texts, drafted, strict=True)]
    found, accepted = np.concatenate(logits).astype(np.float64), np.concatenate(counts)
    if not len(found) or np.isnan(found).any():
        raise UserError(f"{source} is of {trace.ground.family} and has no confidence head; give a trace of DSpark's")
    return found, accepted[:, None] > np.arange(found.shape[1])


def first_confidence(trace: Trace) -> float:
    """Of any row that was drafted; nan where there is no such head."""
    where = trace.features.index("confidence")
    drafted = next((text.features[text.stages > 0] for text in trace.texts if (text.stages > 0).any()), None)
    return float("nan") if drafted is None else float(cast(float, drafted[0, 0, 0, where]))
