"""DDTree on DFlash against numbers of the public original: every node, every tensor. Valid for any case."""

from dataclasses import replace

import pytest
from block_cases import Golden, run
from torch.nn import functional as F
from tree_cases import check_config, check_tensors, check_texts, is_whole, read, shared_tensors

import dloop
from dloop.trees.shape import TreeShape


def shape_of(case: dict) -> TreeShape:
    """The original's candidates: as many at each depth as the budget."""
    return TreeShape(budget=case["tree_budget"], topk=case["tree_budget"])


@pytest.fixture(scope="module")
def golden(goldens) -> Golden:
    return read(goldens / "ddtree", shape_of)


def test_the_config_says_what_the_case_says(golden):
    check_config(golden, "dflash")


def test_texts_nodes_and_acceptance(golden):
    check_texts(golden)


def test_the_gate_would_read_the_greedy_chain(golden):
    for sample in golden.samples:
        decoded, _ = run(golden, golden.drafter, sample)
        for r, expected in zip(decoded.rounds, sample["rounds"], strict=False):
            assert r.scores == pytest.approx([sum(expected["greedy_chain_logprobs"])], abs=1e-4)


def test_other_budgets_accept_as_much_as_the_original(golden):
    for sample in golden.samples:
        for budget, lengths in sample["other_budgets"].items():
            case = golden.case | {"tree_budget": int(budget)}
            drafter = golden.drafter.with_trees(shape_of(case))
            decoded, _ = run(golden, drafter, sample)
            assert decoded.tokens == sample["output_ids"]
            start = 0
            for r, length in zip(decoded.rounds, lengths, strict=False):
                if is_whole(replace(golden, case=case), sample, start):
                    assert r.accepted + 1 == length, (budget, start)
                start += r.accepted + 1


def tensors_of(golden: Golden, decoded, trace, log, index: int) -> dict:
    _, _, hidden = log.staged[index]
    logits = F.linear(golden.drafter.model.predicting(hidden), golden.drafter.vocabulary.head)
    return shared_tensors(decoded, trace, index) | {"draft_hidden": hidden, "draft_logits": logits}


def test_every_tensor_of_every_recorded_round(golden, record):
    log = record(golden.drafter.model)

    def listen():
        log.staged.clear()
        return log

    check_tensors(golden, listen, tensors_of)


def test_the_loop_gives_the_same_text(golden):
    for sample in golden.samples:
        rules = {"max_new_tokens": sample["max_new_tokens"], "stop_token_ids": sample["stop_ids"], "max_stages": 3}
        for gate, stage in ((-1.0, 7), (float("-inf"), 20)):
            budgets = {"tree_budget": golden.case["tree_budget"], "stage_tree_budget": stage}
            looped = dloop.generate(
                golden.target, golden.drafter, sample["prompt_ids"], loop_gate=gate, **budgets, **rules
            )
            assert looped.tokens == sample["output_ids"]


def test_a_wrong_candidate_count_is_caught(golden):
    """Planted: two candidates at each depth instead of the budget's."""
    drafter = golden.drafter.with_trees(replace(golden.drafter.trees, topk=2))
    with pytest.raises(AssertionError):
        check_texts(replace(golden, drafter=drafter))
