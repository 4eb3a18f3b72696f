"""A certificate told: a table, near-ties, the law, the verdict; or one JSON document."""

from dataclasses import asdict

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dloop import checkpoint
from dloop.bench.run import commit
from dloop.certificate.findings import Fault, LawFinding, MemoryFinding, TextFinding
from dloop.certificate.margins import Difference
from dloop.cli.check import Command, prompts_of
from dloop.cli.check_run import Certificate
from dloop.records import SCHEMA, Json, hardware, plain, prompt_sha256, versions

COLUMNS = ("", "part", "prompt", "with", "tau", "text", "apart", "limit")
LEFT = (0, 1, 2, 3, 5)


def report(console: Console, done: Certificate) -> None:
    console.print(heading(done))
    console.print(table_of(done))
    console.print(explanation(), style="dim")
    for line in [*near_tie_lines(done), *control_lines(done), *law_lines(done), *verdict(done)]:
        console.print(line)


def heading(done: Certificate) -> Text:
    target, drafter, plan = done.pair.target, done.pair.drafter, done.plan
    machine = hardware(target.device)
    where = machine["gpu"] or f"{machine['cpu']}, threads: {machine['threads']}"
    return Text.assemble(
        (f"{target.name} + {drafter.name}", "bold"),
        f" ({drafter.family}, stages of {drafter.stage_len} tokens, at most {plan.max_stages}); {where}; at "
        f"most {plan.max_new_tokens} tokens an answer; temperature {plan.temperature:g}, seed {plan.seed}",
    )


def table_of(done: Certificate) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold")
    for index, name in enumerate(COLUMNS):
        table.add_column(name, justify="left" if index in LEFT else "right", no_wrap=True)
    for dtype, findings in done.found.items():
        parts = [finding for finding in findings if not isinstance(finding, LawFinding)]
        rows = [row for finding in parts for row in rows_of(finding)]
        for index, row in enumerate(rows):
            table.add_row("" if index else dtype, *row)
        table.add_section()
    return table


def rows_of(finding: TextFinding | MemoryFinding) -> list[tuple[str, ...]]:
    """The table's rows of one finding, without the arithmetic."""
    name, part = finding.prompt, finding.part
    if isinstance(finding, MemoryFinding):
        known = f"{finding.probes} probes"
        return [
            (part, name, "target", "", known, f"{finding.target_deviation:.0e}", f"{finding.target_limit:.0e}"),
            (part, name, "drafter", "", known, f"{finding.drafter_deviation:.0e}", f"{finding.drafter_limit:.0e}"),
        ]
    limit = f"{finding.limit:.0e}"
    rows = [
        (part, name, f"alone, {c.rows} rows", "", f"{c.flips} of {c.tokens} flip", f"{c.deviation:.0e}", limit)
        for c in finding.controls
    ]
    for gate in finding.gates:
        text = f"same {gate.tokens}" if gate.difference is None else f"same to {gate.difference.index}"
        tau, apart = f"{gate.acceptance_length:.2f}", f"{gate.deviation:.0e}"
        rows.append((part, name, f"gate {gate.gate:g}", tau, text, apart, limit))
    return rows


def near_tie_lines(done: Certificate) -> list[Text]:
    """Where a text leaves plain decoding's within rounding; the same place once."""
    places: dict[tuple[str, str, str, Difference, float, bool], list[str]] = {}
    for dtype, findings in done.found.items():
        for finding in (f for f in findings if isinstance(f, TextFinding)):
            for gate in finding.gates:
                if gate.difference and gate.near_tie is not None and gate.difference.gap <= gate.near_tie:
                    key = (dtype, finding.part, finding.prompt, gate.difference, gate.near_tie, bool(gate.alone))
                    places.setdefault(key, []).append(f"{gate.gate:g}")
    lines: list[Text] = []
    for (dtype, part, name, difference, limit, alone), gates in places.items():
        where = f"{dtype}, {part}, {name}, gate {' and '.join(gates)}: {words(done, difference)}; logits "
        where += f"{difference.gap:.3g} apart (rounding: {limit:.3g}); the target alone, in the same blocks, "
        where += "prefers it too." if alone else "does not."
        lines.append(Text.assemble(("Near-tie: ", "bold yellow"), where))
    return lines


def words(done: Certificate, at: Difference) -> str:
    show = done.tokenizer.show
    return f"token {at.index} is {show([at.other])!r}, not {show([at.plain])!r}"


def explanation() -> str:
    return (
        "alone: the target without a drafter, given its own text that many rows at a time; flip: would be another "
        "token. tau: mean over rounds of accepted + 1. memory: after rejections, against fresh memories. apart: root "
        "mean square of the logits' differences over their spread, largest of all rows (drafter: of log-probabilities)."
    )


