"""What acceptance length a pair should have.

A checkpoint may say so itself: `dloop_config.acceptance_length` in its config.json, the mean of accepted + 1 of host
decoding on greedy texts. Else the published figures of released pairs, over their tasks, give a range:
DSpark on Qwen3-4B 3.54 (Alpaca) to 6.11 (GSM8K), on Qwen3-8B 3.58 to 6.17, and DeepSpec's own DFlash on Qwen3-4B
2.96 to 5.40 (DSpark paper, table 1, T = 1); DFlash on Qwen3-8B 5.82 (HumanEval) to 6.4 (GSM8K) (vLLM issue 46707,
SGLang pull request 16818, greedy); Domino on Qwen3-8B 6.65 (HumanEval) to 9.06 (GSM8K) (vLLM issue 46707, greedy).
Any other pair is not judged.
"""

from collections.abc import Mapping
from typing import NamedTuple, cast

from dloop.checkpoint import brief
from dloop.diagnosis.findings import Expected, Finding, Measured
from dloop.drafters.config import BlockConfig, DSparkConfig, Json
from dloop.errors import UserError

TOLERANCE = 0.75  # of the lowest figure: other prompts, short answers
NOTHING = 1.1  # an acceptance length up to which a drafter contributes nothing
KEY = "acceptance_length"


class Released(NamedTuple):
    """What identifies a released pair."""

    family: str
    block_size: int
    hidden_size: int
    num_target_layers: int


PUBLISHED = {
    Released("dspark", 7, 2560, 36): Expected(low=3.54, high=6.11, source="DSpark paper, table 1 (Qwen3-4B)"),
    Released("dspark", 7, 4096, 36): Expected(low=3.58, high=6.17, source="DSpark paper, table 1 (Qwen3-8B)"),
    Released("dspark without heads", 7, 2560, 36): Expected(
        low=2.96, high=5.40, source="DSpark paper, table 1 (DFlash of DeepSpec, Qwen3-4B)"
    ),
    Released("dflash", 16, 4096, 36): Expected(low=5.82, high=6.4, source="SGLang and vLLM on DFlash (Qwen3-8B)"),
    Released("domino", 16, 4096, 36): Expected(low=6.65, high=9.06, source="vLLM on Domino (Qwen3-8B)"),
}


def expected_of(raw: Json, config: BlockConfig, name: str) -> Expected | None:
    """The range for this drafter; None: nobody says. Raises UserError for a figure that is none."""
    own = raw.get("dloop_config")
    told = cast(Json, own).get(KEY) if isinstance(own, Mapping) else None
    if told is not None:
        if isinstance(told, bool) or not isinstance(told, int | float) or not 1 <= told <= config.stage_len + 1:
            raise UserError(
                f"{name}/config.json: dloop_config.{KEY}={brief(told)} must lie between 1 and {config.stage_len + 1}, "
                "all of a stage and the bonus; correct or remove it"
            )
        return Expected(low=float(told), high=float(told), source=f"dloop_config.{KEY} of {name}")
    family = config.family
    if isinstance(config, DSparkConfig) and not config.markov_rank:
        family += " without heads"
    return PUBLISHED.get(Released(family, config.block_size, config.hidden_size, config.num_target_layers))


def judge_acceptance(measured: Measured, expected: Expected | None) -> list[Finding]:
    """What the figures alone say, where no probe explains them."""
    tau, upper = measured.acceptance_length, measured.high
    if max(tau, measured.every_position) < NOTHING:
        return [
            Finding(
                severity="fault",
                cause="acceptance",
                what="the drafter contributes nothing",
                evidence=f"acceptance length {tau:.2f}; no single change that was tried helps",
                remedy="was it trained for this target, on texts like these? fetch it again, or look into its training",
            )
        ]
    if expected is not None and max(tau, upper) < TOLERANCE * expected.low:
        return [
            Finding(
                severity="fault",
                cause="acceptance",
                what="the acceptance length is far below what is expected, and no single change explains it",
                evidence=f"measured {tau:.2f} (at every position at most {upper:.2f}), expected {span(expected)} "
                f"({expected.source}); the limit is {TOLERANCE:g} of the lower end",
                remedy="try prompts of its training domain (--prompts); else look for two faults at once, "
                "or fetch the checkpoint again",
            )
        ]
    if all(rate == 1.0 for rate in measured.rows):
        return [
            Finding(
                severity="warning",
                cause="acceptance",
                what="every draft is accepted whole, which real texts do not allow",
                evidence=f"{measured.positions} start positions of {measured.texts} texts",
                remedy="do the answers repeat themselves? try other prompts (--prompts)",
            )
        ]
    return []


def span(expected: Expected) -> str:
    """A range in words."""
    same = expected.low == expected.high
    return f"{expected.low:.2f}" if same else f"{expected.low:.2f} to {expected.high:.2f}"
