"""A results folder: append-only parts while a run goes on, `rounds.jsonl` and `summary.json` when it is done.

Every rank appends whole samples to its own part, so that a killed run continues where it was; a line or a sample
that the end of the process cut off is dropped and decoded anew.
"""

import io
import json
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from dloop.bench.measure import HeaderJson, Response
from dloop.errors import UserError, refuse_folder
from dloop.records import RoundJson, dumps


def slug(name: str) -> str:
    """A model's or a device's name as a folder: slashes become --, other marks that shells mind become -."""
    plain = re.sub(r"[^\w.=,+-]+", "-", name.strip("/").replace("/", "--")).strip("-")
    return plain if plain.strip(".") else Path(name).resolve().name


@dataclass(frozen=True)
class Store:
    """One folder of results."""

    folder: Path

    @property
    def rounds(self) -> Path:
        return self.folder / "rounds.jsonl"

    @property
    def summary(self) -> Path:
        return self.folder / "summary.json"

    @property
    def parts(self) -> Path:
        return self.folder / "parts"

    def check(self, identity: Mapping[str, object], samples: Sequence[int]) -> None:
        """Change nothing. Raises UserError where the folder holds a run with another identity or of more samples."""
        before = self._identity()
        different = differences(before, identity) if before is not None else []
        ways = "add --overwrite, or choose another --output-dir"
        if different:
            raise UserError(f"{self.folder} holds a run with another {', '.join(different)}; {ways}")
        if more := self.recorded().keys() - set(samples):
            raise UserError(f"{self.folder} holds {len(more)} samples that this run leaves out; {ways}")

    def refuse_folders(self) -> None:
        """Raises UserError where folders stand for files of results."""
        found = (*self.folder.glob("gate-rank-*.json"), *self.parts.glob("*.jsonl"))
        for path in (self.rounds, self.summary, self.parts / "run.json", *found):
            refuse_folder(path, "--output-dir")

    def prepare(self, identity: Mapping[str, object]) -> None:
        """Make the folder ready for all ranks; called by one of them before any other goes on."""
        self.parts.mkdir(parents=True, exist_ok=True)
        for part in self.parts.glob("*.jsonl"):
            os.truncate(part, read_samples(part.read_bytes()).good_bytes)
        write(self.parts / "run.json", dumps(identity))

    def clear(self) -> None:
        """Forget everything."""
        for path in (self.rounds, self.summary, *self.folder.glob("gate-rank-*.json")):
            path.unlink(missing_ok=True)
        shutil.rmtree(self.parts, ignore_errors=True)

    def recorded(self) -> dict[int, list[Response]]:
        """All whole samples, by their index."""
        files = [path for path in (self.rounds, *sorted(self.parts.glob("*.jsonl"))) if path.is_file()]
        return {index: found for path in files for index, found in read_samples(path.read_bytes()).samples.items()}

    def append(self, rank: int, responses: Sequence[Response]) -> None:
        """Put one whole sample on record, in one write."""
        with (self.parts / f"rank-{rank}.jsonl").open("ab") as file:
            file.write(lines_of(responses).encode())

    def finish(self, responses: Sequence[Response], summary: Mapping[str, object]) -> None:
        """Replace parts by the two files that stay."""
        write(self.rounds, lines_of(responses))
        write(self.summary, json.dumps(summary, indent=1, allow_nan=False) + "\n")
        shutil.rmtree(self.parts)

    def _identity(self) -> dict[str, object] | None:
        """Of the run that is here, under way or finished."""
        for path in (self.parts / "run.json", self.summary):
            if path.is_file():
                return read_object(path)
        return None


def differences(before: Mapping[str, object], now: Mapping[str, object], prefix: str = "") -> list[str]:
    """Keys of `now` that stood otherwise before, as `setting.max_new_tokens` where they lie deeper."""
    names: list[str] = []
    for key, value in now.items():
        other = before.get(key)
        if isinstance(value, dict) and isinstance(other, dict):
            inner, outer = cast(Mapping[str, object], value), cast(Mapping[str, object], other)
            names += differences(outer, inner, f"{prefix}{key}.")
        elif value != other:
            names.append(prefix + key)
    return names


def read_object(path: Path) -> dict[str, object]:
    """A JSON object that an earlier run left."""
    try:
        return cast(dict[str, object], json.loads(path.read_text(encoding="utf-8")))
    except ValueError as error:
        raise UserError(f"{path} is damaged ({error}); remove it, or add --overwrite") from error


@dataclass(frozen=True)
class Found:
    """What a file of responses holds, up to where it is whole."""

    samples: dict[int, list[Response]]
    good_bytes: int


def read_samples(data: bytes) -> Found:
    """Read whole samples; the rest of a file that was cut off is left out."""
    stream, samples, good = io.BytesIO(data), dict[int, list[Response]](), 0
    waiting: list[Response] = []
    while (response := read_response(stream)) is not None:
        waiting.append(response)
        header = response.header
        if header["turn"] == header["turns"] - 1:
            samples[header["sample"]], waiting, good = waiting, [], stream.tell()
    return Found(samples, good)


def read_response(stream: io.BytesIO) -> Response | None:
    """A header line and its rounds; None at the end or where lines are missing or broken."""
    try:
        header = cast(HeaderJson, read_line(stream))
        return Response(header, [cast(RoundJson, read_line(stream)) for _ in range(header["rounds"])])
    except (ValueError, KeyError, TypeError):
        return None


def read_line(stream: io.BytesIO) -> object:
    """One line of JSON. Raises ValueError where it is cut off."""
    line = stream.readline()
    if not line.endswith(b"\n"):
        raise ValueError("the line is cut off")
    return json.loads(line)


def lines_of(responses: Sequence[Response]) -> str:
    """A header line and its rounds, for each response."""
    return "".join(f"{dumps(line)}\n" for response in responses for line in (response.header, *response.rounds))


def write(path: Path, text: str) -> None:
    """All of it or nothing."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)
