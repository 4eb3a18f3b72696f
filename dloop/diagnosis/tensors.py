"""Values of a drafter's weights that no training leaves behind."""

from collections.abc import Iterator, Mapping
from typing import cast

import torch
from torch import Tensor

from dloop.diagnosis.findings import Finding, Severity
from dloop.drafters.block import BlockDrafter
from dloop.drafters.config import Json

PLAUSIBLE_GAIN = (0.01, 100.0)  # root mean square of a norm's gain; trained ones lie far inside
UNTRAINED_SHARE = 0.99  # of all gains being exactly 1
EXPORT = "export or fetch the checkpoint again"


def check_tensors(drafter: BlockDrafter, raw: Json) -> list[Finding]:
    """Zeros, constants, implausible gains, layers that are copies of one another, another dtype."""
    tensors = drafter.model.state_dict()
    found = [*odd_matrices(tensors), *odd_gains(tensors), *twin_layers(tensors, drafter.config.num_layers)]
    stored = raw.get("dtype") or raw.get("torch_dtype")
    running = str(drafter.vocabulary.head.dtype).removeprefix("torch.")
    if isinstance(stored, str) and stored == "float16":
        found.append(
            finding(
                "note", "the weights are stored in float16", f"they run in {running}", "none, if tau is as expected"
            )
        )
    return found


def finding(severity: Severity, what: str, evidence: str, remedy: str = EXPORT) -> Finding:
    """A finding about weights."""
    return Finding(severity=severity, cause="weights", what=what, evidence=evidence, remedy=remedy)


def odd_matrices(tensors: Mapping[str, Tensor]) -> Iterator[Finding]:
    """Matrices of one value."""
    for name, value in tensors.items():
        if value.ndim >= 2:
            low, high = cast(list[float], torch.stack(torch.aminmax(value)).tolist())  # sync
            if low == high:
                zero = "zero" if low == 0 else f"{low:g}"
                yield finding("warning", f"all values of {name} are {zero}", f"shape {tuple(value.shape)}")


def odd_gains(tensors: Mapping[str, Tensor]) -> Iterator[Finding]:
    """Gains of norms that are all zero, far too small or large, or never trained."""
    gains = {name: value for name, value in tensors.items() if name.endswith("norm.weight")}
    low, high = PLAUSIBLE_GAIN
    for name, gain in gains.items():
        size = float(gain.float().square().mean().sqrt())  # sync
        if size == 0:
            yield finding("fault", f"all values of {name} are zero", "what it scales contributes nothing")
        elif not low <= size <= high:
            yield finding("warning", f"{name} is implausible", f"root mean square {size:.3g}, usually about 1")
    ones = sum(int((gain == 1).sum()) for gain in gains.values())  # sync
    count = sum(gain.numel() for gain in gains.values())
    if ones >= UNTRAINED_SHARE * count:
        yield finding(
            "warning",
            "the norms were never trained, or their gains were lost",
            f"{ones} of {count} gains are exactly 1",
            "gains near 1 do not move in bfloat16: train with float32 master weights, or export again",
        )


def twin_layers(tensors: Mapping[str, Tensor], count: int) -> Iterator[Finding]:
    """Layers that hold the very same matrices."""
    key = "layers.{}.mlp.down_proj.weight"
    for second in range(1, count):
        for first in range(second):
            if torch.equal(tensors[key.format(first)], tensors[key.format(second)]):  # sync
                same = f"mlp.down_proj.weight of layers {first} and {second} are bit-equal"
                yield finding("warning", f"layer {second} is a copy of layer {first}", same)
