"""Texts against plain decoding's: every difference is a near-tie or a fault."""

from dataclasses import replace

from jaxtyping import Float
from torch import Tensor

from dloop.certificate.control import check_control, control_sizes, turns_over
from dloop.certificate.findings import ControlFinding, Fault, GateFinding, Pair, Part, Plan, TextFinding
from dloop.certificate.ground import Ground, Place, Text, decode_text, lay_ground, strays
from dloop.certificate.margins import deviation, first_difference
from dloop.settings import Settings


def check_texts(pair: Pair, plan: Plan, name: str, part: Part) -> TextFinding:
    """Decode one prompt plainly and with every gate; part "sampled" draws with the plan's seed and temperature."""
    sampled = part == "sampled"
    settings = Settings(
        max_new_tokens=plan.max_new_tokens,
        max_stages=plan.max_stages,
        temperature=plan.temperature if sampled else 0.0,
        seed=plan.seed,
        verify="match" if sampled else "auto",
        tree_budget=0,  # the control and the law are told of chains alone
    )
    place = Place(part=part, dtype=pair.dtype, prompt=name)
    ground, faults = lay_ground(pair, plan.prompts[name], settings, place)
    controls: list[ControlFinding] = []
    for rows in () if sampled else control_sizes(pair, plan):
        control, found = check_control(pair, ground, rows, place)
        controls.append(control)
        faults += found
    gates: list[GateFinding] = []
    for gate in plan.gates:
        text = decode_text(pair, pair.drafter, ground.prompt, replace(settings, loop_gate=gate))
        gates.append(gate_finding(pair, ground, text, gate))
        faults += blamed(judge_text(ground, text, replace(place, gate=gate)), faults)
    return TextFinding(
        part=part,
        prompt=name,
        text=ground.plain.tokens,
        noise=ground.noise,
        limit=ground.limit,
        gates=gates,
        controls=controls,
        faults=faults,
    )


def blamed(found: list[Fault], before: list[Fault]) -> list[Fault]:
    """Where the target alone fails already, its texts with a drafter say nothing new."""
    alone = any(fault.kind == "control" for fault in before)
    return [replace(fault, kind="control") if alone and fault.kind == "verification" else fault for fault in found]


def judge_text(ground: Ground, text: Text, place: Place) -> list[Fault]:
    """What in a drafted text is no rounding. A wrong choice explains all that follows it."""
    plain = ground.plain
    if wrong := strays(ground, text, place):
        return wrong
    difference = first_difference(plain.tokens, text.tokens, lambda index: ground.scores(plain, index))
    if difference is None and len(plain.tokens) != len(text.tokens):
        return [place.fault("ending", len(text.tokens), len(plain.tokens))]
    apart, slack = deviation_until(ground, text), 0.0
    if difference is not None:
        slack = float(ground.slack[difference.index])
        if not difference.gap <= slack:
            fault = place.fault("verification", difference.gap, slack)
            where = {name: getattr(difference, name) for name in ("index", "plain", "other", "gap")}
            return [replace(fault, **where)]
    if not float(apart.max()) <= ground.limit:
        index = int(apart.argmax())
        fault = place.fault("verification", float(apart[index]), ground.limit)
        return [replace(fault, index=index, plain=plain.tokens[index], other=text.tokens[index])]
    return []


def deviation_until(ground: Ground, text: Text) -> Float[Tensor, " T"]:
    """Of each row up to the first difference: there the rows stand after the same tokens."""
    ours, theirs = ground.plain.tokens, text.tokens
    pairs = enumerate(zip(ours, theirs, strict=False))
    stop = next((index + 1 for index, (a, b) in pairs if a != b), min(len(ours), len(theirs)))
    return deviation(text.rows[:stop], ground.plain.rows[:stop])


def gate_finding(pair: Pair, ground: Ground, text: Text, gate: float) -> GateFinding:
    """The figures of one text."""
    plain = ground.plain
    difference = first_difference(plain.tokens, text.tokens, lambda index: ground.scores(plain, index))
    return GateFinding(
        gate=gate,
        tokens=len(text.tokens),
        acceptance_length=text.generation.acceptance_length,
        difference=difference,
        alone=None if difference is None else turns_over(pair, ground, text, difference),
        near_tie=None if difference is None else float(ground.slack[difference.index]),
        deviation=float(deviation_until(ground, text).max()),
    )
