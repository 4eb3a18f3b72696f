"""EAGLE-3's dynamic tree against numbers of the public original: every node, every tensor. Valid for any case."""

from dataclasses import replace

import pytest
import torch
from block_cases import Golden
from chain_cases import Listener
from torch import Tensor
from tree_cases import check_tensors, check_texts, depths, visibility

import dloop
from dloop.drafters import chain
from dloop.drafters.host import HostDrafter
from dloop.trees.shape import TreeShape
from dloop.trees.tree import keep_best


def shaped(drafter: HostDrafter, case: dict) -> HostDrafter:
    trees = TreeShape(budget=case["nodes_without_root"], topk=case["top_k"])
    return drafter.with_trees(trees).at_depth(case["drafted_levels"])


@pytest.fixture(scope="module")
def golden(goldens) -> Golden:
    golden = Golden.read(goldens / "eagle3_tree")
    return replace(golden, drafter=shaped(golden.drafter, golden.case))


def test_the_config_says_what_the_case_says(golden):
    case, config = golden.case, golden.drafter.config
    assert golden.drafter.family == "eagle3" and config.draft_vocab_size == case["draft_vocab_size"]
    assert list(golden.drafter.taps) == case["target_feature_layers"]["decoder_layer_outputs"]
    assert golden.drafter.stage_len == case["drafted_levels"] == case["depth_argument"] + 1
    assert case["nodes_without_root"] == case["total_token"] - 1


def test_texts_nodes_and_acceptance(golden):
    check_texts(golden)


class Noting(Listener):
    """Notes the pools that trees are cut from, too."""

    def watch(self, monkeypatch) -> "Noting":
        self.levels, self.pools = [], []
        made, pooled = chain.beam, chain.candidates
        monkeypatch.setattr(chain, "beam", lambda *given: self.levels.append(made(*given)) or self.levels[-1])
        monkeypatch.setattr(chain, "candidates", lambda *given: self.pools.append(pooled(*given)) or self.pools[-1])
        return self

    def begin(self) -> "Noting":
        """A new text."""
        for notes in (self.rows, self.levels, self.pools):
            notes.clear()
        return self


def leaf_paths(parents: list[int], most: int) -> Tensor:
    """One row a leaf, root first, padded with -1."""
    rows = []
    for leaf in sorted(set(range(len(parents))) - set(parents)):
        path = [leaf]
        while parents[path[0]] >= 0:
            path.insert(0, parents[path[0]])
        rows.append(path + [-1] * (most - len(path)))
    return torch.tensor(rows)


def tree_tensors(golden: Golden, decoded, log: Noting, index: int) -> dict[str, Tensor]:
    """The pool, what was selected, the tree."""
    draft, pool, levels = decoded.rounds[index].draft, log.pools[index], log.levels[index]
    width = levels[0].width
    numbered = keep_best(
        pool._replace(tokens=list(range(len(pool.tokens)))), pool.scores, golden.case["nodes_without_root"]
    )
    return {
        "candidates.scores": torch.tensor(pool.scores),
        "candidates.tokens": torch.tensor(pool.tokens),
        "candidates.parents": torch.tensor([parent + 1 for parent in pool.parents[::width]]),
        "selected.candidate_index": torch.tensor(numbered.tokens),
        "selected.scores": torch.tensor(numbered.scores),
        "tree.tokens": torch.tensor(draft.tokens),
        "tree.parents": torch.tensor(draft.parents),
        "tree.depths": torch.tensor(depths(draft)),
        "tree.mask": visibility(draft),
        "tree.retrieve_indices": leaf_paths(draft.parents, max(depths(draft)) + 1),
    }


def tensors_of(golden: Golden, decoded, trace, log: Noting, index: int) -> dict[str, Tensor]:
    """A round's tensors under their names in the file. The row that read a round's anchor is made anew with the next
    round's rows, so of those only the last ones are new.
    """
    r, model = decoded.rounds[index], golden.drafter.model
    depth, taps = golden.drafter.stage_len, trace.fed[index].taps
    first, *steps = log.rows[index * depth : (index + 1) * depth]
    count, asked, seen = len(taps), trace.asked[index], trace.answered[index]
    logits = model.logits(first.out[-1], golden.drafter.vocabulary)
    found = {
        "target_features": taps,
        "input_ids_all": torch.tensor([*trace.text[: r.context_len], r.anchor]),
        "kv_len": first.positions[-count:][:1],
        "fc_out": first.states[-count:],
        "first.draft_input_ids": log.tokens(first)[-count:],
        "first.hidden_out": first.out[-count:],
        "first.logits_last_row": logits,
        "first.logprobs_last_row": logits.log_softmax(-1),
        "verify.logits": seen.logits,
        "verify.argmax": seen.logits.argmax(-1),
        "verify.position_ids": torch.tensor(asked.position),
        "verify.accepted_nodes": torch.tensor([0, *r.path]),
    }
    mask, width = torch.zeros(1, 0), golden.case["top_k"]
    for step, rows in enumerate(steps, 1):
        level = log.levels[index][step - 1]
        mask = torch.cat([mask[level.kept // level.width], torch.eye(width)], 1)
        found |= {
            f"depth{step}.draft_input_ids": log.tokens(rows),
            f"depth{step}.input_hidden": rows.states,
            f"depth{step}.position_ids": rows.positions,
            f"depth{step}.hidden_out": rows.out,
            f"depth{step}.logits": model.logits(rows.out, golden.drafter.vocabulary),
            f"depth{step}.tree_mask": mask,
        }
    return found | tree_tensors(golden, decoded, log, index)


def test_every_tensor_of_every_recorded_round(golden, monkeypatch):
    drafter = shaped(golden.fresh_drafter(), golden.case)
    log = Noting(drafter).watch(monkeypatch)
    check_tensors(replace(golden, drafter=drafter), log.begin, tensors_of)


def test_the_loop_gives_the_same_text(golden):
    case = golden.case
    shape = {"tree_budget": case["total_token"], "topk_k": case["top_k"], "draft_depth": case["drafted_levels"]}
    for sample in golden.samples:
        rules = {"max_new_tokens": sample["max_new_tokens"], "stop_token_ids": sample["stop_ids"], "max_stages": 3}
        for gate, nodes in ((-3.0, 12), (float("-inf"), 12), (float("-inf"), 0)):
            looped = dloop.generate(
                golden.target,
                golden.drafter,
                sample["prompt_ids"],
                loop_gate=gate,
                stage_tree_budget=nodes,
                **shape,
                **rules,
            )
            assert looped.tokens == sample["output_ids"]


def test_a_narrower_beam_is_caught(golden):
    """Planted: one child a node fewer."""
    drafter = golden.drafter.with_trees(replace(golden.drafter.trees, topk=golden.case["top_k"] - 1))
    with pytest.raises(AssertionError):
        check_texts(replace(golden, drafter=drafter))
