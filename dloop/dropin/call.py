"""One call of `generate` as transformers has prepared it, and what of it only plain decoding can do."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import cast

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation import logits_process
from transformers.generation.logits_process import (
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
)
from transformers.generation.stopping_criteria import (
    EosTokenCriteria,
    MaxLengthCriteria,
    StopStringCriteria,
)

from dloop.dropin.walk import Streamer

Processor = Callable[..., Tensor]  # a LogitsProcessor, or a function like one

# Arguments of the model's forward that transformers adds to every call, or that change nothing here.
CACHES = ("cache", "past_key_values")  # one argument: its name until transformers 5.2x, and after
USUAL = {"attention_mask", "position_ids", "logits_to_keep", "use_cache", "cache_position", "tokenizer", *CACHES}
OUTPUTS = ("output_attentions", "output_hidden_states")  # what verification does not give token by token
MEMORY = ("cache_implementation", "prefill_chunk_size")  # how plain decoding is to keep its keys and values
ROW_BY_ROW = {  # what these do to a row depends on nothing but the row
    getattr(logits_process, name)
    for name in (
        *("MinLengthLogitsProcessor", "MinNewTokensLengthLogitsProcessor", "TemperatureLogitsWarper"),
        *("TopPLogitsWarper", "TopKLogitsWarper", "TopHLogitsWarper", "MinPLogitsWarper", "TypicalLogitsWarper"),
        *("EpsilonLogitsWarper", "EtaLogitsWarper", "NoRepeatNGramLogitsProcessor", "SequenceBiasLogitsProcessor"),
        *("NoBadWordsLogitsProcessor", "ForcedBOSTokenLogitsProcessor", "ForcedEOSTokenLogitsProcessor"),
        *("InfNanRemoveLogitsProcessor", "ExponentialDecayLengthPenalty", "LogitNormalization"),
        *("SuppressTokensAtBeginLogitsProcessor", "SuppressTokensLogitsProcessor"),
    )
}
BY_ROW_NUMBER = {RepetitionPenaltyLogitsProcessor, PrefixConstrainedLogitsProcessor}  # `of_row` gives a row its own
BUILT_IN_STOPS = {MaxLengthCriteria, EosTokenCriteria}


@dataclass(frozen=True, kw_only=True)
class Call:
    """What transformers hands to the loop that decodes token by token."""

    ids: Int[Tensor, "B T"]  # left-padded
    processors: LogitsProcessorList
    criteria: StoppingCriteriaList
    config: GenerationConfig
    streamer: Streamer | None
    inputs: dict[str, object]  # further arguments of the model's forward
    is_synced: bool  # whether several processes wait for one another at every token

    @property
    def real(self) -> Int[Tensor, "B T"]:
        """1 where a token is no padding."""
        mask = self.inputs.get("attention_mask")
        return torch.ones_like(self.ids) if mask is None else cast(Tensor, mask).to(self.ids)

    @property
    def lengths(self) -> list[int]:
        """What the criteria allow of prompt and new tokens, padding counted."""
        return [cast(int, vars(c)["max_length"]) for c in self.criteria if is_of(c, MaxLengthCriteria)]

    @property
    def max_length(self) -> int:
        """The shortest of them; one token is chosen before any criterion is asked."""
        return max(min(self.lengths), self.ids.shape[1] + 1)

    @property
    def stop_ids(self) -> frozenset[int]:
        """Tokens that end a text."""
        eos = [
            cast(Tensor, criterion.eos_token_id) for criterion in self.criteria if is_of(criterion, EosTokenCriteria)
        ]
        return frozenset(token for ids in eos for token in ids.flatten().tolist())

    @property
    def other_criteria(self) -> StoppingCriteriaList:
        """What ends a text beside its length and the stop tokens."""
        return StoppingCriteriaList(c for c in self.criteria if type(c) not in BUILT_IN_STOPS)

    def asks_for(self, output: str) -> bool:
        """Whether a dictionary with this in it is to be returned."""
        return bool(self.config.return_dict_in_generate and getattr(self.config, output))


def is_of(thing: object, kind: type) -> bool:
    """Whether a thing is of this very class; a class made from it may do anything."""
    return type(thing) is kind


def reasons(call: Call, context: int) -> Iterator[str]:
    """Why transformers' own loop must decode this call, each in words that name the argument."""
    if getattr(call.config, "is_assistant", False):
        yield "the model drafts for another one, which needs its cache"
    if call.is_synced:
        yield "synced_gpus: other processes wait at every token"
    yield from (f"{name} is asked for" for name in OUTPUTS if call.asks_for(name))
    if getattr(call.config, "remove_invalid_values", None):
        yield "remove_invalid_values is asked for: drafts need logits that are finite"
    for name in MEMORY:
        if getattr(call.config, name, None) is not None:
            yield f"{name}={getattr(call.config, name)!r} is asked for"
    if not call.lengths:
        yield "there is no maximal length"
    else:
        yield from reasons_of_inputs(call, context)
    if len(call.ids) > 1:
        yield from reasons_of_batch(call)


