"""What a decode is refused for before anything runs: by name, with the reason and the way out; nothing is ignored."""

import math
import operator
from typing import get_args

from dloop.checkpoint import brief
from dloop.drafters.host import HostDrafter
from dloop.errors import UserError
from dloop.gate import GateSum
from dloop.gates.choose import check_gate
from dloop.misfits import check_pair
from dloop.settings import (
    DEPTH_FLAGS,
    MOST_DEPTH,
    MOST_NODES,
    MOST_WIDTH,
    TREES,
    Settings,
    Verify,
    budget_of,
    check_types,
    is_word,
    rule_of,
)
from dloop.targets.hf import HFTarget
from dloop.targets.recurrent import NO_BRANCHES
from dloop.types import GREEDY_BELOW


def check_request(target: HFTarget, drafter: HostDrafter | None, settings: Settings) -> None:
    """Raises UserError for what is no model, and for settings that these models cannot honour."""
    check_loaded(target, drafter, settings)
    check_types(settings)
    check_gate(settings)
    refuse_unsupported(settings, target, drafter)
    if drafter is not None:
        check_pair(drafter.config, target, drafter.name)  # loaded for one target, handed another


def check_loaded(target: object, drafter: object, settings: object) -> None:
    """Raises UserError where a name stands for what must be loaded."""
    if not isinstance(target, HFTarget):
        raise UserError(f"target={target!r:.60} must be a target that is loaded; give load_target(...)")
    if not isinstance(drafter, HostDrafter | None):
        raise UserError(
            f"drafter={drafter!r:.60} must be a drafter that is loaded, or None; give load_drafter(..., target)"
        )
    if not isinstance(settings, Settings):
        raise UserError(f"settings={settings!r:.60} must be Settings(...)")


def refuse_unsupported(settings: Settings, target: HFTarget, drafter: HostDrafter | None) -> None:
    """Options that nothing here can honour are refused by name, never ignored."""
    refuse_trees(settings)
    refuse_branches(settings, target)
    if drafter is not None:
        refuse_trees_of(settings, drafter.family, target)
    refuse_depth(settings, drafter)
    for name, words in (("verify", get_args(Verify)), ("gate_sum", get_args(GateSum))):
        if not is_word(getattr(settings, name), *words):
            raise UserError(f"{name}={brief(getattr(settings, name))} is not known; choose one of {', '.join(words)}")
    if settings.exact is True and not target.is_exact:
        raise UserError(
            f"exact=True needs the fast path's kernels (bfloat16 on a Hopper GPU or newer); {target.name} runs in "
            f"{target.dtype} on {target.device} on the {target.engine} engine: use exact='auto', or dtype float32"
        )


def refuse_branches(settings: Settings, target: HFTarget) -> None:
    """Raises UserError for a tree that was asked for, on a target that follows one path."""
    for name in ("tree_budget", "stage_tree_budget"):
        if (nodes := budget_of(getattr(settings, name), 0)) and not target.forks:
            raise UserError(f"{name}={nodes}: {target.name} {NO_BRANCHES}")


def refuse_trees(settings: Settings) -> None:
    """Raises UserError for a tree that nobody could draft."""
    for name in ("tree_budget", "stage_tree_budget"):
        value = getattr(settings, name)
        try:
            count = -1 if isinstance(value, bool) else operator.index(value)
        except TypeError:
            count = -1
        if not is_word(value, "host") and not 0 <= count <= MOST_NODES:
            raise UserError(
                f"{name}={brief(value)} must be 'host' or a number of nodes from 0 (a chain) to {MOST_NODES}"
            )
    for name in ("topk_k", "tree_width"):
        if not 1 <= getattr(settings, name) <= MOST_WIDTH:
            raise UserError(f"{name}={getattr(settings, name)} must be at least 1 and at most {MOST_WIDTH}")
    if not (settings.tree_beta <= 0 and math.isfinite(settings.tree_beta)):
        raise UserError(f"tree_beta={settings.tree_beta} must be at most 0: a deeper node may not outrank its parent")


def refuse_trees_of(settings: Settings, family: str, target: HFTarget) -> None:
    """Raises UserError for tree settings that do not fit the family, or one another."""
    rule = rule_of(family, target)
    first = budget_of(settings.tree_budget, rule.first)
    if first and family not in TREES:
        raise UserError(f"tree_budget={first}: trees are not offered for {family}; use 0 or 'host' (a chain)")
    if 0 < first <= rule.root:
        raise UserError(
            f"tree_budget={first} counts the root for {family}; use 0 (a chain) or {rule.root + 1} and more"
        )
    if not first and budget_of(settings.stage_tree_budget, 0):
        raise UserError(
            f"stage_tree_budget={settings.stage_tree_budget}: further stages are trees only where the first one is, "
            f"and tree_budget is 0 for {family}; set tree_budget too"
        )
    for name in ("topk_k", "tree_width", "tree_beta"):
        if getattr(settings, name) != getattr(Settings, name) and not (first and name in rule.options):
            where = f"{family} with tree_budget 0" if name in rule.options else family
            raise UserError(f"{name}={getattr(settings, name)} does not apply to {where}; leave it out")
    if first and settings.verify == "reject" and settings.temperature >= GREEDY_BELOW:
        raise UserError(
            f"verify='reject' needs chains, and tree_budget is {first} for {family}; use 'match' or tree_budget 0"
        )


def refuse_depth(settings: Settings, drafter: HostDrafter | None) -> None:
    """Raises UserError for a depth that no drafter has, or not this one; plain decoding has none and ignores it."""
    for flag in sorted(set(DEPTH_FLAGS.values())):
        depth = getattr(settings, flag)
        if depth is None:
            continue
        if not 1 <= depth <= MOST_DEPTH:
            raise UserError(f"{flag}={depth} must be at least 1 and at most {MOST_DEPTH}")
        if drafter is not None and DEPTH_FLAGS.get(drafter.family) != flag:
            raise UserError(f"{flag}={depth} does not apply to {drafter.family}; leave it out")
