"""A report's tables in the terminal and as a Markdown page: the same cells, the same notes."""

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table as RichTable

from dloop.bench.compare import Difference
from dloop.bench.naming import Column
from dloop.bench.report import MEAN, Estimate, Row, Table
from dloop.bench.results import Condition, Result
from dloop.bench.table import figure

COLUMNS = ("set", "setting", "n", "tau", "95 %", "tok/s", "speed", "95 %", "loop", "rep", "bad")
DIFFERENCES = ("set", "pairs", "tau B - A", "95 %", "speed B / A", "95 %")
MEANING = (
    "n: samples, * not the published ones. tau: mean over responses of the mean over rounds of accepted + 1, never "
    "cut. tok/s: prefill left out. speed: the baseline's mean time per output token over the setting's. loop: share of "
    "the text drafted in a second or later stage. rep: share of 8-grams seen before in the answer. bad: failed "
    "responses. 95 %: bootstrap over samples; a speed-up's draw takes the same samples of both sides."
)


def show(made: Sequence[Table], differences: Sequence[Difference], pair: Sequence[str], console: Console) -> None:
    """Print everything; nothing is cropped: a table wider than the terminal stays whole."""
    for table in made:
        console.print(heading(table.condition), style="bold")
        show_table(COLUMNS, cells_of(table), console, left=2)
        for line in [*notes(table), *legend(table)]:
            console.print(line, style="dim")
        console.print()
    if differences:
        console.print(versus(pair), style="bold")
        show_table(DIFFERENCES, [difference_cells(row) for row in differences], console, left=1)
        for line in left_out(differences):
            console.print(line, style="dim")
    if made:
        console.print(MEANING, style="dim")


def show_table(names: Sequence[str], rows: Sequence[Sequence[str]], console: Console, left: int) -> None:
    """One table; the first `left` columns hold words."""
    table = RichTable(box=box.SIMPLE_HEAD, show_edge=False, padding=0, pad_edge=False, header_style="bold")
    for index, name in enumerate(names):
        table.add_column(name, justify="left" if index < left else "right", no_wrap=True)
    for cells in rows:
        table.add_row(*cells)
    needed = Measurement.get(console, console.options.update(max_width=10_000), table).maximum
    Console(file=console.file, highlight=False, width=max(console.width, needed)).print(table)


def page(
    made: Sequence[Table], differences: Sequence[Difference], pair: Sequence[str], more: Sequence[str] = ()
) -> str:
    """Everything as Markdown; `more`: lines that follow."""
    lines = ["# Report", "", *([MEANING, ""] if made else [])]
    for table in made:
        lines += [f"## {heading(table.condition)}", "", *markdown(COLUMNS, cells_of(table)), ""]
        lines += [f"- {line}" for line in [*notes(table), *legend(table)]] + [""]
    if differences:
        lines += [f"## {versus(pair)}", "", *markdown(DIFFERENCES, [difference_cells(row) for row in differences]), ""]
        lines += [f"- {line}" for line in left_out(differences)] + [""]
    lines += more
    return "\n".join(lines).rstrip().replace("*", "\\*") + "\n"


def markdown(names: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of one table."""
    return [f"| {' | '.join(cells)} |" for cells in (names, ["---"] * len(names), *rows)]


def heading(condition: Condition) -> str:
    """What all rows of a table share."""
    target, machine, dtype, temperature, top_k, top_p, length = condition
    law = (
        f"temperature {temperature:g}"
        + (f", top-k {top_k}" if top_k else "")
        + (f", top-p {top_p:g}" if top_p < 1 else "")
    )
    return f"{target}, {dtype} on {machine}, {law}, at most {length} new tokens"


def cells_of(table: Table) -> list[list[str]]:
    """All rows, a set's name only where it begins; the means last."""
    families = {row.family for row in table.rows if row.family is not None}
    found: list[list[str]] = []
    before = ""
    for row in [*table.rows, *table.means]:
        name = mean_name(table) if row.dataset == MEAN else row.dataset
        found.append([name if name != before else "", label(row.family, row.setting, families), *cells(row)])
        before = name
    return found


def mean_name(table: Table) -> str:
    """What the rows of means are called."""
    return f"mean of {len(table.mean_sets)}"


def label(family: str | None, setting: str, families: set[str]) -> str:
    """A setting's name, with its family where there are several."""
    return f"{family} {setting}" if family is not None and len(families) > 1 else setting


def cells(row: Row) -> list[str]:
    """The figures of one row."""
    tau, tokens_per_s, speedup = row.figures
    return [
        f"{row.n}{'' if row.complete else '*'}",
        figure(tau.value, ".2f"),
        interval(tau),
        figure(tokens_per_s.value, ".1f"),
        figure(speedup.value, ".2f"),
        interval(speedup),
        figure(row.looped, ".0%"),
        figure(row.repetition, ".0%"),
        str(row.failures),
    ]


def interval(estimate: Estimate) -> str:
    """Low and high, or a dash."""
    return "-" if estimate.low is None or estimate.high is None else f"{estimate.low:.2f}-{estimate.high:.2f}"


def notes(table: Table) -> list[str]:
    """Why figures are missing, and what the means leave out."""
    reasons: dict[str, list[str]] = {}
    for row in table.rows:
        if row.family is not None and row.reason is not None:
            reasons.setdefault(row.reason, []).append(f"{row.setting} ({row.dataset})")
    lines = [f"no speed-up for {', '.join(names)}: {reason}" for reason, names in reasons.items()]
    sets = dict.fromkeys(row.dataset for row in table.rows)
    if table.means and (rest := [name for name in sets if name not in table.mean_sets]):
        lines.append(f"the mean leaves out {', '.join(rest)}, which not every setting has")
    return lines


def legend(table: Table) -> list[str]:
    """What each setting is."""
    families = {column.family for column in table.columns if column.family is not None}
    return [meaning(column, run, families) for column, run in table.columns.items()]


def meaning(column: Column, run: Result, families: set[str]) -> str:
    """The drafter and the flags behind one setting."""
    summary = run.summary
    name = label(column.family, column.setting, families)
    if run.is_baseline:
        return f"{name}: plain decoding"
    return f"{name}: {summary['family']} drafter {summary['draft']}, {summary['setting_name']}"


def versus(pair: Sequence[str]) -> str:
    """The heading of a comparison."""
    return f"B = {pair[1]} against A = {pair[0]}, on the same prompts"


def difference_cells(row: Difference) -> list[str]:
    """The cells of a comparison's row."""
    values = [figure(row.tau.value, "+.2f"), signed(row.tau), figure(row.speed.value, ".3f"), interval(row.speed)]
    return [row.dataset, str(row.pairs), *values]


def signed(estimate: Estimate) -> str:
    """Low and high of a difference."""
    return "-" if estimate.low is None or estimate.high is None else f"{estimate.low:+.2f}..{estimate.high:+.2f}"


def left_out(differences: Sequence[Difference]) -> list[str]:
    """What was not compared."""
    return [f"{row.dataset}: {row.left_out} samples without a partner" for row in differences if row.left_out]