def reasons_of_inputs(call: Call, context: int) -> Iterator[str]:
    """What the prompts are beside tokens that are counted from 0 and may be padded on the left."""
    given = {name for name, value in call.inputs.items() if not (value is None or value == {})}
    yield from (f"{name} is an input of its own" for name in sorted(given - USUAL))
    mask, positions = call.inputs.get("attention_mask"), call.inputs.get("position_ids")
    for name, value in (("attention_mask", mask), ("position_ids", positions)):
        if value is not None and cast(Tensor, value).shape[-1] != call.ids.shape[1]:
            yield f"{name} is not one number a token"
            return
    if mask is not None and bool(((cast(Tensor, mask) != 0) & (cast(Tensor, mask) != 1)).any()):
        yield "attention_mask holds other numbers than 0 and 1"
    real = call.real
    if not bool((real.diff(dim=-1) >= 0).all() and real[:, -1:].all()):
        yield "attention_mask hides more than padding on the left"
    if positions is not None and bool(((cast(Tensor, positions) - (real.cumsum(-1) - 1)) * real).any()):
        yield "position_ids do not count the tokens"
    longest = call.max_length - int((real == 0).sum(-1).min())
    if longest > context:
        yield f"prompt and new tokens may be {longest}, more than the context of {context} positions"


def reasons_of_batch(call: Call) -> Iterator[str]:
    """What acts on all sequences of a batch at once, token by token, while here each is as far as it is."""
    if call.streamer is not None:
        yield "streamer with several sequences"
    for name in ("output_scores", "output_logits"):
        if call.asks_for(name):
            yield f"{name} with several sequences: those that have ended have none"
    for processor in call.processors:
        if type(processor) not in ROW_BY_ROW | BY_ROW_NUMBER:
            yield f"{type(processor).__name__} with several sequences: it may read all of them"
    others = call.other_criteria
    for criterion in others:
        if not is_of(criterion, StopStringCriteria):
            yield f"{type(criterion).__name__} with several sequences: it may read all of them"
    if others and not call.stop_ids:
        yield "stopping_criteria without an eos_token_id: sequences that have ended go on until all have"


def of_row(call: Call, row: int) -> LogitsProcessorList:
    """The processors of one sequence."""
    alone = len(call.ids) == 1
    return call.processors if alone else LogitsProcessorList(own(p, call, row) for p in call.processors)


def own(processor: Processor, call: Call, row: int) -> Processor:
    """A processor that knows sequences by their number, for the one with this number."""
    if is_of(processor, RepetitionPenaltyLogitsProcessor):
        skipped = vars(processor).get("prompt_ignore_length")
        if isinstance(skipped, Tensor):
            return RepetitionPenaltyLogitsProcessor(vars(processor)["penalty"], skipped[row : row + 1])
    if is_of(processor, PrefixConstrainedLogitsProcessor):
        allowed, beams = vars(processor)["_prefix_allowed_tokens_fn"], vars(processor)["_num_beams"]
        return PrefixConstrainedLogitsProcessor(lambda _, ids: allowed(row // beams, ids), 1)
    return processor
