"""A drafter taken in as it is: what loading would refuse is noted, and as much as can still run is run."""

from dataclasses import dataclass
from pathlib import Path

import torch

from dloop import checkpoint
from dloop.detect import BLOCK_FAMILIES, check_heads, detect_family
from dloop.diagnosis.expected import expected_of
from dloop.diagnosis.findings import Cause, Expected, Finding
from dloop.diagnosis.tensors import check_tensors
from dloop.drafters.block import BlockDrafter, BlockModel
from dloop.drafters.config import BlockConfig
from dloop.drafters.families import READERS, build, named
from dloop.errors import UserError
from dloop.misfits import misfits
from dloop.own_vocabulary import own_vocabulary
from dloop.targets.hf import HFTarget
from dloop.vocabulary import narrowed

CAUSES: dict[str, Cause] = {  # of a misfit, by its key in config.json
    "target_layer_ids": "taps",
    "rope_theta": "rope_theta",
    "mask_token_id": "mask_token_id",
}
RUNNABLE = ("target_layer_ids", "rope_theta")  # misfits with which a drafter can still be measured


@dataclass(frozen=True, kw_only=True)
class Intake:
    """A checkpoint taken in. `drafter` is None where it cannot run at all, for the reasons among the findings."""

    drafter: BlockDrafter | None
    findings: list[Finding]
    expected: Expected | None


def take_in(name: str, folder: Path, target: HFTarget) -> Intake:
    """Read a drafter's folder. Raises UserError where it is no drafter, or of no known family."""
    raw = checkpoint.read_json(folder / "config.json", name)
    family = detect_family(raw, name, lambda: checkpoint.tensor_names(folder))
    if family not in BLOCK_FAMILIES:
        raise UserError(
            f"{name} is a drafter of {family}; block drafters are examined so far: {', '.join(BLOCK_FAMILIES)}; "
            "dloop check certifies any"
        )
    try:
        config = READERS[family](raw, f"{name}/config.json")
        assert isinstance(config, BlockConfig)
        expected = expected_of(raw, config, name)
    except UserError as error:
        return Intake(drafter=None, findings=[refusal("config", error)], expected=None)
    found, runs = check_config(config, target, name)
    if not runs:
        return Intake(drafter=None, findings=found, expected=expected)
    try:
        drafter = drafter_of(config, family, folder, target, name)
    except UserError as error:
        return Intake(drafter=None, findings=[refusal("weights", error), *found], expected=expected)
    except TensorFaultsError as faults:
        return Intake(drafter=None, findings=[*faults.findings, *found], expected=expected)
    found += own_vocabulary_findings(drafter, target)
    return Intake(drafter=drafter, findings=found + check_tensors(drafter, raw), expected=expected)


def check_config(config: BlockConfig, target: HFTarget, name: str) -> tuple[list[Finding], bool]:
    """(what does not fit the target, whether the drafter can run on it all the same)."""
    found, runs = list[Finding](), True
    for misfit in misfits(config, target, name):
        what, _, remedy = misfit.message.rpartition("; ")
        finding = Finding(
            severity="fault",
            cause=CAUSES.get(misfit.key, "pair"),
            what=f"{misfit.key} in config.json does not fit the target",
            evidence=f"{what}; loading refuses it",
            remedy=remedy,
        )
        found.append(finding)
        runs = runs and misfit.key in RUNNABLE
    taps = config.target_layer_ids
    return found, runs and bool(taps) and all(-1 <= layer < target.num_layers for layer in taps)


class TensorFaultsError(Exception):
    """Weights that do not fit their config."""

    def __init__(self, findings: list[Finding]) -> None:
        super().__init__()
        self.findings = findings


def drafter_of(config: BlockConfig, family: str, folder: Path, target: HFTarget, name: str) -> BlockDrafter:
    """The drafter, loaded as `load_drafter` loads. Raises TensorFaultsError or UserError for unsound weights."""
    tensors = named(config, checkpoint.read_tensors(folder), name)
    check_heads(family, tensors, name)
    vocabulary = own_vocabulary(config, tensors, target, name)
    with torch.device("meta"):
        model = build(config)
    assert isinstance(model, BlockModel)
    faults = {words: names for words, names in checkpoint.tensor_faults(model, tensors).items() if names}
    if faults:
        raise TensorFaultsError([tensor_finding(words, names, len(tensors)) for words, names in faults.items()])
    checkpoint.load_strictly(model, tensors, name)
    model.to(device=target.device, dtype=target.dtype).eval().requires_grad_(False)
    return BlockDrafter(
        name=name, family=family, model=model, vocabulary=narrowed(vocabulary, model.kept), folder=folder
    )


def tensor_finding(words: str, names: list[str], count: int) -> Finding:
    """Tensors that are missing, unexpected or of another shape."""
    shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    return Finding(
        severity="fault",
        cause="weights",
        what=f"the checkpoint {words} tensors: {shown}",
        evidence=f"{len(names)} of {count} stored tensors {words.removeprefix('is ').removeprefix('has ')}",
        remedy="correct the names in model.safetensors or the sizes in config.json, or fetch the checkpoint again",
    )


def refusal(cause: Cause, error: UserError) -> Finding:
    """What loading says, as a finding."""
    what, _, remedy = str(error).rpartition("; ")
    told = what or str(error)
    return Finding(severity="fault", cause=cause, what=told, evidence="loading refuses it", remedy=remedy or told)


def own_vocabulary_findings(drafter: BlockDrafter, target: HFTarget) -> list[Finding]:
    """A stored embedding and head are frozen copies of the target's; a difference is worth a warning."""
    own, shared = drafter.vocabulary, narrowed(target.vocabulary, drafter.model.kept)
    found: list[Finding] = []
    for name, ours, theirs in (
        ("embed_tokens.weight", own.embedding, shared.embedding),
        ("lm_head.weight", own.head, shared.head),
    ):
        if ours is not theirs and not torch.equal(ours, theirs):
            rows = int((ours != theirs).any(1).sum())  # sync
            apart = float((ours.float() - theirs.float()).abs().max())  # sync
            found.append(
                Finding(
                    severity="warning",
                    cause="vocabulary",
                    what=f"{name} is not the target's, of which it should be a copy",
                    evidence=f"{rows} of {len(ours)} rows differ, by {apart:.3g} at most",
                    remedy="remove embed_tokens.weight and lm_head.weight, so that the target's are used; "
                    "or is this drafter for another release of the target?",
                )
            )
    return found


def without(found: list[Finding], cause: Cause) -> list[Finding]:
    """The other findings; a fault that a probe has confirmed is told once, with its figures."""
    causes = {"taps", "tap_order"} if cause in ("taps", "tap_order") else {cause}
    return [finding for finding in found if finding.cause not in causes]
