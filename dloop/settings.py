"""What decides a decode besides the models and the prompt: its fields, their checks, and what they are turned into."""

import logging
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from pathlib import Path
from typing import Literal, NamedTuple

from torch import Tensor

from dloop.checkpoint import brief
from dloop.drafters.chain import ChainDrafter
from dloop.drafters.gemma4_config import FAMILY as GEMMA_FAMILY
from dloop.drafters.host import HostDrafter
from dloop.drafters.mtp import FAMILY as MTP_FAMILY
from dloop.errors import UserError
from dloop.gate import AutoName, GateSum
from dloop.judge import PLAIN, Match, Reject, Sampler
from dloop.loop import Limits
from dloop.rules.choose import longest_of
from dloop.sampling import Sampling, fresh_seed
from dloop.targets.hf import HFTarget
from dloop.targets.recurrent import ONE_PATH
from dloop.trees.shape import TreeShape

MOST_DEPTH = 1024  # tokens of a stage
DEPTH_FLAGS = {"eagle3": "draft_depth", MTP_FAMILY: "mtp_k", GEMMA_FAMILY: "mtp_k"}  # what says how many, by family

log = logging.getLogger("dloop")

Verify = Literal["auto", "match", "reject"]
Budget = int | Literal["host"]


class TreeRule(NamedTuple):
    """What a family's published trees are like."""

    first: int  # published --tree-budget
    further: int  # published --stage-tree-budget; 0: a chain
    options: tuple[str, ...]  # flags that shape its trees
    root: int = 0  # nodes of --tree-budget that are no drafts: EAGLE counts the root


NO_TREES = TreeRule(0, 0, ())
DARTREE = TreeRule(0, 0, ("tree_width", "tree_beta"))
TREES = {
    "dflash": TreeRule(0, 64, ("topk_k",)),
    "dspark": DARTREE,
    "domino": DARTREE,
    "eagle3": TreeRule(60, 48, ("topk_k",), root=1),
}
MOST_NODES = 4096  # of one stage's tree
MOST_WIDTH = 1024  # candidates or nodes of one depth


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Everything that decides a decode besides the models and the prompt; see `generate` for the meanings."""

    max_new_tokens: int = 256
    loop_gate: float | AutoName = 1.0
    gate_sum: GateSum = "last"
    max_stages: int = 12
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    verify: Verify = "auto"
    stop_token_ids: Sequence[int] | Literal["model"] = "model"
    tree_budget: Budget = "host"
    stage_tree_budget: Budget = "host"
    topk_k: int = 10
    tree_width: int = 12
    tree_beta: float = -0.2
    draft_depth: int | None = None
    mtp_k: int | None = None
    exact: bool | Literal["auto"] = "auto"
    stop_rule: str | None = None
    gate_head: str | Path | None = None


def check_types(settings: Settings) -> None:
    """Numbers must be numbers: a text or a fraction would go wrong far from here. NumPy's numbers are welcome."""
    for kind, names, what in (
        (Integral, ("max_new_tokens", "max_stages", "top_k", "topk_k", "tree_width"), "a whole number"),
        (Real, ("temperature", "top_p", "tree_beta"), "a number"),
        (Integral | None, ("seed", "draft_depth", "mtp_k"), "a whole number or None"),
    ):
        for name in names:
            value = getattr(settings, name)
            if not isinstance(value, kind) or isinstance(value, bool):
                raise UserError(f"{name}={brief(value)} must be {what}")
    if not (isinstance(settings.exact, bool) or is_word(settings.exact, "auto")):
        raise UserError(f"exact={brief(settings.exact)} must be True, False or 'auto'")


def is_word(value: object, *words: str) -> bool:
    """Whether a value is one of these words; arrays, say, compare otherwise than by one answer."""
    return isinstance(value, str) and value in words


def shaped(drafter: HostDrafter | None, settings: Settings, target: HFTarget) -> HostDrafter | None:
    """The drafter with stages as long, and trees as large, as the settings ask for on this target."""
    if drafter is None:
        return None
    drafter = drafter.with_trees(trees_of(settings, drafter.family, target))
    if not isinstance(drafter, ChainDrafter):
        return drafter
    depth = getattr(settings, DEPTH_FLAGS[drafter.family])
    if depth is None:  # a rule may draft beyond the trained depth
        depth = longest_of(settings.stop_rule, settings.gate_head)
    return drafter if depth is None else drafter.at_depth(operator.index(depth))


def trees_of(settings: Settings, family: str, target: HFTarget) -> TreeShape | None:
    """The trees that the settings ask for; None: every stage is a chain."""
    rule = rule_of(family, target)
    if not (first := budget_of(settings.tree_budget, rule.first)):
        return None
    return TreeShape(
        budget=first - rule.root,
        stage_budget=budget_of(settings.stage_tree_budget, rule.further),
        topk=operator.index(settings.topk_k),
        width=operator.index(settings.tree_width),
        beta=float(settings.tree_beta),
    )


