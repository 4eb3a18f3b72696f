"""What the golden tests of DARTree share: its shape, and the supertree that a round's nodes are kept from."""

from dataclasses import replace

import pytest
import torch
from block_cases import Golden
from torch import Tensor
from torch.nn import functional as F
from tree_cases import check_texts, shared_tensors

import dloop
from dloop.drafters import path
from dloop.trees.beam import Level
from dloop.trees.shape import TreeShape
from dloop.trees.tree import Tree, keep_best


def shape_of(case: dict) -> TreeShape:
    return TreeShape(
        budget=case["tree_budget"],
        width=case["tree_width"],
        beta=case["tree_beta"],
        candidates=case["candidate_k"],
        expansion=case["expansion_k"],
    )


class Listener:
    """Notes what the policies pass on, round by round; they still do their work."""

    def __init__(self, monkeypatch, recorder) -> None:
        self.recorder = recorder
        self.levels: list[list[Level]] = []
        self.pools: list[Tree] = []
        made, pruned = path.beam, path.prune

        def beam(*given) -> list[Level]:
            self.levels.append(made(*given))
            return self.levels[-1]

        def prune(tree: Tree, *given) -> Tree:
            self.pools.append(tree)
            return pruned(tree, *given)

        monkeypatch.setattr(path, "beam", beam)
        monkeypatch.setattr(path, "prune", prune)

    def begin(self) -> "Listener":
        """A new text."""
        self.recorder.staged.clear()
        self.levels.clear()
        self.pools.clear()
        return self


def tensors_of(golden: Golden, decoded, trace, log: Listener, index: int) -> dict[str, Tensor]:
    r, drafter, case = decoded.rounds[index], golden.drafter, golden.case
    hidden, levels, pool = log.recorder.staged[index][2], log.levels[index], log.pools[index]
    ids = torch.tensor([r.anchor] + [drafter.config.mask_token_id] * (drafter.config.block_size - 1))
    priority = [score + case["tree_beta"] * depth for score, depth in zip(pool.scores, pool.depths, strict=True)]
    numbered = keep_best(pool._replace(tokens=list(range(len(pool.tokens)))), priority, case["tree_budget"])
    found = shared_tensors(decoded, trace, index) | {
        "draft_input_ids": ids,
        "draft_hidden": hidden,
        "base_logits": F.linear(drafter.model.predicting(hidden), drafter.vocabulary.head),
        "supertree.tokens": torch.tensor(pool.tokens),
        "supertree.depths": torch.tensor(pool.depths),
        "supertree.parents": torch.tensor([-1, *(parent + 1 for parent in pool.parents)]),
        "supertree.scores": torch.tensor([0.0, *pool.scores]),
        "supertree.kept_indices": torch.tensor(numbered.tokens) + 1,
    }
    for depth, level in enumerate(levels, 1):
        found |= {
            f"depth{depth}.parent_nodes": torch.tensor(
                [0] if depth == 1 else [node + 1 for node, d in enumerate(pool.depths) if d == depth - 1]
            ),
            f"depth{depth}.candidate_ids": level.tokens.view(-1, level.width),
            f"depth{depth}.candidate_scores": level.logp.view(-1, level.width),
        }
    return found


def check_loops(golden: Golden) -> None:
    """Further stages as chains and as trees, always and at times."""
    case = golden.case
    for sample in golden.samples:
        rules = {"max_new_tokens": sample["max_new_tokens"], "stop_token_ids": sample["stop_ids"], "max_stages": 3}
        rules |= {name: case[name] for name in ("tree_budget", "tree_width", "tree_beta")}
        for gate, nodes in ((-3.0, 0), (float("-inf"), 0), (float("-inf"), 12)):
            looped = dloop.generate(
                golden.target, golden.drafter, sample["prompt_ids"], loop_gate=gate, stage_tree_budget=nodes, **rules
            )
            assert looped.tokens == sample["output_ids"]


def check_planted(golden: Golden) -> None:
    """Planted: another penalty, fewer candidates."""
    for change in ({"beta": -0.5}, {"candidates": 8}):
        drafter = golden.drafter.with_trees(replace(golden.drafter.trees, **change))
        with pytest.raises(AssertionError):
            check_texts(replace(golden, drafter=drafter))
