"""The sampler of the fast path on a CPU: a graph is a function that is called again into the same memory."""

from collections.abc import Callable

import pytest
import torch

from dloop.fast import sampler as fast_sampler
from dloop.fast.graphs import Parts
from dloop.fast.sampler import GraphedSampler
from dloop.judge import PLAIN
from dloop.sampling import DRAFT_STREAM, draw
from dloop.sampling import law as law_of
from dloop.types import Draft, Sampling, Stage

V = 50
LAWS = [dict(temperature=1.0), dict(temperature=0.7, top_k=9, top_p=0.9)]


class Replayed(Parts):
    """A captured function."""

    def __new__(cls, *_args: object) -> "Replayed":
        return object.__new__(cls)

    def __init__(self, fn: Callable[[], torch.Tensor]) -> None:
        self.fn, self.out = fn, fn()

    def replay(self) -> None:
        self.out.copy_(self.fn())


class Recorder:
    """Captures, and counts."""

    def __init__(self) -> None:
        self.captures = self.clears = 0

    def capture(self, fn: Callable[[], torch.Tensor]) -> tuple[Replayed, torch.Tensor]:
        self.captures += 1
        graph = Replayed(fn)
        return graph, graph.out

    def clear(self) -> None:
        self.clears += 1


@pytest.fixture
def sampler(monkeypatch) -> GraphedSampler:
    monkeypatch.setattr(fast_sampler, "Graphs", lambda *_args, **_kw: Recorder())
    return GraphedSampler(torch.device("cpu"))


def drafted(logits: torch.Tensor, law: Sampling, position: int) -> Draft:
    """A chain drawn near the target's law, so that some of it is accepted."""
    count = len(logits) - 1
    q = law_of(logits[:-1] + torch.randn_like(logits[:-1]), law)
    tokens = draw(q, law.seed, torch.arange(position + 1, position + 1 + count), DRAFT_STREAM).tolist()
    stage = Stage(
        tokens=tokens,
        parents=list(range(-1, count - 1)),
        logp=[0.0] * count,
        spine=list(range(count)),
        score=0.0,
        probs=q,
    )
    return Draft.rooted(7, position).graft(stage)


@pytest.mark.parametrize("options", LAWS)
def test_one_graph_serves_every_seed_position_and_text_at_its_address(sampler, options):
    logits, taken = torch.empty(9, V), set()
    for seed in range(20):
        logits.copy_(2 * torch.randn(9, V, generator=torch.Generator().manual_seed(seed)))
        law = Sampling(**options, seed=seed)
        for count in (3, 9):
            rows, where = logits[:count], list(range(10 * seed, 10 * seed + count))
            assert sampler.pick(rows, law, where) == PLAIN.pick(rows, law, where)
            draft = drafted(rows.clone(), law, 100 + seed)
            found = sampler.reject(rows, law, draft)
            assert found == PLAIN.reject(rows, law, draft)
            taken.add(found[0])
    assert sampler.graphs.captures == 4 and len(taken) > 3
    other = logits.clone()
    assert sampler.pick(other, law, where) == PLAIN.pick(other, law, where)
    assert sampler.graphs.captures == 5, "another address needs another graph"


def test_what_a_graph_does_not_pay_for_has_none(sampler):
    many, law = torch.randn(fast_sampler.MOST_ROWS + 1, V), Sampling(temperature=1.0, seed=3)
    where = list(range(len(many)))
    assert sampler.pick(many, law, where) == PLAIN.pick(many, law, where)
    assert sampler.pick(many[:4], Sampling(temperature=0.0), where[:4]) == many[:4].argmax(-1).tolist()
    draft = drafted(many, law, 5)
    assert sampler.reject(many, law, draft) == PLAIN.reject(many, law, draft)
    alone = Draft.rooted(7, 5)
    assert sampler.reject(many[:1], law, alone) == PLAIN.reject(many[:1], law, alone)
    assert sampler.graphs.captures == 0


def test_graphs_are_forgotten_together_with_their_pool(sampler, monkeypatch):
    monkeypatch.setattr(fast_sampler, "MOST_GRAPHS", 2)
    logits, law = torch.randn(5, V), Sampling(temperature=1.0, seed=3)
    for count in (1, 2, 3, 1):
        where = list(range(count))
        assert sampler.pick(logits[:count], law, where) == PLAIN.pick(logits[:count], law, where)
    assert (sampler.graphs.captures, sampler.graphs.clears) == (4, 1)
