"""A diagnosis told: acceptance by row, what was tried, the findings; or one JSON document."""

from dataclasses import asdict
from statistics import median

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dloop import checkpoint
from dloop.bench.run import commit
from dloop.cli.doctor import Command
from dloop.cli.doctor_run import Examined
from dloop.diagnosis.compare import ALPHA, MARGIN
from dloop.diagnosis.diagnose import FEW
from dloop.diagnosis.expected import span
from dloop.diagnosis.findings import Finding, Severity
from dloop.records import SCHEMA, Json, hardware, plain, prompt_sha256, versions

BAR_WIDTH = 30
MOST_PROBES = 8  # shown
MARKS: dict[Severity, tuple[str, str]] = {
    "fault": ("Fault: ", "bold red"),
    "warning": ("Warning: ", "bold yellow"),
    "note": ("Note: ", "bold blue"),
}


def report(console: Console, done: Examined) -> None:
    console.print(heading(done))
    if done.diagnosis.measured is None:
        console.print(f"Not measured: {done.diagnosis.not_measured}.")
    else:
        console.print(rows_table(done))
        console.print(probe_table(done))
        console.print(explanation(done), style="dim")
    for line in acceptance_lines(done):
        console.print(line)
    for finding in done.diagnosis.findings:
        console.print(told(finding))
    console.print(verdict(done))


def heading(done: Examined) -> Text:
    target, drafter = done.target, done.intake.drafter
    machine = hardware(target.device)
    where = machine["gpu"] or f"{machine['cpu']}, threads: {machine['threads']}"
    kind = f" ({drafter.family}, stages of {drafter.config.stage_len} tokens)" if drafter else ""
    dtype = str(target.dtype).removeprefix("torch.")
    return Text.assemble((f"{target.name} + {done.name}", "bold"), f"{kind}; {where}; {dtype}")


def new_table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold")
    for index, name in enumerate(columns):
        table.add_column(name, justify="right" if index and name else "left", no_wrap=bool(index))
    return table


def rows_table(done: Examined) -> Table:
    """How often each row is accepted; the bar is its length, colour only repeats it."""
    measured = done.diagnosis.measured
    assert measured is not None
    table = new_table("row", "accepted", "")
    for row, rate in enumerate(measured.rows, start=1):
        if rate is None:
            table.add_row(str(row), "never reached", "")
            continue
        colour = "green" if rate >= 0.6 else "yellow" if rate >= 0.3 else "red"
        length = round(rate * BAR_WIDTH)
        table.add_row(
            str(row), f"{rate:.0%}", Text("#" * length, style=colour) + Text("." * (BAR_WIDTH - length), "dim")
        )
    return table


def probe_table(done: Examined) -> Table:
    """The probes that gain most, best first."""
    measured, probes = done.diagnosis.measured, done.diagnosis.probes
    assert measured is not None
    table = new_table("one thing changed", "positions", "tau", "at least", "drawn", "at least")
    table.add_row("nothing", str(measured.positions), f"{measured.every_position:.2f}", "", f"{measured.drawn:.2f}", "")
    for probe in sorted(probes, key=lambda probe: -probe.gain)[:MOST_PROBES]:
        figures = [f"{figure:+.2f}" for gain in (probe.greedy, probe.drawn) for figure in (gain.gain, gain.low)]
        table.add_row(probe.change, str(probe.positions), *figures, style="bold red" if probe.is_better else "")
    if len(probes) > MOST_PROBES:
        table.add_row(f"{len(probes) - MOST_PROBES} more gain less", *[""] * 5, style="dim")
    return table


def explanation(done: Examined) -> str:
    measured = done.diagnosis.measured
    assert measured is not None
    return (
        f"accepted: where all rows before were accepted. tau: mean of accepted + 1 over start positions of "
        f"{measured.texts} greedy texts ({measured.low:.2f} to {measured.high:.2f}), and what a change gains. drawn: "
        f"the same to expect if tokens were drawn from the drafter's law. at least: the lower end of the gain's "
        f"{1 - ALPHA:.1%} interval. A change helps if it is above 0 by either measure, with a gain of {MARGIN:.0%} at "
        f"least. What clearly harms on the longest {FEW} texts is not tried on the others."
    )


def acceptance_lines(done: Examined) -> list[str]:
    measured, expected = done.diagnosis.measured, done.diagnosis.expected
    if measured is None:
        return []
    tau = f"{measured.acceptance_length:.2f}"
    line = f"Acceptance length, decoded along these texts (mean over rounds of accepted + 1): {tau}"
    if expected is None:
        return [f"{line}; expected: neither the checkpoint nor a publication says, so it is not judged."]
    return [f"{line}; expected {span(expected)} ({expected.source})."]


def told(finding: Finding) -> Text:
    mark, style = MARKS[finding.severity]
    return Text.assemble((mark, style), (finding.what, "bold"), f" ({finding.evidence}).\n  Remedy: {finding.remedy}.")


def verdict(done: Examined) -> Text:
    faults = sum(finding.severity == "fault" for finding in done.diagnosis.findings)
    if done.diagnosis.is_healthy and done.diagnosis.measured is None:
        return Text("Nothing wrong in the files; acceptance was not measured: give longer texts.", style="bold yellow")
    if done.diagnosis.is_healthy:
        probes = done.diagnosis.probes
        widths = [(p.drawn.high - p.drawn.low) / 2 for p in probes if p.drawn.high >= 0]
        limit = f"most gains below {median(widths):.2f} would not show" if widths else "each clearly does harm"
        return Text.assemble(
            ("Healthy: ", "bold green"),
            f"none of {len(probes)} changes helps beyond chance; {limit} on so few texts "
            f"(more: --prompts, --max-new-tokens). Examined in {done.seconds:.0f} s.",
        )
    first = "the first one is to be mended first; then ask again" if faults > 1 else "mend it and ask again"
    return Text.assemble(("Not healthy: ", "bold red"), f"{faults} fault{'s' if faults > 1 else ''}; {first}.")


def document(command: Command, done: Examined) -> dict[str, Json]:
    """The diagnosis: all that was found and all that it depends on. Hashing reads all weights once."""
    diagnosis, target, drafter = done.diagnosis, done.target, done.intake.drafter
    facts: dict[str, object] = {
        "schema": SCHEMA,
        "target": target.name,
        "draft": done.name,
        "family": drafter.family if drafter else None,
        "healthy": diagnosis.is_healthy,
        "findings": [asdict(finding) for finding in diagnosis.findings],
        "measured": asdict(diagnosis.measured) if diagnosis.measured else None,
        "not_measured": diagnosis.not_measured,
        "expected": asdict(diagnosis.expected) if diagnosis.expected else None,
        "probes": [asdict(probe) | {"is_better": probe.is_better} for probe in diagnosis.probes],
        "setting": {"max_new_tokens": command.max_new_tokens, "margin": MARGIN, "alpha": ALPHA},
        "prompts": [{"prompt_sha256": prompt_sha256(text.prompt), "answer": text.answer} for text in done.texts],
        "checkpoint_sha256": {
            "target": checkpoint.sha256(target.folder) if target.folder else None,
            "draft": checkpoint.sha256(drafter.folder) if drafter and drafter.folder else None,
        },
        "engine": target.engine,
        "dtype": str(target.dtype).removeprefix("torch."),
        "device": str(target.device),
        "seconds": done.seconds,
        "hardware": hardware(target.device),
        "versions": versions(),
        "commit": commit(),
    }
    return {name: plain(value) for name, value in facts.items()}
