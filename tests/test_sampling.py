"""Noise that depends on nothing but (seed, position, token); and the law that tokens are drawn from."""

import math
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from dloop.errors import UserError
from dloop.sampling import fresh_seed, gumbel, process, uniform
from dloop.types import GREEDY_BELOW, Sampling

MASK = 2**64 - 1
V = 7
N = 30_000
SEED = 1234


def chi_square(counts: Tensor, expected: Tensor) -> float:
    assert bool((expected >= 5).all()), "cells too small for the test"
    return ((counts - expected) ** 2 / expected).sum().item()


def critical(degrees: int, sigmas: float = 4.0) -> float:
    """Wilson and Hilferty's approximation of the chi-square quantile; 4 sigmas are about 3e-5."""
    return degrees * (1 - 2 / (9 * degrees) + sigmas * math.sqrt(2 / (9 * degrees))) ** 3


# The generator


def splitmix(value: int) -> int:
    """SplitMix64's finaliser on plain integers."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
    return value ^ (value >> 31)


def uniform_twin(seed: int, position: int, token: int, stream: int) -> float:
    golden = 0x9E3779B97F4A7C15
    key = splitmix(((seed ^ splitmix((stream + golden) & MASK)) + golden) & MASK)
    row = splitmix((position + key) & MASK)
    bits = splitmix((row + token * golden) & MASK)
    return ((bits >> 12) + 0.5) / 2**52


@given(
    seed=st.integers(0, 2**63 - 1),
    position=st.integers(0, 2**40),
    token=st.integers(0, 300),
    stream=st.integers(0, 3),
)
def test_uniform_equals_its_twin_on_plain_integers(seed, position, token, stream):
    found = uniform(seed, torch.tensor([position]), token + 1, stream)[0, token].item()
    assert found == uniform_twin(seed, position, token, stream)
    assert 0 < found < 1


def test_recorded_numbers_never_change():
    """A recorded seed must give the same text with every later release."""
    found = uniform(7, torch.tensor([0, 1000]), 3)
    expected = [[uniform_twin(7, p, t, 0) for t in range(3)] for p in (0, 1000)]
    assert found.tolist() == expected
    assert found[0].tolist() == [0.9769455318311798, 0.9012981066548192, 0.8700729629945682]


def test_noise_is_a_function_of_seed_position_and_token_only():
    positions = torch.tensor([9, 0, 512, 9, 10**9])
    noise = gumbel(SEED, positions, 50)
    assert torch.equal(noise[0], noise[3])
    for row, position in enumerate(positions.tolist()):
        assert torch.equal(noise[row], gumbel(SEED, torch.tensor([position]), 50)[0])  # alone or packed
        assert torch.equal(noise[row, :20], gumbel(SEED, torch.tensor([position]), 20)[0])  # whatever the vocabulary
    assert torch.equal(gumbel(SEED, positions.to(torch.int32), 50), noise)
    for other in (gumbel(SEED + 1, positions, 50), gumbel(SEED, positions + 1, 50), gumbel(SEED, positions, 51)[:, 1:]):
        assert not bool((other == noise).any())
    assert not bool((uniform(SEED, positions, 50, stream=1) == uniform(SEED, positions, 50)).any())
    assert gumbel(SEED, torch.tensor([], dtype=torch.int64), 50).shape == (0, 50)


def test_nothing_global_is_read_or_written():
    torch.manual_seed(0)
    state = torch.get_rng_state()
    first = gumbel(SEED, torch.arange(4), V)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(1)
    assert torch.equal(gumbel(SEED, torch.arange(4), V), first)


@pytest.mark.parametrize("axis", ["positions", "tokens", "seeds"])
def test_uniform_is_uniform_and_neighbours_are_independent(axis):
    if axis == "positions":
        numbers = uniform(SEED, torch.arange(N), 1)[:, 0]
    elif axis == "tokens":
        numbers = uniform(SEED, torch.tensor([3]), N)[0]
    else:
        numbers = torch.stack([uniform(seed, torch.tensor([3]), 1)[0, 0] for seed in range(N // 10)])
    bins = 20
    counts = torch.histc(numbers.float(), bins, 0, 1)
    assert chi_square(counts, torch.full((bins,), len(numbers) / bins)) < critical(bins - 1)
    cells = (numbers * 5).long()
    pairs = torch.bincount(cells[:-1] * 5 + cells[1:], minlength=25).float()
    assert chi_square(pairs, torch.full((25,), (len(numbers) - 1) / 25)) < critical(24)


# Sampling by the Gumbel maximum


def right(seed: int, positions: Tensor, vocab: int) -> Tensor:
    return gumbel(seed, positions, vocab)


def without_the_outer_log(seed: int, positions: Tensor, vocab: int) -> Tensor:
    return uniform(seed, positions, vocab)


def exponential(seed: int, positions: Tensor, vocab: int) -> Tensor:
    return -torch.log(uniform(seed, positions, vocab))


def forgets_the_token(seed: int, positions: Tensor, vocab: int) -> Tensor:
    return gumbel(seed, positions, 1).expand(-1, vocab)


def forgets_every_other_position(seed: int, positions: Tensor, vocab: int) -> Tensor:
    return gumbel(seed, positions // 2, vocab)


def drawn(noise, logits: Tensor) -> Tensor:
    """One token for each of N positions."""
    return (logits.double() + noise(SEED, torch.arange(N), V)).argmax(-1)


def marginal_statistic(noise) -> float:
    logits = torch.tensor([1.5, 0.0, -0.7, 2.0, 0.3, -2.0, 1.0])
    counts = torch.bincount(drawn(noise, logits), minlength=V).double()
    return chi_square(counts, N * logits.double().softmax(-1))


def pair_statistic(noise) -> float:
    """Neighbouring positions are independent draws."""
    logits = torch.tensor([1.5, 0.0, -0.7, 2.0, 0.3, -2.0, 1.0])
    tokens = drawn(noise, logits).view(-1, 2)
    counts = torch.bincount(tokens[:, 0] * V + tokens[:, 1], minlength=V * V).double()
    law = logits.double().softmax(-1)
    expected = (N / 2) * torch.outer(law, law).flatten()
    small = expected < 5
    if bool(small.any()):
        counts = torch.cat([counts[~small], counts[small].sum()[None]])
        expected = torch.cat([expected[~small], expected[small].sum()[None]])
    return chi_square(counts, expected)


def test_the_argmax_follows_the_softmax():
    assert marginal_statistic(right) < critical(V - 1)
    assert pair_statistic(right) < critical(V * V - 1)


@pytest.mark.parametrize("planted", [without_the_outer_log, exponential, forgets_the_token])
def test_wrong_noise_is_caught(planted):
    assert marginal_statistic(planted) > 10 * critical(V - 1)


def test_noise_shared_by_neighbours_is_caught():
    assert marginal_statistic(forgets_every_other_position) < 4 * critical(V - 1)  # each token alone looks right
    assert pair_statistic(forgets_every_other_position) > 10 * critical(V * V - 1)


# The processed law


def process_twin(row: list[float], law: Sampling) -> list[float]:
    """Token by token in Python; -inf for what is forbidden."""
    scores = [x / law.temperature for x in row]
    alive = set(range(len(row)))
    if 0 < law.top_k < len(row):
        kth = sorted(scores, reverse=True)[law.top_k - 1]
        alive = {i for i in alive if scores[i] >= kth}
    if law.top_p < 1:
        total = sum(math.exp(scores[i]) for i in alive)
        before = 0.0
        for i in sorted(alive, key=lambda i: -scores[i]):
            if before >= law.top_p:
                alive.discard(i)
            before += math.exp(scores[i]) / total
    return [scores[i] if i in alive else -math.inf for i in range(len(row))]


laws = st.builds(
    Sampling,
    temperature=st.sampled_from([0.3, 0.7, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 2, 5, 23, 24, 99]),
    top_p=st.sampled_from([0.05, 0.5, 0.9, 0.999, 1.0]),
)


def random_logits(seed: int, rows: int = 4, vocab: int = 23) -> Tensor:
    return 2 * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed))


@given(law=laws, seed=st.integers(0, 10_000))
def test_process_equals_its_twin(law, seed):
    logits = random_logits(seed)
    found = process(logits, law)
    expected = torch.tensor([process_twin(row, law) for row in logits.double().tolist()])
    torch.testing.assert_close(found, expected.float(), rtol=1e-5, atol=1e-6)


@given(law=laws, seed=st.integers(0, 10_000))
def test_process_equals_transformers_warpers(law, seed):
    logits = random_logits(seed)
    expected = TemperatureLogitsWarper(law.temperature)(None, logits)
    if law.top_k:
        expected = TopKLogitsWarper(law.top_k)(None, expected)
    if law.top_p < 1:
        expected = TopPLogitsWarper(law.top_p)(None, expected)
    assert torch.equal(process(logits, law), expected)


@given(law=laws, seed=st.integers(0, 10_000))
def test_a_row_s_law_does_not_depend_on_the_rows_beside_it(law, seed):
    logits = random_logits(seed, rows=5)
    together = process(logits, law)
    for row in range(5):
        assert torch.equal(process(logits[row : row + 1], law)[0], together[row])
    assert bool((together > -math.inf).any(-1).all()), "at least one token is always allowed"


def test_ties_with_the_k_th_token_stay_and_half_precision_is_computed_in_float32():
    tied = process(torch.tensor([[1.0, 1.0, 0.0, 1.0]]), Sampling(temperature=1.0, top_k=2))
    assert tied.tolist() == [[1.0, 1.0, -math.inf, 1.0]]
    assert process(torch.zeros(1, 3, dtype=torch.bfloat16), Sampling(temperature=3.0)).dtype == torch.float32


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"temperature": -0.1}, "temperature=-0.1"),
        ({"temperature": math.nan}, "temperature=nan"),
        ({"temperature": math.inf}, "temperature=inf"),
        ({"top_k": -1}, "top_k=-1"),
        ({"top_p": 0.0}, "top_p=0.0"),
        ({"top_p": 1.1}, "top_p=1.1"),
        ({"top_p": math.nan}, "top_p=nan"),
        ({"seed": -1}, "seed=-1"),
        ({"seed": 2**63}, f"seed={2**63}"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_impossible_settings_are_refused(wrong, named):
    with pytest.raises(UserError, match=named) as error:
        Sampling(**wrong)
    assert "must" in str(error.value) and "\n" not in str(error.value)


def test_greedy_is_a_temperature_below_the_published_threshold():
    assert Sampling().is_greedy and Sampling(temperature=0.99e-5).is_greedy
    assert not Sampling(temperature=1e-5).is_greedy
    assert GREEDY_BELOW == 1e-5


def test_fresh_seeds_are_valid_and_differ():
    seeds = [fresh_seed() for _ in range(20)]
    assert max(Counter(seeds).values()) == 1
    assert all(Sampling(seed=seed).seed == seed for seed in seeds)


def test_the_likeliest_token_survives_any_top_p():
    scores = process(torch.tensor([[0.0, 3.0, 1.0]]), Sampling(temperature=1.0, top_p=1e-46))
    assert scores.isfinite().tolist() == [[False, True, False]]