def law_lines(done: Certificate) -> list[Text]:
    lines: list[Text] = []
    for law in (finding for findings in done.found.values() for finding in findings if isinstance(finding, LawFinding)):
        lines.append(
            Text(
                f"Rejection sampling, {law.tokens} tokens of {law.texts} texts, {law.drafted} judged: they lean "
                f"{law.lean:+.2f} standard deviations to the drafter's favourites (limit {law.lean_limit:.2f}; a "
                f"residual forgotten would show {law.planted_lean:.1f}); chi-square {law.statistic:.1f} over "
                f"{len(law.counts)} parts of the law, p = {law.p_value:.2g} (limit {law.false_alarm:g}, the chance of "
                "a false alarm of either test)."
            )
        )
        if not law.is_sharp:
            lines.append(
                Text(
                    "Weak: the two laws meet too rarely in these texts to see every wrong rule; give more prompts, "
                    "more tokens or a higher temperature.",
                    "yellow",
                )
            )
    return lines


def control_lines(done: Certificate) -> list[Text]:
    """What arithmetic alone does, in a sentence for each arithmetic."""
    lines: list[Text] = []
    for dtype, findings in done.found.items():
        texts = [finding for finding in findings if isinstance(finding, TextFinding)]
        controls = [control for text in texts for control in text.controls]
        flips, tokens = sum(c.flips for c in controls), sum(c.tokens for c in controls)
        left = sum(gate.difference is not None for text in texts for gate in text.gates)
        lines.append(
            Text(
                f"{dtype}: {left} of {sum(len(text.gates) for text in texts)} texts leave plain decoding's; the target "
                f"alone, several rows at a time, would turn {flips} of {tokens} tokens over (largest gap "
                f"{max((c.largest_gap for c in controls), default=0.0):.3g})."
            )
        )
    return lines


def verdict(done: Certificate) -> list[Text]:
    if not done.faults:
        return [Text.assemble(("Certified: ", "bold green"), f"lossless, in {done.seconds:.0f} s.")]
    lines = [Text.assemble(("Fault: ", "bold red"), sentence(done, fault)) for fault in done.faults]
    end = "the texts are the target's, but the pair has a fault." if done.is_lossless else "not lossless."
    return [*lines, Text.assemble(("Not certified: ", "bold red"), end)]


def sentence(done: Certificate, fault: Fault) -> str:
    """One fault: where it is, how large, what it points at."""
    where = [fault.dtype, fault.part]
    where += [] if fault.prompt is None else [f"prompt {fault.prompt}"]
    where += [] if fault.gate is None else [f"gate {fault.gate:g}"]
    if fault.index is not None and fault.plain is not None and fault.other is not None and fault.plain != fault.other:
        at = Difference(index=fault.index, plain=fault.plain, other=fault.other, gap=fault.gap or 0.0)
        where.append(words(done, at))
    elif fault.index is not None:
        where.append(f"token {fault.index}")
    where += [] if fault.gap is None else [f"logits {fault.gap:.3g} apart"]
    kind = fault.kind.replace("_", " ")
    return f"{', '.join(where)}: {kind}: {fault.measured:.3g} (limit {fault.limit:.3g}): {fault.points_at}"


def document(command: Command, done: Certificate) -> dict[str, Json]:
    """The certificate: all that was found and all that it depends on. Hashing reads all weights once."""
    target, drafter, plan = done.pair.target, done.pair.drafter, done.plan
    texts = prompts_of(command)
    found = {dtype: [finding_json(finding) for finding in findings] for dtype, findings in done.found.items()}
    faults = [asdict(f) | {"points_at": f.points_at, "harms_text": f.harms_text} for f in done.faults]
    setting = {name: getattr(plan, name) for name in ("gates", "max_new_tokens", "max_stages", "temperature", "seed")}
    facts: dict[str, object] = {
        "schema": SCHEMA,
        "target": target.name,
        "draft": drafter.name,
        "family": drafter.family,
        "certified": not done.faults,
        "lossless": done.is_lossless,
        "faults": faults,
        "setting": setting | {"chat": done.tokenizer.has_template, "gap_rows": drafter.config.gap_rows},
        "prompts": {
            name: {"text": texts[name], "prompt_sha256": prompt_sha256(ids)} for name, ids in plan.prompts.items()
        },
        "findings": found,
        "checkpoint_sha256": {
            "target": checkpoint.sha256(target.folder) if target.folder else None,
            "draft": checkpoint.sha256(drafter.folder) if drafter.folder else None,
        },
        "engine": target.engine,
        "attention": target.attention,
        "device": str(target.device),
        "seconds": done.seconds,
        "hardware": hardware(target.device),
        "versions": versions(),
        "commit": commit(),
    }
    return {name: plain(value) for name, value in facts.items()}


def finding_json(finding: TextFinding | LawFinding | MemoryFinding) -> dict[str, object]:
    """One finding; the faults of all stand together elsewhere."""
    facts: dict[str, object] = asdict(finding)
    del facts["faults"]
    return facts | ({"is_sharp": finding.is_sharp} if isinstance(finding, LawFinding) else {})
