"""Answers as token files hold them, and the folder of parts where they wait until all are there."""

import os
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple, TypedDict

import numpy as np

from dloop.errors import UserError
from dloop.records import mean_of, repetition_share


class Figures(TypedDict):
    """What was written."""

    samples: int
    prompt_tokens: int
    response_tokens: int
    ended: int  # answers with a stop token
    cut: int  # answers that --max-new-tokens cut; they are kept
    repetition_share: float  # of 8-grams that stood in the answer before, mean over answers
    seconds: float  # of decoding, all sittings
    tokens_per_s: float  # response tokens


class Answer(NamedTuple):
    """One text as it is kept."""

    line: int  # of the prompts' file, from 1
    prompt: np.ndarray
    response: np.ndarray  # the stop token kept
    ended: bool  # False: cut at max_new_tokens


@dataclass(frozen=True)
class Answers:
    """Texts as a token file holds them (`flat`, `lens`), with what else is known of each."""

    flat: np.ndarray  # [tokens]; prompt then response, sample after sample
    lens: np.ndarray  # [samples, 2]; of prompt and response
    lines: np.ndarray  # [samples]
    ended: np.ndarray  # [samples], bool
    seconds: np.ndarray  # scalar; that decoding them took

    @classmethod
    def of(cls, answers: Sequence[Answer], vocab_size: int, seconds: float) -> "Answers":
        """These answers, at least one, in this order."""
        parts = [part for answer in answers for part in (answer.prompt, answer.response)]
        return cls(
            flat=np.concatenate(parts).astype(np.uint16 if vocab_size <= 2**16 else np.uint32),
            lens=np.array([len(part) for part in parts], np.int64).reshape(-1, 2),
            lines=np.array([answer.line for answer in answers], np.int64),
            ended=np.array([answer.ended for answer in answers], bool),
            seconds=np.array(seconds),
        )

    def __len__(self) -> int:
        return len(self.lines)

    def __iter__(self) -> Iterator[Answer]:
        ends = self.lens.cumsum().reshape(-1, 2)
        for line, (middle, end), length, ended in zip(self.lines, ends, self.lens[:, 0], self.ended, strict=True):
            yield Answer(int(line), self.flat[middle - length : middle], self.flat[middle:end], bool(ended))

    def figures(self) -> Figures:
        """Counts, repetition and speed."""
        prompts, responses = (int(total) for total in self.lens.sum(0))
        ended = int(self.ended.sum())
        return {
            "samples": len(self),
            "prompt_tokens": prompts,
            "response_tokens": responses,
            "ended": ended,
            "cut": len(self) - ended,
            "repetition_share": mean_of([repetition_share(answer.response.tolist()) for answer in self]),
            "seconds": float(self.seconds),
            "tokens_per_s": responses / float(self.seconds),
        }


@dataclass(frozen=True)
class Parts:
    """A folder beside the output: what has been answered so far, a file every few thousand answers."""

    folder: Path

    @classmethod
    def beside(cls, output: Path) -> "Parts":
        """The folder that belongs to this output."""
        return cls(output.with_name(f"{output.name}.parts"))

    def files(self) -> list[Path]:
        return sorted(self.folder.glob("part-*.npz"))

    def append(self, answers: Answers) -> None:
        """Add a part, all of it or nothing."""
        files = self.files()
        number = int(files[-1].stem.removeprefix("part-")) + 1 if files else 0  # a part may have been removed
        with whole(self.folder / f"part-{number:06d}.npz") as file:
            np.savez(file, **vars(answers))

    def lines(self) -> set[int]:
        """Lines that are answered. Raises UserError at a damaged part."""
        return {int(line) for path in self.files() for line in read_part(path).lines}

    def read(self, vocab_size: int) -> Answers:
        """All answers, at least one, in the order of their lines. Raises UserError at a damaged part."""
        parts = [read_part(path) for path in self.files()]
        answers = {
            answer.line: answer for part in parts for answer in part
        }  # one interrupted at its writing comes twice
        ordered = [answers[line] for line in sorted(answers)]
        return Answers.of(ordered, vocab_size, sum(float(part.seconds) for part in parts))


def read_part(path: Path) -> Answers:
    """One part. Raises UserError if it is damaged."""
    try:
        with np.load(path) as data:
            return Answers(**{name: data[name] for name in Answers.__dataclass_fields__})
    except Exception as error:  # a damaged archive raises whatever zipfile, zlib, struct and numpy trip over
        raise UserError(
            f"{path} is damaged ({type(error).__name__}: {error}); remove it, its prompts are answered anew"
        ) from error


@contextmanager
def whole(path: Path) -> Generator[BinaryIO]:
    """A file that appears under its name when all of it is on the disk, or not at all."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        with partial.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
