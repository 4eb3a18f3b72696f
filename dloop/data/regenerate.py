"""Training data that the target writes itself: prompts go in, its answers come out and are kept part by part.

A source answers prompts, ids in and finished texts out, in whatever order they end: `built_in` decodes in this process.
A text's seed depends on the run's seed and on its line alone, so neither how many are answered at once nor in how many
sittings changes the data.
"""

import json
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from time import perf_counter
from typing import TypeAlias

import numpy as np

from dloop.batch import Completion, generate_numbered
from dloop.chat import UNFINISHED, Message, Tokenizer
from dloop.data.answers import Answer, Answers, Parts, whole
from dloop.data.prompts import Prompt
from dloop.records import Json
from dloop.sampling import sample_seed
from dloop.settings import Settings
from dloop.targets.hf import HFTarget

Source: TypeAlias = Callable[[Iterable[tuple[int, Sequence[int]]]], Iterator[Completion]]


def built_in(target: HFTarget, settings: Settings, live: int) -> Source:
    """The target itself, at most `live` texts at a time; nothing is drafted."""
    return lambda prompts: generate_numbered(target, None, prompts, settings, live)


def index_of(line: int) -> int:
    """The number that a line's seed is made from."""
    return line - 1


def regenerate(
    prompts: Sequence[Prompt], source: Source, parts: Parts, *, shard: int, vocab_size: int
) -> Generator[Answer]:
    """Answer the prompts that no part holds yet, a part every `shard` answers; yields each answer as it ends.

    What is answered is kept too when the run ends early, by an error or because the caller closes the generator.
    """
    done = parts.lines()
    asked = {index_of(prompt.question.line): prompt for prompt in prompts if prompt.question.line not in done}
    fresh: list[Answer] = []
    began = perf_counter()

    def keep() -> None:
        """Write what is not written yet."""
        nonlocal began
        parts.append(Answers.of(fresh, vocab_size, perf_counter() - began))
        fresh.clear()
        began = perf_counter()

    try:
        for text in source((index, prompt.tokens.tolist()) for index, prompt in asked.items()):
            prompt = asked[text.index]
            response = np.array(text.tokens, np.int64)
            fresh.append(Answer(prompt.question.line, prompt.tokens, response, text.finish_reason == "stop"))
            last = fresh[-1]
            if len(fresh) == shard:
                keep()
            yield last
    finally:
        if fresh:
            keep()


def write_tokens(path: Path, answers: Answers) -> None:
    """An .npz that `TokenFile.read` takes, without the time: equal data are equal files."""
    with whole(path) as file:
        np.savez(file, flat=answers.flat, lens=answers.lens, lines=answers.lines, ended=answers.ended)


def write_conversations(
    path: Path, answers: Answers, questions: Mapping[int, list[Message]], tokenizer: Tokenizer, sampling: Settings
) -> None:
    """A conversation a line, as text: what was asked, the answer, and how it was drawn. `questions` by line.

    An answer that was cut says so; half a character at its end is left out.
    """
    assert sampling.seed is not None
    with whole(path) as file:
        for answer in answers:
            text = tokenizer.decode(answer.response.tolist())
            reply: Message = {"role": "assistant", "content": text if answer.ended else text.rstrip(UNFINISHED)}
            drawn: dict[str, Json] = {
                "temperature": sampling.temperature,
                "top_k": sampling.top_k,
                "top_p": sampling.top_p,
                "seed": sample_seed(sampling.seed, index_of(answer.line)),
                "max_new_tokens": sampling.max_new_tokens,
            }
            row = {
                "conversations": [*questions[answer.line], reply],
                "line": answer.line,
                "finish_reason": "stop" if answer.ended else "length",
                "sampling": drawn,
            }
            file.write(f"{json.dumps(row, ensure_ascii=False, allow_nan=False)}\n".encode())
