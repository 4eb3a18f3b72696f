"""All parts of a certificate, in their order."""

from collections.abc import Iterator

from dloop.certificate.findings import Finding, Pair, Plan
from dloop.certificate.law import check_law
from dloop.certificate.memory import check_memory
from dloop.certificate.texts import check_texts


def certify(pair: Pair, plan: Plan, *, sampled: bool) -> Iterator[Finding]:
    """Try a pair in one arithmetic; yield what each part finds as soon as it is known.

    Greedy texts and the target alone, the memory law, and if `sampled` texts at a temperature: the same with plain
    sampling's seed ("sampled"), and rejection sampling's law.
    """
    for name in plan.prompts:
        greedy = check_texts(pair, plan, name, "greedy")
        yield greedy
        yield check_memory(pair, plan, name, greedy.noise)
        if sampled:
            yield check_texts(pair, plan, name, "sampled")
    if sampled:
        yield check_law(pair, plan)


def count_findings(plan: Plan, *, sampled: bool) -> int:
    """How many findings `certify` will yield."""
    return len(plan.prompts) * (3 if sampled else 2) + sampled
