"""DARTree on DSpark against an adaptation of the public original, which supports Domino alone. Valid for any case."""

import pytest
from block_cases import Golden
from dartree_cases import Listener, check_loops, check_planted, shape_of, tensors_of
from tree_cases import check_config, check_tensors, check_texts, read


@pytest.fixture(scope="module")
def golden(goldens) -> Golden:
    return read(goldens / "dartree_dspark", shape_of)


def test_the_config_says_what_the_case_says(golden):
    check_config(golden, "dspark")
    assert golden.drafter.stage_len == golden.case["drafted_depths"]


def test_texts_nodes_and_acceptance(golden):
    check_texts(golden)


def test_every_tensor_of_every_recorded_round(golden, record, monkeypatch):
    log = Listener(monkeypatch, record(golden.drafter.model))
    check_tensors(golden, log.begin, tensors_of)


def test_the_loop_gives_the_same_text(golden):
    check_loops(golden)


def test_another_penalty_and_fewer_candidates_are_caught(golden):
    check_planted(golden)
