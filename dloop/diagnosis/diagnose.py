"""A pair examined: what its files say, how far its drafts are accepted, and what one change would do."""

from collections.abc import Callable, Sequence

from dloop.diagnosis.expected import judge_acceptance
from dloop.diagnosis.findings import Diagnosis, Finding, Gain, Measured, Probed, ranked
from dloop.diagnosis.intake import Intake, without
from dloop.diagnosis.measure import Marks, Read, Text, gains_of, marks_of, measured, read_texts, trace_of
from dloop.diagnosis.probes import Probe, all_probes
from dloop.diagnosis.setup import Setup
from dloop.diagnosis.tokens import TokenReport, mask_candidates
from dloop.drafters.block import BlockDrafter
from dloop.targets.hf import HFTarget

FEW = 4  # texts, the longest, that every probe is measured on
OFTEN = 3  # times a mask id may turn up in the texts by chance


def diagnose(
    target: HFTarget,
    intake: Intake,
    tokens: TokenReport,
    texts: Sequence[Text],
    advance: Callable[[int, int], None] = lambda done, total: None,
) -> Diagnosis:
    """Measure and probe on greedy texts of the target, and put all findings in order.

    `texts` is empty where none could be made. `advance` hears how many of how many setups have been measured.
    """
    drafter = intake.drafter
    usable = [text for text in texts if drafter is not None and len(text.answer) > drafter.config.stage_len + 1]
    if drafter is None or not usable:
        reason = "the drafter cannot run as it is" if drafter is None else "there is no text long enough to draft on"
        return Diagnosis(
            findings=ranked([*intake.findings, *tokens.findings]),
            measured=None,
            not_measured=reason,
            probes=[],
            expected=intake.expected,
        )
    base = Setup.of(drafter)
    probes = all_probes(base, target, mask_candidates(target, tokens.tokenizer, drafter.config.mask_token_id))
    figures, results = try_all(base, probes, target, usable, advance)
    found = [*intake.findings, *check_mask(drafter, target, usable), *tokens.findings]
    best = best_of(results)
    if best is None:
        found += judge_acceptance(figures, intake.expected)
    else:
        found = [told(probes[best], results[best]), *without(found, probes[best].cause)]
    return Diagnosis(
        findings=ranked(found), measured=figures, not_measured=None, probes=results, expected=intake.expected
    )


def try_all(
    base: Setup, probes: list[Probe], target: HFTarget, texts: list[Text], advance: Callable[[int, int], None]
) -> tuple[Measured, list[Probed]]:
    """(the figures as configured, what each probe measured)."""
    setups = [base, *(probe.setup for probe in probes)]
    longest_first = sorted(texts, key=lambda text: -len(text.answer))
    reads = read_texts(target, longest_first, (tap for setup in setups for tap in setup.taps))
    before = [marks_of(base, read) for read in reads]
    results: list[Probed] = []
    for index, probe in enumerate(probes, start=1):
        positions, greedy, drawn = gains_of(marks_while_open(probe.setup, reads, before), before)
        results.append(Probed(cause=probe.cause, change=probe.change, positions=positions, greedy=greedy, drawn=drawn))
        advance(index, len(probes))
    return measured([trace_of(base, read) for read in reads], before), results


def marks_while_open(setup: Setup, reads: list[Read], before: list[Marks]) -> list[Marks]:
    """On the first few texts, and on the others unless those have shown that the setup is worse."""
    first = [marks_of(setup, read) for read in reads[:FEW]]
    _, greedy, drawn = gains_of(first, before)
    if drawn.high < 0 and greedy.gain <= 0:
        return first
    return first + [marks_of(setup, read) for read in reads[FEW:]]


def best_of(results: list[Probed]) -> int | None:
    """The probe that gains most, if its gain is no chance; the first of equals."""
    better = [index for index, result in enumerate(results) if result.is_better]
    return max(better, key=lambda index: results[index].gain, default=None)


def told(probe: Probe, result: Probed) -> Finding:
    """The diagnosis: what the best probe says."""
    return Finding(
        severity="fault",
        cause=probe.cause,
        what=f"drafts are better with {probe.change}",
        evidence=f"acceptance length at every position {compared(result.greedy)}; of tokens drawn from the drafter's "
        f"law {compared(result.drawn)}; {result.positions} positions",
        remedy=probe.remedy,
    )


def compared(gain: Gain) -> str:
    """Both lengths, and how sure their difference is."""
    return (
        f"{gain.length:.2f} instead of {gain.length - gain.gain:.2f} (gain {gain.gain:+.2f}, interval {gain.low:+.2f} "
        f"to {gain.high:+.2f})"
    )


def check_mask(drafter: BlockDrafter, target: HFTarget, texts: Sequence[Text]) -> list[Finding]:
    """A mask is a token that texts do not hold."""
    mask = drafter.config.mask_token_id
    count = sum(text.prompt.count(mask) + text.answer.count(mask) for text in texts)
    stops = mask in target.stop_ids
    if count <= OFTEN and not stops:
        return []
    evidence = f"token {mask} turns up {count} times in {len(texts)} texts" + (" and ends answers" if stops else "")
    return [
        Finding(
            severity="warning",
            cause="mask_token_id",
            what="mask_token_id is a token of ordinary texts",
            evidence=evidence,
            remedy="set mask_token_id in config.json to the id it was trained with, a reserved one",
        )
    ]
