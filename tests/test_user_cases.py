"""What users reported of such tools, tried here: cases that have no test elsewhere, and the page that lists all."""

import ast
import re
from pathlib import Path

import pytest
import torch

import dloop
from dloop.judge import Reject
from dloop.sampling import Draw, Sampling, law, sample_seed
from dloop.settings import Settings
from dloop.testing import chain, good_drafter, tiny_drafter, tiny_target, write_drafter
from dloop.types import Draft

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "user-cases.md").read_text()
PROMPT = [5, 9, 11, 60]
OUTCOMES = {"holds", "refused", "in part", "open"}


@pytest.fixture(scope="module")
def target():
    return tiny_target(num_layers=3)


@pytest.fixture(scope="module")
def drafter(target):
    return good_drafter(target, [PROMPT + dloop.generate_autoregressive(target, PROMPT, 40).tokens])


def rows() -> list[list[str]]:
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in PAGE.splitlines() if line.startswith("| U")]


def test_each_case_has_one_row_with_an_outcome_and_what_is_open_says_what():
    numbers = [int(row[0][1:]) for row in rows()]
    assert numbers == sorted(set(numbers)) and numbers[0] == 1 and numbers[-1] == 45
    for number, _, outcome, tests in rows():
        word = outcome.split(":")[0]
        assert word in OUTCOMES, number
        assert (":" in outcome) == (word in ("in part", "open")), number
        assert tests or word == "open", number


def test_the_tests_that_the_page_names_exist():
    for _, _, _, cell in rows():
        for file, name in re.findall(r"`([\w/]+)::(\w+)`", cell):
            tree = ast.parse((ROOT / "tests" / f"{file}.py").read_text())
            assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, (file, name)


def test_drafts_drawn_from_bfloat16_logits_keep_the_law():
    """The probabilities that judge a draft are those it was drawn from, however coarse the logits."""
    sampling = Sampling(temperature=1.0)
    generator = torch.Generator().manual_seed(2)
    mine, theirs = (
        (1.5 * torch.randn(1, 8, generator=generator)).bfloat16(),
        1.5 * torch.randn(1, 8, generator=generator),
    )
    counts, expected = torch.zeros(8), law(theirs, sampling)[0] * 4000
    for seed in range(4000):
        own = Sampling(temperature=1.0, seed=seed)
        token, probs = Draw(own, 8)(mine[0], 0)
        assert probs is not None and probs.dtype == torch.float32
        draft = Draft.rooted(0, 7).graft(chain([int(token)]))
        draft.probs.append(probs[None])
        verdict = Reject(own)(draft, theirs.expand(2, -1))
        counts[int(token) if verdict.path else verdict.bonus] += 1
    assert ((counts - expected) ** 2 / expected).sum() < 24.3  # 7 degrees of freedom: p = 0.001


def test_a_batch_of_ragged_prompts_equals_its_single_runs(target, drafter):
    prompts = [[(7 * length + i) % 97 for i in range(length)] for length in (3, 17, 64, 5)]
    settings = Settings(max_new_tokens=24, loop_gate=-2.0, max_stages=4)
    texts = {text.index: text for text in dloop.generate_many(target, drafter, [*prompts, PROMPT], settings)}
    for index, prompt in enumerate([*prompts, PROMPT]):
        alone = dloop.generate(target, drafter, prompt, 24, loop_gate=-2.0, max_stages=4)
        assert texts[index].tokens == alone.tokens
        assert [r.stages for r in texts[index].rounds] == [r.stages for r in alone.rounds]
    assert len({r.stages for text in texts.values() for r in text.rounds}) > 1


@pytest.mark.parametrize("verify", ["match", "reject"])
def test_sampled_requests_at_once_give_the_texts_they_give_alone(target, drafter, verify):
    settings = Settings(max_new_tokens=6, loop_gate=-2.0, temperature=1.0, seed=3, verify=verify)
    alone = [
        dloop.generate(
            *(target, drafter, PROMPT, 6), loop_gate=-2.0, temperature=1.0, seed=sample_seed(3, index), verify=verify
        ).tokens
        for index in range(16)
    ]
    assert len(set(map(tuple, alone))) == 16
    for live in (1, 2, 4, 16):
        texts = dloop.generate_many(target, drafter, [PROMPT] * 16, settings, live)
        assert {text.index: text.tokens for text in texts} == dict(enumerate(alone)), live


@pytest.mark.parametrize("family", ["domino", "dspark"])
def test_the_name_of_a_folder_says_nothing(target, tmp_path, family):
    folder = write_drafter(tiny_drafter(target, family=family), tmp_path / "my-eagle3-dflash-mtp", "dflash")
    assert dloop.load_drafter(str(folder), target).family == family
