"""The families of drafters: what reads and writes a config, the model that fits it, a loaded drafter of it."""

from collections.abc import Callable, Mapping
from pathlib import Path

from torch import Tensor

from dloop.drafters.block import BlockDrafter, BlockModel
from dloop.drafters.chain import ChainDrafter, ChainModel
from dloop.drafters.config import BlockConfig, DSparkConfig, Json, read_dspark, write_block
from dloop.drafters.dflash import DFlash, DFlashConfig, read_dflash
from dloop.drafters.domino import Domino, DominoConfig, present_names, read_domino
from dloop.drafters.draft_vocab import with_maps
from dloop.drafters.dspark import DSpark
from dloop.drafters.eagle3 import Eagle3, Eagle3Config, read_eagle3, write_eagle3
from dloop.drafters.host import HostConfig, HostDrafter, HostModel
from dloop.types import Vocabulary

READERS: Mapping[str, Callable[[Json, str], HostConfig]] = {
    "dflash": read_dflash,
    "dspark": read_dspark,
    "domino": read_domino,
    "eagle3": read_eagle3,
}


def build(config: HostConfig) -> HostModel:
    """The model of a config, with fresh weights."""
    match config:
        case DSparkConfig():
            return DSpark(config)
        case DominoConfig():
            return Domino(config)
        case DFlashConfig():
            return DFlash(config)
        case Eagle3Config():
            return Eagle3(config)
        case _:
            raise TypeError(f"{type(config).__name__} is the config of no family")


def write_config(config: HostConfig, dtype: str) -> dict[str, object]:
    """The family's SpecForge layout."""
    match config:
        case BlockConfig():
            return write_block(config, dtype)
        case Eagle3Config():
            return write_eagle3(config, dtype)
        case _:
            raise TypeError(f"{type(config).__name__} is the config of no family")


def named(config: HostConfig, tensors: Mapping[str, Tensor], source: str) -> dict[str, Tensor]:
    """A checkpoint's tensors under the names the family's model gives them, with what their absence means."""
    match config:
        case DominoConfig():
            return present_names(tensors)
        case Eagle3Config():
            return with_maps(tensors, config.draft_vocab_size, config.vocab_size, source)
        case _:
            return dict(tensors)


def loaded(name: str, model: HostModel, vocabulary: Vocabulary, folder: Path | None = None) -> HostDrafter:
    """The drafter of a model whose weights are in place."""
    family = model.config.family
    match model:
        case BlockModel():
            return BlockDrafter(name=name, family=family, model=model, vocabulary=vocabulary, folder=folder)
        case ChainModel():
            return ChainDrafter(name=name, family=family, model=model, vocabulary=vocabulary, folder=folder)
        case _:
            raise TypeError(f"{type(model).__name__} is the model of no family")
