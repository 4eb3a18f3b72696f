"""What the gates of a drafter have learned, and the file that keeps it: one entry a pair, law and machine."""

import fcntl
import json
import math
import os
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from dloop.errors import UserError
from dloop.gate import AutoName
from dloop.gates.auto import Learner
from dloop.gates.clock import Clock, Times
from dloop.gates.curve import BINS, Curve, Means
from dloop.gates.line import Line
from dloop.gates.modelled import BINS as MODEL_BINS
from dloop.gates.modelled import ByModel, Calibration
from dloop.gates.value import ByScore, Proxy, Value

SCHEMA = 1
State = dict[str, Any]  # JSON


@dataclass
class Learned:
    """Of one loaded drafter, in all its shapes and on all its targets."""

    learners: dict[str, Learner] = field(default_factory=dict[str, Learner])  # by what they hold for
    kept: dict[str, State] = field(default_factory=dict[str, State])  # read from a file, and not asked for yet

    def at(self, name: AutoName, key: str, stage_len: int) -> Learner:
        """The learner of this gate for this key; a new one where nothing is known. Raises UserError for bad files."""
        key = f"{name} | {key}"
        if key not in self.learners:
            state = self.kept.pop(key, None)
            self.learners[key] = fresh(name, stage_len) if state is None else restored(state, key)
        return self.learners[key]

    @property
    def rounds(self) -> int:
        """That anything was learned from."""
        return sum(learner.rounds for learner in self.learners.values()) + sum(s["rounds"] for s in self.kept.values())

    def forget(self) -> None:
        """Begin anew."""
        self.learners.clear()
        self.kept.clear()

    def load(self, path: Path) -> None:
        """Begin with what a file keeps. Raises UserError where it is none."""
        found = read(path)
        self.forget()
        self.kept |= found

    def save(self, path: Path) -> None:
        """Write everything, all of it or nothing; what the file keeps of other pairs stays, whoever wrote it."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with alone(path):
                others = read(path) if path.exists() else {}
                states = {key: state_of(learner) for key, learner in list(self.learners.items())}
                whole = {"schema": SCHEMA, "gates": {**self.kept, **others, **states}}
                partial = path.with_name(f".{path.name}.partial")
                partial.write_text(json.dumps(whole, indent=1, allow_nan=False) + "\n", encoding="utf-8")
                partial.replace(path)
        except OSError as error:
            raise UserError(f"{path} cannot be written ({error.strerror or error}); give another file") from error


@contextmanager
def alone(path: Path) -> Generator[None]:
    """Of all processes and threads that ask for this path, one at a time is inside."""
    lock = path.with_name(f".{path.name}.lock")
    while True:
        with lock.open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # waits
            if not os.fstat(file.fileno()).st_nlink:  # who was inside has removed it: it keeps nobody out any more
                continue
            try:
                yield
            finally:
                lock.unlink()
            return


def fresh(name: AutoName, stage_len: int) -> Learner:
    """A learner that knows nothing."""
    return Learner(ByModel.guessed(stage_len) if name == "auto:full" else ByScore(Curve.guessed(stage_len)))


def read(path: Path) -> dict[str, State]:
    """The entries of a file. Raises UserError."""
    try:
        whole = json.loads(path.read_text(encoding="utf-8"))
        found: dict[str, State] = whole["gates"]
        if whole["schema"] != SCHEMA or not all(isinstance(state["rounds"], int) for state in found.values()):
            raise ValueError(f"schema {whole['schema']}")
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror or error}); give a file that a gate wrote") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} keeps no gate's state ({type(error).__name__}: {error}); remove it") from error
    return found


def state_of(learner: Learner) -> State:
    """Everything a learner knows, as JSON; what it is told meanwhile waits."""
    with learner.lock:
        learner.settle()
        return told(learner)


def told(learner: Learner) -> State:
    """The same, of a learner that nobody else holds."""
    value = learner.value
    about: State = {"proxy": asdict(value.proxy)} if isinstance(value, ByModel | ByScore) else {}
    if isinstance(value, ByModel):
        about |= {"slope": value.calibration.slope, "offsets": value.calibration.offsets}
        about |= {"brings": [asdict(means) for means in value.brings]}
    elif isinstance(value, ByScore):
        about |= {"curve": asdict(value.curve.means)}
    return {
        "rounds": learner.rounds,
        "nodes": learner.nodes,
        "surplus": learner.surplus,
        "value": about,
        "clock": {str(live): asdict(times) for live, times in learner.clock.times.items()},
    }


def restored(state: State, key: str) -> Learner:
    """A learner as it was. Raises UserError for what none wrote."""
    try:
        clock = {int(live): times_of(times) for live, times in state["clock"].items()}
        return Learner(
            value_of(state["value"]),
            Clock(clock),
            rounds=state["rounds"],
            learned=state["rounds"],
            nodes=number(state["nodes"]),
            surplus=number(state["surplus"]),
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"the gate's state of {key} is damaged ({type(error).__name__}: {error}); remove the file"
        ) from error


def number(value: float | str) -> float:
    """A finite number. Raises ValueError for others."""
    if not math.isfinite(found := float(value)):
        raise ValueError(f"{value} is no finite number")
    return found


def positive(value: float | str) -> float:
    """A number above 0: something is divided by it. Raises ValueError for others."""
    if not (found := number(value)) > 0:
        raise ValueError(f"{value} is not above 0")
    return found


def value_of(about: State) -> Value:
    """The estimator."""
    proxy = Proxy(*(means_of(about["proxy"][name], BINS, number) for name in ("drafted", "instead")))
    if "curve" in about:
        return ByScore(Curve(means_of(about["curve"], BINS, positive)), proxy)
    calibration = Calibration(number(about["slope"]), [number(offset) for offset in about["offsets"]])
    first, further = about["brings"]
    return ByModel(calibration, [means_of(each, MODEL_BINS, positive) for each in (first, further)], proxy)


def means_of(about: Mapping[str, Any], bins: int, weight_of: Callable[[float | str], float]) -> Means:
    """Means in bins. Raises ValueError where they are not so many."""
    weight, total = [weight_of(value) for value in about["weight"]], [number(value) for value in about["total"]]
    if not len(weight) == len(total) == bins:
        raise ValueError(f"{len(weight)} and {len(total)} bins, not {bins}")
    return Means(weight, total, int(about["labels"]))


def times_of(about: Mapping[str, Any]) -> Times:
    """Measured times."""
    sums = {name: number(about[name]) for name in ("tokens", "stages", "rows")}
    return Times(line_of(about["draft"]), line_of(about["verify"]), steps=positive(about["steps"]), **sums)


def line_of(about: Mapping[str, Any]) -> Line:
    """One line as it was followed."""
    first, both, second = (number(value) for value in about["doubt"])
    at_zero, beyond = about["streaks"]
    return Line(
        share=positive(about["share"]),
        level=(positive if about["seen"] else number)(about["level"]),
        doubt=(first, both, second),
        deviation=positive(about["deviation"]),
        streaks=(int(at_zero), int(beyond)),
        seen=int(about["seen"]),
        first=[number(value) for value in about["first"]],
    )
