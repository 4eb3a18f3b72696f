"""`attach`: a transformers model whose `generate` decodes with a drafter.

transformers prepares each call as ever (arguments, defaults, processors, stopping criteria, padding, checks); only its
loop for greedy search and sampling, `_sample`, is replaced, in a class of the model's own. What that loop alone can do,
it does: such calls, and other ways of decoding, say so in their `Report`.
"""

import functools
import logging
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import SupportsIndex, cast

from torch import Tensor
from transformers import GenerationConfig, GenerationMixin, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation.utils import GenerateDecoderOnlyOutput
from transformers.utils.generic import ModelOutput

from dloop.api import check_request
from dloop.drafters.host import HostDrafter
from dloop.dropin.adopt import adopt, changes
from dloop.dropin.call import CACHES, Call, reasons
from dloop.dropin.run import Pair, Report, run
from dloop.dropin.walk import Streamer
from dloop.errors import UserError
from dloop.gate import AutoName, GateSum
from dloop.gates.choose import gate_of
from dloop.load import load_drafter
from dloop.settings import Budget, Settings, limits_of, shaped
from dloop.tally import Tally
from dloop.targets.hf import HFTarget

log = logging.getLogger("dloop")
GENERATE = cast(Callable[..., object], vars(GenerationMixin)["generate"])


class Current(threading.local):
    """What is known of the call that a thread is in."""

    report: Report | None = None


@dataclass
class Attachment:
    """A model that decodes with a drafter. `detach`, or the end of a `with` block, undoes it."""

    pair: Pair
    original: type[PreTrainedModel]  # the model's class
    last: Report | None = None  # of the call of `generate` that ended last, in whatever thread
    current: Current = field(default_factory=Current)
    told: set[str] = field(default_factory=set[str])  # lines that were logged, their numbers left out
    tally: Tally = field(default_factory=Tally)  # over all calls

    @property
    def model(self) -> PreTrainedModel:
        return self.pair.target.model

    def __enter__(self) -> "Attachment":
        return self

    def __exit__(self, *_: object) -> None:
        self.detach()

    def detach(self) -> None:
        """Let the model decode as before; no effect where it does already."""
        if attachment_of(self.model) is self:
            self.model.__class__ = self.original

    def fall_back(self, reason: str) -> None:
        """Note that a call is decoded plainly; each kind of reason is logged once."""
        self.current.report = Report(mode="plain", reason=reason)
        self.tell(f"generate decodes plainly, without the drafter: {reason}")

    def decode(self, call: Call) -> GenerateDecoderOnlyOutput | Tensor:
        """Decode a call with the drafter. What is odd about its acceptance is logged once."""
        result, report = run(self.pair, call)
        self.current.report = report
        name = self.pair.drafter.name
        before = self.tally.suspicion(name)
        for rounds in report.rounds:
            self.tally.add(rounds)
        if before is None and (line := self.tally.suspicion(name)):
            self.tell(line)
        return result

    def tell(self, line: str) -> None:
        """Log a line, once whatever numbers it holds."""
        kind = re.sub(r"\d+", "", line)
        if kind not in self.told:
            self.told.add(kind)
            log.warning(line)

    def why_plain(self, model: object, call: Call) -> Iterator[str]:
        """Why a call is transformers' own to decode."""
        if model is not self.model:
            yield "this is a copy of the attached model; attach it itself"
        if self.model.training:
            yield "the model is in training mode; call model.eval()"
        weight = next(self.pair.drafter.model.parameters())
        if (weight.dtype, weight.device) != (self.model.dtype, self.model.device):
            yield f"the model has become {self.model.dtype} on {self.model.device}; attach a drafter loaded for it"
        if (words := self.pair.target.vocab_size) != self.pair.drafter.config.vocab_size:
            yield f"the model's vocabulary has become {words} words; attach a drafter trained for it"
        yield from changes(self.pair.target, self.original)
        yield from reasons(call, self.pair.target.context)


def attachment_of(model: object) -> Attachment | None:
    """What is attached to a model, or was to the one it is a copy of; None: nothing."""
    return getattr(type(model), "attachment", None)


