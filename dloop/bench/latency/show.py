"""A run as tables on standard output."""

from collections.abc import Mapping, Sequence
from typing import cast

from rich import box
from rich.console import Console
from rich.table import Table

from dloop.bench.latency.book import Entry
from dloop.bench.table import figure
from dloop.records import Json

OTHERS = {
    "dflash_first": "DFlash stage",
    "dflash_later": "DFlash, further stage",
    "domino_first": "Domino stage",
    "domino_later": "Domino, further stage",
    "eagle3_chain": "EAGLE-3 chain",
    "eagle3_later": "EAGLE-3, further chain",
    "eagle3_tree": "EAGLE-3 tree",
}
Object = Mapping[str, Json]


def table_of(columns: Sequence[str]) -> Table:
    """The first column names things and may wrap, the others hold numbers."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=0, pad_edge=False, header_style="bold")
    for index, name in enumerate(columns):
        table.add_column(name, justify="right" if index else "left", no_wrap=index > 0)
    return table


def show(entries: Sequence[Entry], console: Console | None = None) -> None:
    """Milliseconds of everything, the fast path also as a multiple of its floor."""
    console = console or Console(highlight=False)
    first = entries[0]
    console.print(f"{first['shape']}, random weights, {first['dtype']} on {first['gpu']}; milliseconds, medians")
    bandwidth, rate = first["ceilings"].values()
    console.print(f"ceilings: {bandwidth / 1e9:,.0f} GB/s, {rate / 1e12:,.1f} TFLOP/s; fast: {first['fast']}")
    table = table_of(("context", "work", "stock", "twin", "fast", "floor", "fast/floor", "stock/fast"))
    for entry in entries:
        for count, row in entry["rows"].items():
            table.add_row(*cells(entry, f"verify {count}", cast(Object, row)))
        for kind in ("first", "later", "extend"):
            stage = cast(Object | None, entry["stage_ms"].get(kind))
            if stage is not None:
                table.add_row(*cells(entry, f"{kind} stage" if kind != "extend" else f"extend {stage['rows']}", stage))
        for kind, name in OTHERS.items():
            if kind in entry["stage_ms"]:
                table.add_row(*cells(entry, name, cast(Object, entry["stage_ms"][kind])))
    console.print(table)
    host = cast(Object, first["stage_ms"]["host"])
    console.print(f"the loop's own work on the host: {figure(host['loop_ms'], '.4f')} ms a stage")
    if any(entry["peers"] for entry in entries):
        console.print(peer_table(entries))


def cells(entry: Entry, work: str, row: Object) -> list[str]:
    """One piece of work."""
    found = (cast(float | None, row.get(f"{name}_ms")) for name in ("stock", "twin", "fast", "floor"))
    stock, twin, fast, floor = found
    ratios = [fast / floor if fast and floor else None, stock / fast if stock and fast else None]
    numbers = [*(figure(value, ".3f") for value in (stock, twin, fast, floor)), *(figure(r, ".2f") for r in ratios)]
    return [f"{entry['context']}", work, *numbers]


def peer_table(entries: Sequence[Entry]) -> Table:
    """Whole rounds of other tools on the same weights and prompt."""
    table = table_of(("who", "context", "ms/round", "ms/token", "tokens/round", "status"))
    for entry in entries:
        for name, value in entry["peers"].items():
            peer = cast(Object, value)
            numbers = [figure(peer.get(key), ".3f") for key in ("ms_per_round", "ms_per_token", "tokens_per_round")]
            table.add_row(name, str(entry["context"]), *numbers, str(peer.get("install", peer["status"])))
    return table


def show_replay(document: Object, console: Console | None = None) -> None:
    """Both loops, a line each."""
    console = console or Console(highlight=False)
    what = f"acceptance drawn at {document['synthetic_acceptance']}: NO RESULT" if document["synthetic"] else "recorded"
    console.print(f"{document['shape']}, random weights, {document['dtype']} on {document['gpu']}; rounds {what}")
    table = table_of(("loop", "ms/round", "tokens/round", "plain ms/token", "over plain"))
    for name, value in cast(Object, document["loops"]).items():
        pace = cast(Object, value)
        keys = ("ms_per_round", "tokens_per_round", "plain_ms_per_token", "speedup_over_plain")
        table.add_row(name, *(figure(pace[key], ".3f") for key in keys))
    console.print(table)
    console.print(f"stock over fast: {figure(document['ratio'], '.2f')}x a round")
