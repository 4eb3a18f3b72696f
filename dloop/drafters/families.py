"""The families of block drafters: what reads a config, and the model that fits it."""

from collections.abc import Callable, Mapping

from torch import Tensor

from dloop.drafters.block import BlockModel
from dloop.drafters.config import BlockConfig, DSparkConfig, Json, read_dspark
from dloop.drafters.dflash import DFlash, DFlashConfig, read_dflash
from dloop.drafters.domino import Domino, DominoConfig, present_names, read_domino
from dloop.drafters.dspark import DSpark

READERS: Mapping[str, Callable[[Json, str], BlockConfig]] = {
    "dflash": read_dflash,
    "dspark": read_dspark,
    "domino": read_domino,
}


def build(config: BlockConfig) -> BlockModel:
    """The model of a config, with fresh weights."""
    match config:
        case DSparkConfig():
            return DSpark(config)
        case DominoConfig():
            return Domino(config)
        case DFlashConfig():
            return DFlash(config)
        case _:
            raise TypeError(f"{type(config).__name__} is the config of no family")


def named(family: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A checkpoint's tensors under the names the family's model gives them."""
    return present_names(tensors) if family == "domino" else dict(tensors)
