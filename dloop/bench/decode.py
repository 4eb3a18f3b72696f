"""One sample decoded and timed: every turn is a response, and the next turn's history holds the answer."""

import resource
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from dloop.api import finished, start
from dloop.bench.measure import HeaderJson, Response
from dloop.bench.tasks import Sample
from dloop.chat import Message, Tokenizer
from dloop.drafters.host import HostDrafter
from dloop.gate import ALWAYS_OPEN
from dloop.records import SCHEMA, Answer, prompt_sha256, round_record
from dloop.sampling import sample_seed
from dloop.settings import Settings, shaped
from dloop.targets.hf import HFTarget

WARM_UP_PASSES = 2  # the shapes come in turns, so that the second pass meets what the others left behind
WARM_UP_PROMPT, WARM_UP_TOKENS = 64, 8


@dataclass(frozen=True, kw_only=True)
class Decoder:
    """What all samples of a run share. Without a drafter it is the baseline: none is loaded then."""

    target: HFTarget
    tokenizer: Tokenizer
    drafter: HostDrafter | None
    settings: Settings  # its seed is the run's; every sample has its own
    chat: bool  # whether prompts go into the target's chat template

    def encode(self, messages: Sequence[Message]) -> list[int]:
        """A conversation up to where the answer begins; without a template its texts, a line break between them."""
        if self.chat:
            return self.tokenizer.encode_chat(messages)
        return self.tokenizer.encode("\n".join(message["content"] for message in messages))


def decode_sample(decoder: Decoder, sample: Sample) -> list[Response]:
    """Hold one conversation. A turn that fails is a response with its error, and so are the turns after it."""
    seed = sample_seed(decoder.settings.seed or 0, sample.index)
    settings = replace(decoder.settings, seed=seed)
    messages: list[Message] = []
    responses: list[Response] = []
    for turn, text in enumerate(sample.turns):
        blank = blank_header(sample, turn, seed)
        if responses and responses[-1].header["error"] is not None:
            responses.append(Response({**blank, "error": "an earlier turn failed"}, []))
            continue
        messages.append({"role": "user", "content": text})
        timed = attempt(decoder, settings, messages)
        if isinstance(timed, str):
            responses.append(Response({**blank, "error": timed}, []))
            release(decoder.target.device)
            continue
        responses.append(response_of(blank, timed))
        assert timed.answer.text is not None
        messages.append({"role": "assistant", "content": timed.answer.text})
    return responses


@dataclass(frozen=True)
class Timed:
    """An answer with what was measured around it."""

    answer: Answer
    prefill_s: float
    peak_memory_bytes: int


def attempt(decoder: Decoder, settings: Settings, messages: Sequence[Message]) -> Timed | str:
    """The answer, or why there is none."""
    try:
        return decode_prompt(decoder, settings, decoder.encode(messages))
    except Exception as error:  # recorded, counted and shown: one bad sample must not end a run of hours
        return f"{type(error).__name__}: {one_line(error)}"


def decode_prompt(decoder: Decoder, settings: Settings, prompt_ids: list[int]) -> Timed:
    """Decode with the clock started after prefill (the drafter's reading of the prompt included in prefill)."""
    target = decoder.target
    if target.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(target.device)
    stream = start(target, decoder.drafter, prompt_ids, settings)
    began = clock(target.device)
    _ = stream.first
    started = clock(target.device)
    rounds = list(stream)
    ended = clock(target.device)
    generation = finished(stream, rounds)
    answer = Answer(
        prompt_ids=prompt_ids,
        generation=generation,
        text=decoder.tokenizer.decode(generation.tokens),
        decode_s=ended - started,
    )
    return Timed(answer, started - began, peak_memory(target.device))


def blank_header(sample: Sample, turn: int, seed: int) -> HeaderJson:
    """A response of which nothing is known yet."""
    return {
        "schema": SCHEMA,
        "sample": sample.index,
        "turn": turn,
        "turns": len(sample.turns),
        "prompt_sha256": None,
        "num_prompt_tokens": 0,
        "first": None,
        "seed": seed,
        "finish_reason": None,
        "exact": False,
        "num_tokens": 0,
        "rounds": 0,
        "prefill_s": 0.0,
        "decode_s": 0.0,
        "peak_memory_bytes": 0,
        "error": None,
    }


def response_of(blank: HeaderJson, timed: Timed) -> Response:
    """The records of an answer."""
    answer, generation = timed.answer, timed.answer.generation
    header: HeaderJson = {
        **blank,
        "prompt_sha256": prompt_sha256(answer.prompt_ids),
        "num_prompt_tokens": len(answer.prompt_ids),
        "first": generation.first,
        "finish_reason": generation.finish_reason,
        "exact": generation.exact,
        "num_tokens": len(generation.tokens),
        "rounds": len(generation.rounds),
        "prefill_s": timed.prefill_s,
        "decode_s": answer.decode_s,
        "peak_memory_bytes": timed.peak_memory_bytes,
    }
    return Response(header, [round_record(round) for round in generation.rounds])


def warm_up(decoder: Decoder, sample: Sample) -> None:
    """Decode a few tokens, then one round of every number of stages, in turns. Raises UserError for bad settings."""
    target, settings = decoder.target, decoder.settings
    drafter = shaped(decoder.drafter, settings, target)
    length = min(WARM_UP_PROMPT, target.context // 2)
    prompt = decoder.encode([{"role": "user", "content": sample.turns[0]}])[:length]
    few = replace(settings, max_new_tokens=min(WARM_UP_TOKENS, settings.max_new_tokens))
    may_open = isinstance(settings.loop_gate, str) or settings.loop_gate <= 0
    shapes = settings.max_stages if drafter is not None and may_open else 1
    for _ in range(WARM_UP_PASSES):
        decode_prompt(decoder, few, prompt)
        for count in range(2, shapes + 1):
            assert drafter is not None
            room = min(count * drafter.stage_len + 2, target.context - len(prompt))
            forced = replace(settings, loop_gate=ALWAYS_OPEN, max_stages=count, max_new_tokens=room, stop_token_ids=())
            next(start(target, drafter, prompt, forced))


def clock(device: torch.device) -> float:
    """Seconds, when all work given to the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # sync
    return time.perf_counter()


def peak_memory(device: torch.device) -> int:
    """Bytes: allocated on the GPU since the last reset; on a CPU of the whole process, since its start."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def release(device: torch.device) -> None:
    """After a failure, which may have been for memory."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def one_line(error: Exception) -> str:
    """An error's message without line breaks."""
    return " ".join(str(error).split())[:300] or "no message"
