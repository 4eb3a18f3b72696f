"""Which objective a family is trained with."""

from dloop.drafters.chain import ChainModel
from dloop.drafters.dflash import DFlash
from dloop.drafters.domino import Domino
from dloop.drafters.dspark import DSpark
from dloop.drafters.gemma4 import Assistant
from dloop.drafters.host import HostModel
from dloop.train.block import DFlashObjective, DominoObjective, DSparkObjective
from dloop.train.lent import AssistantObjective
from dloop.train.objective import Objective, ObjectiveSettings
from dloop.train.unroll import UnrollObjective
from dloop.types import Vocabulary


def objective_of(model: HostModel, vocabulary: Vocabulary, settings: ObjectiveSettings) -> Objective:
    """The objective of a model's family."""
    match model:
        case DSpark():
            return DSparkObjective(model, vocabulary, settings)
        case Domino():
            return DominoObjective(model, vocabulary, settings)
        case DFlash():
            return DFlashObjective(model, vocabulary, settings)
        case Assistant():
            return AssistantObjective(model, vocabulary, settings)
        case ChainModel():
            return UnrollObjective(model, vocabulary, settings)
        case _:
            raise TypeError(f"{type(model).__name__} has no training objective")
