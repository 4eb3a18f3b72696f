"""From --stop-rule NAME:param=value,... to a rule for each sequence; what cannot be honoured is refused by name."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from dloop.checkpoint import brief
from dloop.drafters.block import BlockDrafter
from dloop.drafters.config import DSparkConfig
from dloop.drafters.host import HostDrafter
from dloop.errors import UserError
from dloop.rules.headed import PACER, AdaEAGLE, ConfidenceCut, DISCOHead, SpecDecPP
from dloop.rules.heads import Head, HeadKind, load_head, read_config
from dloop.rules.parameter import read_parameters
from dloop.rules.plain import DDD, DISCO, SVIP, AdaEDL, BiLD, LLMCad
from dloop.stop import StopRule

RULES: dict[str, type[StopRule]] = {
    "bild": BiLD,
    "svip": SVIP,
    "adaedl": AdaEDL,
    "llmcad": LLMCad,
    "specdec++": SpecDecPP,
    "disco": DISCO,
    "disco-ffn": DISCOHead,
    "adaeagle": AdaEAGLE,
    "ddd": DDD,
    "pacer": PACER,
    "dspark": ConfidenceCut,
}
HEAD_OF: dict[str, HeadKind] = {
    "specdec++": "specdec++",
    "disco-ffn": "disco",
    "adaeagle": "adaeagle",
    "pacer": "pacer",
}
NEEDS_CONFIDENCE = ("dspark",)  # SpecDec++ takes it where there is no head of its own


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A rule that was asked for."""

    name: str
    values: dict[str, object]

    @property
    def longest(self) -> int | None:
        """Most tokens of an autoregressive drafter's stage; None: as many as the drafter's own."""
        kind = RULES[self.name]
        return cast("int | None", self.values.get("longest", getattr(kind, "longest", None)))


def read_choice(stop_rule: object) -> Choice | None:
    """Raises UserError for what names no rule, or no parameter of it."""
    if stop_rule is None:
        return None
    if not isinstance(stop_rule, str):
        raise UserError(f"stop_rule={brief(stop_rule)} must be a text such as 'svip' or 'svip:h=0.3', or None")
    name, _, text = stop_rule.partition(":")
    if name not in RULES:
        raise UserError(f"stop_rule={brief(stop_rule)} is not known; choose one of {', '.join(RULES)}")
    return Choice(name=name, values=read_parameters(RULES[name], name, text))


def longest_of(stop_rule: object, gate_head: object) -> int | None:
    """The depth that a rule gives autoregressive drafters; None: their own. AdaEAGLE's is what it was trained for."""
    choice = read_choice(stop_rule)
    if choice is None or choice.longest is not None or choice.name != "adaeagle" or gate_head is None:
        return None if choice is None else choice.longest
    return read_config(folder_of(gate_head)).longest


def maker_of(stop_rule: object, gate_head: object, drafter: HostDrafter | None) -> Callable[[], StopRule] | None:
    """What makes each sequence's rule; None: there is none. `drafter` is as it will draft.

    Raises UserError for what the drafter cannot honour.
    """
    choice = read_choice(stop_rule)
    if choice is None:
        if gate_head is not None:
            raise UserError(f"gate_head={brief(str(gate_head))} has no stop_rule that reads it; leave it out")
        return None
    head = head_for(choice, gate_head, drafter)
    if drafter is None:
        return None
    refuse_pair(choice, drafter, head)
    kind, values = RULES[choice.name], choice.values
    given = values if head is None else {**values, "head": head}
    _ = kind(**given)  # a file that it names is read now
    return lambda: kind(**given)


def head_for(choice: Choice, gate_head: object, drafter: HostDrafter | None) -> Head | None:
    """The head that the rule reads. Raises UserError where one is missing, of another kind, or of no use."""
    kind = HEAD_OF.get(choice.name)
    if gate_head is None:
        if kind is not None and drafter is not None and not (choice.name == "specdec++" and has_confidence(drafter)):
            raise UserError(
                f"stop_rule {choice.name} reads a trained head; give --gate-head FOLDER (gate_head=), written by dloop "
                f"train gate-head --kind {kind}"
            )
        return None
    folder = folder_of(gate_head)
    if kind is None:
        raise UserError(f"gate_head={brief(str(gate_head))} is of no use to stop_rule {choice.name}; leave it out")
    found = read_config(folder)
    if found.kind != kind:
        raise UserError(f"gate_head {folder} is a head of {found.kind}, stop_rule {choice.name} reads one of {kind}")
    if drafter is None:
        return None
    if (found.family, found.hidden_size) != (drafter.family, drafter.config.hidden_size):
        raise UserError(
            f"gate_head {folder} was trained on {found.family} states of {found.hidden_size} numbers, {drafter.name} "
            f"is {drafter.family} with {drafter.config.hidden_size}; train one on this drafter"
        )
    return load_head(folder, drafter.vocabulary.head.device)


def refuse_pair(choice: Choice, drafter: HostDrafter, head: Head | None) -> None:
    """Raises UserError where this drafter's stages cannot end where the rule says."""
    if not drafter.obeys_rules:
        raise UserError(f"stop_rule={choice.name} is not offered on the fast engine; use --engine twin (engine='twin')")
    if choice.name in NEEDS_CONFIDENCE and not has_confidence(drafter):
        raise UserError(
            f"stop_rule {choice.name} reads a confidence head, which {drafter.name} ({drafter.family}) does not have; "
            "use a DSpark drafter with one, or another rule"
        )
    if not isinstance(drafter, BlockDrafter):
        return
    if drafter.trees is not None:
        raise UserError(f"stop_rule={choice.name} cuts chains of {drafter.family}; use tree_budget 0 with it")
    if "longest" in choice.values:
        raise UserError(
            f"stop_rule {choice.name}: longest is for autoregressive drafters, and a stage of {drafter.family} is its "
            "block; leave it out"
        )
    sts = choice.values.get("sts")
    if sts is not None and len(ConfidenceCut(threshold=0.0, sts=cast(Path, sts)).temperatures) != drafter.stage_len:
        raise UserError(f"stop_rule dspark: sts={sts} is not for stages of {drafter.stage_len} tokens; fit it anew")


def has_confidence(drafter: HostDrafter) -> bool:
    """Whether its rows bring a confidence logit."""
    return isinstance(drafter.config, DSparkConfig) and drafter.config.confidence_head


def folder_of(gate_head: object) -> Path:
    """Raises UserError for what is no path."""
    if not isinstance(gate_head, str | Path):
        raise UserError(f"gate_head={brief(gate_head)} must be the folder of a head, or None")
    if not os.path.isdir(gate_head):  # no for "" too, which Path takes for the folder where one stands
        raise UserError(f"gate_head={brief(str(gate_head))} is no folder; give one that dloop train gate-head wrote")
    return Path(gate_head)
