"""The memory law on this very pair: after a rejection both memories answer as fresh ones fed the committed tokens."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from jaxtyping import Float
from torch import Tensor

from dloop.certificate.findings import Fault, MemoryFinding, Pair, Plan
from dloop.certificate.ground import Place, limit_of
from dloop.certificate.margins import deviation
from dloop.gate import FixedGate
from dloop.loop import Session, Target, decode, run_one
from dloop.settings import Settings, limits_of, sampling_of
from dloop.types import First, Rows, Stage, StageRequest

PROBES = 2  # of each prompt and gate
DRAFTER_LIMIT = {"float32": 1e-3, "bfloat16": 1.0}  # log-probabilities of the drafter's own tokens


@dataclass(frozen=True)
class Probe:
    """One moment after a rejection."""

    gate: float
    index: int  # of the anchor in the answer
    anchor: int
    target: float  # deviation of the target's logits
    drafter: float  # largest difference of log-probabilities


def check_memory(pair: Pair, plan: Plan, name: str, noise: float) -> MemoryFinding:
    """Probe the memories of a greedy decode; `noise` is what rounding was measured to do on this prompt."""
    limit = limit_of(pair.dtype, noise)
    found = [probe for gate in plan.gates for probe in probes(pair, plan, plan.prompts[name], gate)]
    drafter_limit, place = DRAFTER_LIMIT[pair.dtype], Place(part="memory", dtype=pair.dtype, prompt=name)
    faults: list[Fault] = []
    for probe in found:
        at = replace(place, gate=probe.gate)
        if not probe.target <= limit:
            faults.append(replace(at.fault("target_memory", probe.target, limit), index=probe.index))
        elif not probe.drafter <= drafter_limit:
            faults.append(replace(at.fault("drafter_memory", probe.drafter, drafter_limit), index=probe.index))
    return MemoryFinding(
        prompt=name,
        probes=len(found),
        target_deviation=max((probe.target for probe in found), default=0.0),
        target_limit=limit,
        drafter_deviation=max((probe.drafter for probe in found), default=0.0),
        drafter_limit=drafter_limit,
        faults=faults,
    )


def probes(pair: Pair, plan: Plan, prompt: list[int], gate: float) -> Iterator[Probe]:
    """Decode, and after the first rounds that rejected something ask both memories and fresh ones the same."""
    settings = Settings(max_new_tokens=plan.max_new_tokens, max_stages=plan.max_stages, tree_budget=0)
    session = open_session(pair)
    task = decode(
        session,
        0,
        prompt,
        gate=FixedGate(gate),
        judge=pair.judge_of(settings, sampling_of(settings), pair.drafter),
        limits=limits_of(settings, pair.target, pair.drafter),
    )
    tokens: list[int] = []
    done = 0
    for event in run_one(task, session):
        tokens += [event.token] if isinstance(event, First) else event.emitted
        if isinstance(event, First) or event.finish is not None or event.accepted == len(event.drafted):
            continue
        yield probe(pair, session, [*prompt, *tokens], gate, len(tokens) - 1)
        done += 1
        if done == PROBES:
            return


def open_session(pair: Pair) -> Session:
    """Fresh memories."""
    return Session(target=pair.target.open(pair.drafter.taps), drafter=pair.drafter.open())


def probe(pair: Pair, session: Session, text: list[int], gate: float, index: int) -> Probe:
    """Compare the live memories with fresh ones; the text's last token is the anchor, not in memory yet."""
    committed, anchor = text[:-1], text[-1]
    fresh = open_session(pair)
    assert fresh.drafter is not None and session.drafter is not None
    fresh.drafter.extend(0, 0, committed, fresh.target.prefill(0, committed).features)
    logits = [answer(memory, anchor, len(committed)) for memory in (session.target, fresh.target)]
    apart, start = 0.0, anchor
    for stage in (0, 1):  # the second stands on the draft hidden states of the first
        request = StageRequest(slot=0, anchor=start, index=stage)
        live, new = (memory.draft([request])[0] for memory in (session.drafter, fresh.drafter))
        apart = max(apart, apart_of(live, new))
        if live.tokens != new.tokens:
            break
        start = new.tokens[new.spine[-1]]
    return Probe(gate, index, anchor, float(deviation(logits[0], logits[1]).max()), apart)


def answer(memory: Target, anchor: int, position: int) -> Float[Tensor, "1 V"]:
    """The target's logits after the anchor; nothing is kept."""
    logits = memory.verify(Rows(token=[anchor], slot=[0], position=[position], parent=[-1])).logits.clone()
    memory.commit(0, [])
    return logits


def apart_of(live: Stage, fresh: Stage) -> float:
    """Largest difference of the log-probabilities, up to the first token that differs (included)."""
    pairs = enumerate(zip(live.tokens, fresh.tokens, strict=True))
    stop = next((index + 1 for index, (ours, theirs) in pairs if ours != theirs), len(live.tokens))
    return max(abs(ours - theirs) for ours, theirs in zip(live.logp[:stop], fresh.logp[:stop], strict=True))
