"""Tables by their names: from what was read to what is shown."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from dloop.bench.paper import gains, stages
from dloop.bench.paper.scores import Calibration, scores
from dloop.bench.paper.shape import PaperTable, Part
from dloop.bench.paper.training import TrainRun, training
from dloop.bench.report import Found


@dataclass(frozen=True, kw_only=True)
class Sources:
    """What tables are made of."""

    found: Found
    calibrations: Sequence[Calibration] = ()
    runs: Sequence[TrainRun] = ()


BUILDERS: Mapping[str, Callable[[Sources], list[Part]]] = {
    **{name: lambda given, shape=shape: gains.gains(given.found, shape) for name, shape in gains.SHAPES.items()},
    **{name: lambda given, shape=shape: stages.stages(given.found, shape) for name, shape in stages.SHAPES.items()},
    "F1": lambda given: stages.acceptance(given.found),
    "A6": lambda given: scores(given.calibrations),
    "A7": lambda given: training(given.found, given.runs),
}


def paper(names: Sequence[str], given: Sources) -> list[PaperTable]:
    """The tables of these names, in their order."""
    return [PaperTable(name, BUILDERS[name](given)) for name in names]
