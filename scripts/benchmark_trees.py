"""Host time of a round's tree on the CPU, piece by piece: milliseconds, medians over repeats, as one JSON document.

The laws are random: normal logits of several scales over 5,000 tokens, 15 depths, the 10 likeliest of each.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch

from dloop.fast.rows import Layout, bucket_of, pack_rows, runs_of
from dloop.judge import follow
from dloop.records import hardware, versions
from dloop.trees.best_first import best_first
from dloop.trees.tree import with_spine
from dloop.types import Draft, Rows, VerifyRequest

DEPTHS, CANDIDATES, VOCABULARY, CONTEXT = 15, 10, 5_000, 1_024


def median_ms(work: Callable[[], object], repeats: int) -> float:
    """After one warm-up."""
    work()
    seconds: list[float] = []
    for _ in range(repeats):
        started = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - started)
    return round(1000 * statistics.median(seconds), 4)


def pieces(scale: float, budget: int, repeats: int) -> dict[str, float]:
    """What a round's first stage and its verification cost on the host, without a model."""
    found = (scale * torch.randn(DEPTHS, VOCABULARY)).log_softmax(-1).topk(CANDIDATES)
    logp, tokens = found.values.tolist(), found.indices.tolist()
    tree = best_first(logp, tokens, budget)
    spine = [row[0] for row in tokens], [row[0] for row in logp]
    stage = with_spine(tree, *spine, 0.0)
    draft = Draft.rooted(1, CONTEXT).graft(stage)
    requests = [VerifyRequest(slot=0, draft=draft)]
    rows = Rows.pack(requests)
    runs, layout = runs_of(rows.slot, {0: CONTEXT}), Layout(rows=bucket_of(len(rows)), tile_rows=8, tree=True)
    works: dict[str, Callable[[], object]] = {
        "best_first": lambda: best_first(logp, tokens, budget),
        "with_spine": lambda: with_spine(tree, *spine, 0.0),
        "graft": lambda: Draft.rooted(1, CONTEXT).graft(stage),
        "rows": lambda: Rows.pack(requests),
        "masks": lambda: pack_rows(rows, runs, layout),
        "walk": lambda: follow(draft, [0] * len(rows)),
    }
    return {name: median_ms(work, repeats) for name, work in works.items()}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--budgets", type=int, nargs="+", default=[64, 256], help="nodes of the tree")
    parser.add_argument("--repeats", type=int, default=500, help="of each piece")
    given = parser.parse_args()
    torch.manual_seed(0)
    rows = [
        {"budget": budget, "scale": scale, **pieces(scale, budget, given.repeats)}
        for budget in given.budgets
        for scale in (1.0, 2.5, 5.0)
    ]
    print(json.dumps({"rows": rows, "hardware": hardware(torch.device("cpu")), "versions": versions()}))


if __name__ == "__main__":
    main()