class Attached(GenerationMixin):
    """What stands before the original class of an attached model."""

    attachment: Attachment

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[object, ...]:
        """A copy or a pickle is a model of the original class, as before `attach`; this is logged once."""
        attachment = self.attachment
        attachment.tell("a copy or a pickle of an attached model has no drafter; attach the copy itself")
        # Protocol 1's form, which every protocol may hold, alone lets the class be another one.
        make, (_, *others), *state = cast(tuple[object, tuple[object, ...], object], super().__reduce_ex__(1))
        return make, (attachment.original, *others), *state

    @functools.wraps(GENERATE)
    def generate(self, *args: object, **kwargs: object) -> object:  # pyright: ignore[reportIncompatibleMethodOverride]
        """As before; a result that is a dictionary has a `Report` as its attribute `dloop`."""
        attachment = attachment_of(self)
        if attachment is None:  # detached by another thread in this very moment
            return cast(PreTrainedModel, self).generate(*args, **kwargs)  # pyright: ignore
        current, outer = attachment.current, attachment.current.report
        current.report = None
        try:
            given = next((name for name in CACHES if kwargs.get(name) is not None), None)
            if given is not None:
                attachment.fall_back(f"{given} is given, and the drafter does not know what it holds")
            result = cast(object, attachment.original.generate(self, *args, **kwargs))  # pyright: ignore
            if current.report is None:
                attachment.fall_back("the call asks for another way of decoding than greedy search or sampling")
            attachment.last = report = current.report
        finally:
            current.report = outer  # of a call in whose midst this one was made
        if isinstance(result, ModelOutput):
            object.__setattr__(result, "dloop", report)
        return result

    def _sample(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        synced_gpus: bool = False,
        streamer: Streamer | None = None,
        **model_kwargs: object,
    ) -> GenerateDecoderOnlyOutput | Tensor:
        given = (input_ids, logits_processor, stopping_criteria, generation_config, synced_gpus, streamer)
        attachment = attachment_of(self)
        if attachment is None:
            return cast(PreTrainedModel, self)._sample(*given, **model_kwargs)  # pyright: ignore
        call = Call(
            ids=input_ids,
            processors=logits_processor,
            criteria=stopping_criteria,
            config=generation_config,
            streamer=streamer,
            inputs=model_kwargs,
            is_synced=synced_gpus,
        )
        current = attachment.current
        if current.report is None and (reason := next(attachment.why_plain(self, call), None)) is not None:
            attachment.fall_back(reason)
        if current.report is None:
            return attachment.decode(call)
        return attachment.original._sample(self, *given, **model_kwargs)  # pyright: ignore


def attach(
    model: PreTrainedModel | HFTarget,
    drafter: HostDrafter | str,
    loop_gate: float | AutoName = 1.0,
    gate_sum: GateSum = "last",
    max_stages: int = 12,
    tree_budget: Budget = "host",
    stage_tree_budget: Budget = "host",
    topk_k: int = 10,
    tree_width: int = 12,
    tree_beta: float = -0.2,
    draft_depth: int | None = None,
    mtp_k: int | None = None,
) -> Attachment:
    """Let `model.generate` of transformers decode with a drafter from now on; `detach` undoes it.

    Texts stay the model's own: the same ids in float32, greedy or sampled alone (with PyTorch's seed); several sampled
    together keep their law, each with a seed of its own. What only transformers' loop can do is decoded by it, logged
    once, and told in the report.

    Args:
        model: loaded with transformers, whose own layers and head then verify; or a target of `load_target`.
        drafter: from `load_drafter`, or a name for it.
        loop_gate and the others: how drafts are made, as in `generate`; what else decides a text comes with each call.

    Returns the attachment: `last` is the report on the latest call, with its rounds; a result that is a dictionary
    has it as `dloop`. Raises UserError for a model or drafter that does not fit, or that is attached already.
    """
    settings = Settings(**{k: v for k, v in locals().items() if k not in ("model", "drafter")})
    check_kinds(model, drafter)
    target = model if isinstance(model, HFTarget) else adopt(model)
    found = attachment_of(target.model)
    if found is not None and found.model is target.model:
        raise UserError(f"{target.name} has a drafter attached already; detach it first")
    if found is not None:  # a copy of an attached model
        target.model.__class__ = found.original
    loaded = load_drafter(drafter, target) if isinstance(drafter, str) else drafter
    original = type(target.model)
    attachment = Attachment(checked(target, loaded, settings), original)
    own = {"attachment": attachment, "__module__": original.__module__}
    target.model.__class__ = type(original.__name__, (Attached, original), own)
    return attachment


def check_kinds(model: object, drafter: object) -> None:
    """Raises UserError for what is no model or no drafter at all."""
    if not isinstance(model, HFTarget | PreTrainedModel):
        raise UserError(f"model={model!r:.60} must be a model that transformers loaded, or a target of load_target")
    if not isinstance(drafter, HostDrafter | str):
        raise UserError(f"drafter={drafter!r:.60} must be a drafter of load_drafter, or a name for it")


def checked(target: HFTarget, drafter: HostDrafter, settings: Settings) -> Pair:
    """Who will decode. Raises UserError, now and not in the middle of a call, for what does not go together."""
    check_request(target, drafter, settings)
    if (own := next(drafter.model.parameters()).dtype) != target.dtype:
        raise UserError(
            f"{drafter.name} is in {own}, {target.name} in {target.dtype}; load the drafter for this target"
        )
    gate_of(settings, target, drafter)
    limits_of(settings, target, drafter)
    shape = shaped(drafter, settings, target)
    assert shape is not None
    return Pair(target, shape, settings)


def detach(model: PreTrainedModel) -> None:
    """Undo `attach`. Raises UserError for a model that has nothing attached."""
    found = attachment_of(model)
    if found is None:
        raise UserError(
            f"{model.name_or_path or type(model).__name__} has no drafter attached; there is nothing to undo"
        )
    model.__class__ = found.original  # of a copy too