def rule_of(family: str, target: HFTarget) -> TreeRule:
    """The family's trees on this target: by default none where it cannot verify branches."""
    rule = TREES.get(family, NO_TREES)
    return rule if target.forks else rule._replace(first=0, further=0)


def tell_chains(name: str, family: str, target: HFTarget) -> None:
    """Say that a family whose stages are trees drafts chains for this target, where that is so."""
    if TREES.get(family, NO_TREES).first and not rule_of(family, target).first:
        log.warning("%s drafts chains (tree_budget 0), not its trees: %s %s", name, target.name, ONE_PATH)


def budget_of(given: Budget, host: int) -> int:
    """Nodes; "host" is the published default."""
    return host if isinstance(given, str) else operator.index(given)


def sampling_of(settings: Settings) -> Sampling:
    """The law tokens are drawn from; a run without a seed gets a fresh one."""
    seed = fresh_seed() if settings.seed is None else operator.index(settings.seed)
    return Sampling(temperature=settings.temperature, top_k=settings.top_k, top_p=settings.top_p, seed=seed)


def judge_of(
    settings: Settings, sampling: Sampling, drafter: HostDrafter | None = None, sampler: Sampler = PLAIN
) -> Match | Reject:
    """Greedy decoding has one rule, and plain decoding rejects nothing. With a temperature, "auto" is rejection
    sampling where tokens are drafted left to right; DFlash's rows do not see one another's tokens, and drawing them
    would cost acceptance: "match". So are trees. `sampler`: the target's; `drafter` is as `shaped` gives it.
    """
    if drafter is None or sampling.is_greedy or settings.verify == "match":
        return Match(sampling, sampler)
    together = drafter.family == "dflash" or drafter.trees is not None
    return Match(sampling, sampler) if settings.verify == "auto" and together else Reject(sampling, sampler)


def limits_of(settings: Settings, target: HFTarget, drafter: HostDrafter | None) -> Limits:
    """When to stop; "model": the target's own stop tokens. Past either model's last position nothing is drafted."""
    if settings.max_stages < 1:
        raise UserError(f"max_stages={settings.max_stages} must be at least 1")
    reach = drafter.max_positions if drafter else None
    context = target.context if reach is None else min(target.context, reach)
    return Limits(
        max_new_tokens=settings.max_new_tokens,
        stop_ids=stops_of(settings, target),
        max_stages=settings.max_stages,
        context=context,
    )


def stops_of(settings: Settings, target: HFTarget) -> frozenset[int]:
    """The tokens that end a text. Raises UserError for what are no ids of the target."""
    given = settings.stop_token_ids
    if is_word(given, "model"):
        return target.stop_ids
    try:
        stops = {-1 if isinstance(token, str | bool) else operator.index(token) for token in given}
    except (TypeError, ValueError):  # no list, or of things that are no ids; ValueError: of several in one
        stops = {-1}
    if not all(0 <= token < target.vocab_size for token in stops):
        raise UserError(f"stop_token_ids={brief(given)} must be 'model' or a list of ids below {target.vocab_size}")
    return frozenset(stops)


def check_prompt(prompt_ids: Sequence[int] | Tensor, target: HFTarget, max_new_tokens: int) -> list[int]:
    """One prompt as a list of ids that, with the new tokens, fits the target."""
    if isinstance(prompt_ids, bytes | bytearray | memoryview):
        raise UserError(f"prompt_ids is {type(prompt_ids).__name__}, not token ids; decode it to a text first")
    if isinstance(prompt_ids, Tensor) and prompt_ids.shape[:-1] not in ((), (1,)):
        raise UserError(f"prompt_ids of shape {tuple(prompt_ids.shape)} holds several prompts; decode them one by one")
    try:
        given = prompt_ids.flatten().tolist() if isinstance(prompt_ids, Tensor) else prompt_ids
        prompt = [operator.index(token) for token in given]  # NumPy's integers too
    except TypeError as error:
        raise UserError(
            f"prompt_ids must be a list of token ids, not {brief(prompt_ids)}; tokenize text first"
        ) from error
    if not prompt:
        raise UserError("the prompt is empty; give at least one token")
    outside = [token for token in prompt if not 0 <= token < target.vocab_size]
    if outside:
        raise UserError(
            f"prompt token {outside[0]} is outside the vocabulary of {target.name} (0..{target.vocab_size - 1})"
        )
    if max_new_tokens < 1:
        raise UserError(f"max_new_tokens={max_new_tokens} must be at least 1")
    if len(prompt) + max_new_tokens > target.context:
        raise UserError(
            f"a prompt of {len(prompt)} tokens and max_new_tokens={max_new_tokens} exceed the context of {target.name} "
            f"({target.context} positions); shorten the prompt or lower max_new_tokens"
        )
    return prompt
