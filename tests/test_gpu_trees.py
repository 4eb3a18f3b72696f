"""What only a GPU can show of trees: bfloat16 texts are plain decoding's to the last token, whatever is drafted."""

import itertools
from dataclasses import fields

import pytest

import dloop
from dloop.batch import generate_many
from dloop.drafters.block import BlockDrafter
from dloop.drafters.config import BlockConfig
from dloop.drafters.dflash import DFlash
from dloop.drafters.domino import Domino
from dloop.fast.drafter import FastBlockDrafter
from dloop.sampling import sample_seed
from dloop.settings import Settings
from dloop.testing import fill, tiny_config

pytestmark = pytest.mark.gpu
K = 4
SHAPES = ({"tree_budget": 64}, {"tree_budget": 64, "stage_tree_budget": 24}, {"tree_budget": 200})


@pytest.fixture(scope="module")
def pair():
    target = dloop.load_target("smollm2", dtype="bfloat16", device="cuda", engine="fast")
    return target, dloop.load_drafter("demo", target)


def test_bfloat16_texts_of_trees_are_plain_decoding_s(pair):
    target, drafter = pair
    assert target.is_exact
    for start, gate, shape in itertools.product((5, 400), (1.0, -0.5, float("-inf")), SHAPES):
        prompt = list(range(start, start + 24))
        words = {"loop_gate": gate, "max_stages": 3, "stop_token_ids": (), **shape}
        plain = dloop.generate(target, None, prompt, 96, stop_token_ids=())
        found = dloop.generate(target, drafter, prompt, 96, exact=True, **words)
        assert found.tokens == plain.tokens
        assert any(not r.draft.is_chain for r in found.rounds)


@pytest.mark.parametrize("family", ["dflash", "domino"])
def test_the_other_block_families_draft_inside_the_graph(pair, family):
    """Of random weights: what they draft is wrong, the text is not."""
    target, demo = pair
    shape = {each.name: getattr(demo.config, each.name) for each in fields(BlockConfig)}
    shift = 1 if family == "dflash" else 0
    config = tiny_config(family, shape | {"block_size": K + shift, "label_shift": shift}, None)
    model = (DFlash if family == "dflash" else Domino)(config)
    fill(model, seed=1)
    model = model.to(target.dtype).to(target.device).eval().requires_grad_(False)
    twin = BlockDrafter(name=family, family=family, model=model, vocabulary=target.vocabulary)
    fast, prompt = FastBlockDrafter.of(twin), list(range(5, 29))
    plain = dloop.generate(target, None, prompt, 24, stop_token_ids=()).tokens
    for gate, budget, stage_budget in ((1.0, 24, 0), (float("-inf"), 24, 8), (float("-inf"), 0, 0)):
        words = {"loop_gate": gate, "max_stages": 2, "tree_budget": budget, "stage_tree_budget": stage_budget}
        found = dloop.generate(target, fast, prompt, 24, stop_token_ids=(), **words)
        assert found.tokens == plain and any(not r.draft.is_chain for r in found.rounds) == (budget > 0)
    drafts = [
        dloop.generate(target, each, prompt, 24, stop_token_ids=(), tree_budget=0).rounds for each in (twin, fast)
    ]
    alike = [one.draft.tokens == other.draft.tokens for one, other in zip(*drafts, strict=False)]
    assert sum(alike) > 0.8 * len(alike), "bfloat16 turns near-ties of a random drafter, not most of them"


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_trees_of_many_sequences_write_the_texts_they_write_alone(pair, temperature):
    target, drafter = pair
    prompts = [list(range(start, start + 10 + start % 7)) for start in range(100, 116)]
    settings = Settings(max_new_tokens=64, temperature=temperature, seed=1, loop_gate=-0.5, tree_budget=32)
    alone = [
        dloop.generate(target, None, p, 64, temperature=temperature, seed=sample_seed(1, i)).tokens
        for i, p in enumerate(prompts)
    ]
    found = {text.index: text.tokens for text in generate_many(target, drafter, prompts, settings, live=8)}
    assert [found[i] for i in range(len(prompts))] == alone
