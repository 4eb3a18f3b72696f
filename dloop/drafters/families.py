"""The families of drafters: what reads and writes a config, the model that fits it, a loaded drafter of it."""

from collections.abc import Callable, Iterable, Mapping
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
from dloop.drafters.gemma4 import FAMILY as GEMMA_FAMILY
from dloop.drafters.gemma4 import Assistant, AssistantConfig, read_assistant, untied
from dloop.drafters.host import HostConfig, HostDrafter, HostModel, PublishedConfig
from dloop.drafters.lodger import AssistantDrafter
from dloop.drafters.mtp import FAMILY as MTP_FAMILY
from dloop.drafters.mtp import MTP, MTPConfig, head_names, read_mtp, with_prefix
from dloop.types import Vocabulary
from dloop.vocabulary import narrowed

READERS: Mapping[str, Callable[[Json, str], HostConfig]] = {
    "dflash": read_dflash,
    "dspark": read_dspark,
    "domino": read_domino,
    "eagle3": read_eagle3,
    MTP_FAMILY: read_mtp,
    GEMMA_FAMILY: read_assistant,
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
        case MTPConfig():
            return MTP(config)
        case AssistantConfig():
            return Assistant(config)
        case _:
            raise TypeError(f"{type(config).__name__} is the config of no family")


def write_config(config: HostConfig, dtype: str) -> dict[str, object]:
    """The family's SpecForge layout."""
    match config:
        case BlockConfig():
            return write_block(config, dtype)
        case Eagle3Config():
            return write_eagle3(config, dtype)
        case PublishedConfig():
            return config.written(dtype)
        case _:
            raise TypeError(f"{type(config).__name__} is the config of no family")


def named(config: HostConfig, tensors: Mapping[str, Tensor], source: str) -> dict[str, Tensor]:
    """A checkpoint's tensors under the names the family's model gives them, with what their absence means."""
    match config:
        case BlockConfig():
            found = present_names(tensors) if isinstance(config, DominoConfig) else dict(tensors)
            size = config.draft_vocab_size
            return found if size is None else with_maps(found, size, config.vocab_size, source)
        case Eagle3Config():
            return with_maps(tensors, config.draft_vocab_size, config.vocab_size, source)
        case MTPConfig():
            return with_prefix(tensors, source)
        case AssistantConfig():
            return untied(tensors, source)
        case _:
            return dict(tensors)


def of_family(family: str, names: Iterable[str]) -> list[str]:
    """The tensors of a checkpoint that are the drafter's: an MTP head may lie among its target's."""
    return head_names(names) if family == MTP_FAMILY else list(names)


def loaded(name: str, model: HostModel, vocabulary: Vocabulary, folder: Path | None = None) -> HostDrafter:
    """The drafter of a model whose weights are in place; `vocabulary` is whole. One that names fewer words holds a
    copy of the head's rows of these.
    """
    family = model.config.family
    match model:
        case BlockModel():
            words = narrowed(vocabulary, model.kept)
            return BlockDrafter(name=name, family=family, model=model, vocabulary=words, folder=folder)
        case Assistant():
            return AssistantDrafter(name=name, family=family, model=model, vocabulary=vocabulary, folder=folder)
        case ChainModel():
            return ChainDrafter(name=name, family=family, model=model, vocabulary=vocabulary, folder=folder)
        case _:
            raise TypeError(f"{type(model).__name__} is the model of no family")
