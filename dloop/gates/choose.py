"""A gate from its name: a number is the paper's fixed gate, `auto` one that learns and shares what it learns."""

from numbers import Real
from typing import get_args

import torch

from dloop.checkpoint import brief
from dloop.drafters.host import HostDrafter
from dloop.errors import UserError
from dloop.gate import AutoName, FixedGate, Gate
from dloop.settings import Settings, is_word
from dloop.targets.hf import HFTarget
from dloop.types import GREEDY_BELOW

AUTO_NAMES = get_args(AutoName)


def check_gate(settings: Settings) -> None:
    """Raises UserError for what is no gate."""
    check_word(settings.loop_gate, settings.gate_sum)


def check_word(gate: object, gate_sum: object) -> None:
    """Raises UserError for what is neither a number nor a gate's name, and for a sum that the gate does not read."""
    if is_word(gate, *AUTO_NAMES):
        if gate_sum != "last":
            raise UserError(f"gate_sum={brief(gate_sum)} means nothing to loop_gate={gate!r}; leave it out")
    elif isinstance(gate, bool) or not isinstance(gate, Real):
        raise UserError(f"loop_gate={brief(gate)} must be a number or one of {', '.join(AUTO_NAMES)}")


def gate_of(settings: Settings, target: HFTarget, drafter: HostDrafter | None, *, teaches: bool = True) -> Gate:
    """A gate for one sequence; `drafter` is as `shaped` gives it. Without one no gate is ever asked.

    Gates that learn share what the drafter's earlier gates learned on this target, at about this temperature. One that
    does not teach reads it all the same: a text whose logits are bent says little about others.
    """
    if not isinstance(settings.loop_gate, str):
        return FixedGate(settings.loop_gate, settings.gate_sum)
    if drafter is None:
        return FixedGate()
    key = key_of(settings, target, drafter)
    return drafter.learned.at(settings.loop_gate, key, drafter.stage_len).gate(teaches=teaches)


def key_of(settings: Settings, target: HFTarget, drafter: HostDrafter) -> str:
    """For what gates may share what they learned."""
    device = torch.cuda.get_device_name(target.device) if target.device.type == "cuda" else target.device.type
    greedy = settings.temperature < GREEDY_BELOW
    law = "T 0" if greedy else f"T {max(1, round(4 * settings.temperature)) / 4:g}, {settings.verify}"
    trees = "" if drafter.trees is None else f", trees {drafter.trees.budget}+{drafter.trees.stage_budget}"
    rule = "".join(f", {one}" for one in (settings.stop_rule, settings.gate_head) if one is not None)
    where = f"{target.engine}, {str(target.dtype).removeprefix('torch.')}, {device}"
    return f"{drafter.name} | {target.name} | {where} | {law} | stages of {drafter.stage_len}{trees}{rule}"
