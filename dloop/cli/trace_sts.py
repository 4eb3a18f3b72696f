"""`dloop trace sts`: its flags, without torch; and its work, which needs none."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path

from dloop.cli.args import Common, option, required
from dloop.errors import UserError, refuse_output


@dataclass(frozen=True, kw_only=True)
class Command(Common):
    """Fit the temperatures that make DSpark's confidences say what happens: --stop-rule dspark:threshold=T,sts=OUTPUT.

    Left to right, each row of a block takes the temperature for which the product of the confidences up to it is best
    calibrated. A trace holds confidences where it was recorded with --engine twin. First stages alone are read.
    """

    trace: Path = required("a trace that dloop trace record wrote: .npz", group="data")
    output: Path = required("where the temperatures go: .json", group="data")
    overwrite: bool = option(False, "replace --output where it exists", group="data")


def run(command: Command) -> int | None:
    refuse_output(command.output, "--output")
    if command.output.exists() and not command.overwrite:
        raise UserError(f"--output {command.output} exists; choose another name, or add --overwrite")
    from dloop.bench.reporting import save
    from dloop.gates.trace import load
    from dloop.rules.replayed import pairs_of
    from dloop.rules.sts import fit

    logits, accepted = pairs_of(load(command.trace), str(command.trace))
    found = fit(logits, accepted)
    made = {"schema": 1, "temperatures": found.temperatures, "ece_before": found.before, "ece_after": found.after}
    made |= {"trace": str(command.trace), "starts": len(logits)}
    save(command.output, json.dumps(made, indent=1) + "\n")
    told = f"ECE of the products {found.before:.3f} before, {found.after:.3f} after, over {len(logits)} starts"
    print(f"dloop trace sts: {told}", file=sys.stderr)
    print(json.dumps(made) if command.json else command.output)
    return 0
