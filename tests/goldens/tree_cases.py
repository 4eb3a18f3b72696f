"""What the golden tests of tree drafting share: whole texts, every node, masks and positions. Valid for any case."""

from collections.abc import Callable
from dataclasses import replace

import torch
from block_cases import Golden, Trace, run, same
from torch import Tensor

from dloop.testing import Decoded
from dloop.trees.shape import TreeShape
from dloop.types import Draft


def read(folder, shape_of: Callable[[dict], TreeShape]) -> Golden:
    """The case, its drafter with the case's trees."""
    golden = Golden.read(folder)
    return replace(golden, drafter=golden.drafter.with_trees(shape_of(golden.case)))


def depths(draft: Draft) -> list[int]:
    return [position - draft.positions[0] for position in draft.positions]


def path_scores(draft: Draft) -> list[float]:
    """Summed log-probabilities from the root, which has 0."""
    scores = [0.0]
    for parent, logp in zip(draft.parents[1:], draft.logp[1:], strict=True):
        scores.append(scores[parent] + logp)
    return scores


def visibility(draft: Draft) -> Tensor:
    """1 = ancestor or self, from the parents alone."""
    seen = torch.eye(len(draft.parents))
    for node, parent in enumerate(draft.parents[1:], 1):
        seen[node] += seen[parent]
    return seen


def check_config(golden: Golden, family: str) -> None:
    case, config = golden.case, golden.drafter.config
    assert golden.drafter.family == family
    assert config.block_size == case["block_size"] and config.mask_token_id == case["mask_token_id"]
    assert list(config.target_layer_ids) == case["target_layer_ids"]


def public_rounds(decoded: Decoded, sample: dict) -> int:
    """The original may run one surplus round after the output is complete."""
    surplus = len(sample["rounds"]) - len(decoded.rounds)
    complete = len(decoded.tokens) == sample["max_new_tokens"] or decoded.tokens[-1] in sample["stop_ids"]
    assert surplus == 0 or (surplus == 1 and complete)
    return len(decoded.rounds)


def is_whole(golden: Golden, sample: dict, drafted_from: int) -> bool:
    """Whether the original drafts a whole block here: its buffer ends budget + 1 tokens after the text."""
    case = golden.case
    return drafted_from + case.get("block_size", 0) <= sample["max_new_tokens"] + case.get("tree_budget", 0) + 1


def check_texts(golden: Golden, tolerance: float = 1e-4) -> None:
    """Texts; of every round the nodes, their order, parents, depths, scores, what was accepted and what follows."""
    for number, sample in enumerate(golden.samples):
        decoded, _ = run(golden, golden.drafter, sample)
        assert decoded.tokens == sample["output_ids"] == sample["ar_output_ids"], f"sample {number}"
        start = 0
        for index in range(public_rounds(decoded, sample)):
            if not is_whole(golden, sample, start):
                break
            start += decoded.rounds[index].accepted + 1
            r, expected, where = decoded.rounds[index], sample["rounds"][index], f"sample {number}, round {index}"
            root = [] if "root_token" in expected else [r.anchor]
            assert root or r.anchor == expected["root_token"], where
            assert [*root, *r.drafted] == expected["node_tokens"], where
            assert r.draft.parents == expected["parents"], where
            assert depths(r.draft)[1:] == expected.get("node_depths", expected.get("depths", [])[1:]), where
            if "node_scores" in expected:
                found = torch.tensor(path_scores(r.draft)[1:])
                assert (found - torch.tensor(expected["node_scores"])).abs().max() < tolerance, where
            assert [0, *r.path] == expected["accepted_nodes"], where
            assert r.bonus in (None, expected["next_token"]), where
            assert r.accepted + 1 == sample["acceptance_lengths"][index], where


def shared_tensors(decoded: Decoded, trace: Trace, index: int) -> dict[str, Tensor]:
    """What every tree has, under the names of the block families' files, from what really passed."""
    r, asked, seen = decoded.rounds[index], trace.asked[index], trace.answered[index]
    assert asked.parent == r.draft.parents
    return {
        "target_features": trace.fed[index].taps,
        "node_tokens": torch.tensor(r.drafted),
        "node_depths": torch.tensor(depths(r.draft)[1:]),
        "parents": torch.tensor(r.draft.parents),
        "node_scores": torch.tensor(path_scores(r.draft)),
        "visibility": visibility(r.draft).byte(),
        "allowed": torch.cat([torch.ones(len(asked), r.context_len), visibility(r.draft)], 1).byte(),
        "verify_input_ids": torch.tensor(asked.token),
        "verify_position_ids": torch.tensor(asked.position),
        "verify_logits": seen.logits,
        "verify_argmax": seen.logits.argmax(-1),
        "accepted_nodes": torch.tensor([0, *r.path]),
        "next_token": torch.tensor([r.bonus]),
    }


def check_tensors(golden: Golden, listen: Callable, tensors_of: Callable) -> None:
    """Every tensor of every recorded round, and none left out; `listen` is called before each text."""
    compared, wrong = 0, []
    for number, sample in enumerate(golden.samples):
        log = listen()
        decoded, trace = run(golden, golden.drafter, sample)
        trace.text = [*sample["prompt_ids"], *decoded.tokens]
        for index in range(len(decoded.rounds)):
            prefix = f"sample{number}.round{index + 1}."
            expected = {key.removeprefix(prefix): t for key, t in golden.tensors.items() if key.startswith(prefix)}
            found = tensors_of(golden, decoded, trace, log, index) if expected else {}
            for name, tensor in expected.items():
                compared += 1
                if not same(found[name], tensor):
                    wrong.append(prefix + name)
    assert wrong == [], wrong
    assert compared == len(golden.tensors), "a recorded tensor was not compared"
