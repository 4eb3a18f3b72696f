"""Training batches and where they come from: samples of tokens, and which of them are labels."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor
from torch.nn.functional import pad

from dloop.errors import UserError
from dloop.train.parallel import ALONE, Share, most_of

BUCKET = 32  # batches sorted by length together: little padding, little loss of randomness
PAD_TO = 64  # few distinct widths, so that compiled kernels are reused


@dataclass(frozen=True)
class TrainBatch:
    """Right-padded sequences. `loss_mask` marks the tokens the target wrote (labels); padding is unmarked."""

    tokens: Int[Tensor, "B T"]
    loss_mask: Bool[Tensor, "B T"]
    lengths: Int[Tensor, " B"]
    starts: Int[Tensor, " B"]  # where each sample stands in its data
    offsets: Int[Tensor, " B"] | None = None  # RoPE position of each sample's first token, drawn a step; None: 0

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.tokens, self.loss_mask, self.lengths, self.starts

    def to(self, device: torch.device) -> "TrainBatch":
        return TrainBatch(*(tensor.to(device, non_blocking=True) for tensor in self.tensors()))

    def shifted(self, position_offset_max: int, share: Share = ALONE) -> "TrainBatch":
        """The same samples at positions drawn afresh: each begins at one of 0..position_offset_max - length.

        No host copy. Source: the published README's `--position-offset-max`.
        """
        room = position_offset_max - self.lengths + 1
        drawn = share.rows(torch.rand(len(room) * share.world, device=room.device))
        return replace(self, offsets=(drawn * room).long())

    def widened(self, width: int) -> "TrainBatch":
        """The same samples with more padding."""
        more = width - self.tokens.shape[1]
        return replace(self, tokens=pad(self.tokens, (0, more)), loss_mask=pad(self.loss_mask, (0, more)))


class Sample(NamedTuple):
    """The tokens of one sample, and which of them the target wrote (labels)."""

    tokens: np.ndarray
    labels: np.ndarray  # bool


@dataclass(frozen=True)
class TokenFile:
    """All samples of a data set: `flat` holds prompt then response of every sample, `lens` both lengths."""

    flat: np.ndarray
    lens: np.ndarray  # the second column counts from the first label on
    starts: np.ndarray
    max_length: int
    labels: np.ndarray | None = None  # for each token of `flat`; None: everything after a sample's prompt

    @classmethod
    def read(cls, path: Path, max_length: int, flag: str = "--train-data-path") -> "TokenFile":
        """Read an .npz with `flat` [total] and `lens` [samples, 2]. Samples are cut at `max_length` tokens.

        `flag`: what named it. Raises UserError for a file that is none, is damaged, or whose arrays cannot be tokens
        and lengths.
        """
        if not path.is_file():
            raise UserError(
                f"{flag} {path} does not exist; give conversations (.jsonl) or tokens (.npz with 'flat' and 'lens')"
            )
        try:
            with np.load(path) as data:
                flat, lens = data["flat"], data["lens"]
        except Exception as error:  # a damaged archive raises whatever zipfile, zlib, struct and numpy trip over
            raise UserError(
                f"{path} is not a whole token file ({type(error).__name__}: {error}); write it again as .npz with "
                "'flat' and 'lens'"
            ) from error
        check_arrays(path, flat, lens, max_length)
        lens = lens.astype(np.int64)
        starts = np.concatenate([[0], lens.sum(1).cumsum()[:-1]])
        return cls(flat, lens, starts, max_length)

    @classmethod
    def of(cls, samples: Sequence[Sample], max_length: int) -> "TokenFile":
        """Samples with labels anywhere, such as the answers of a conversation. Raises UserError without a sample."""
        if not samples:
            raise UserError("the data has no sample left to train on; see the summary above for the reasons")
        totals = np.array([len(sample.tokens) for sample in samples], np.int64)
        prompts = [int(np.argmax(sample.labels)) if sample.labels.any() else len(sample.labels) for sample in samples]
        lens = np.stack([np.array(prompts, np.int64), totals - prompts], 1)
        starts = np.concatenate([[0], totals.cumsum()[:-1]])
        flat, labels = (np.concatenate(parts) for parts in zip(*samples, strict=True))
        return cls(flat, lens, starts, max_length, labels)

    def __len__(self) -> int:
        return len(self.lens)

    def contents(self) -> list[np.ndarray]:
        """All that decides the samples, for a fingerprint."""
        return [self.flat, self.lens] + ([] if self.labels is None else [self.labels])

    def sample(self, index: int) -> Sample:
        """One sample, cut at `max_length`."""
        prompt, response = (int(count) for count in self.lens[index])
        start, length = int(self.starts[index]), min(prompt + response, self.max_length)
        tokens = self.flat[start : start + length].astype(np.int64)
        if self.labels is None:
            return Sample(tokens, np.arange(length) >= prompt)
        return Sample(tokens, self.labels[start : start + length])

    def collate(self, indices: np.ndarray) -> TrainBatch:
        samples = [self.sample(int(index)) for index in indices]
        lengths = torch.tensor([len(sample.tokens) for sample in samples])
        width = -(-int(lengths.max()) // PAD_TO) * PAD_TO
        tokens = torch.zeros(len(samples), width, dtype=torch.int64)
        mask = torch.zeros(len(samples), width, dtype=torch.bool)
        for row, sample in enumerate(samples):
            tokens[row, : len(sample.tokens)] = torch.from_numpy(sample.tokens)
            mask[row, : len(sample.tokens)] = torch.from_numpy(sample.labels)
        return TrainBatch(tokens, mask, lengths, torch.from_numpy(self.starts[indices]))


def check_arrays(path: Path, flat: np.ndarray, lens: np.ndarray, max_length: int) -> None:
    """Raises UserError unless these are whole numbers, lengths that add up, and something to train on."""
    for name, array, shape in (("flat", flat, "[tokens]"), ("lens", lens, "[samples, 2]")):
        if not np.issubdtype(array.dtype, np.integer):
            raise UserError(f"{path}: {name!r} holds {array.dtype}, not whole numbers; store it as integers")
        if array.ndim != len(shape.split(",")) or (name == "lens" and array.shape[1] != 2):
            raise UserError(f"{path}: {name!r} has the shape {list(array.shape)}; store it as {shape}")
    if len(lens) and (lens.min() < 0 or lens.max() > len(flat)):
        raise UserError(f"{path}: 'lens' has {lens.min()}..{lens.max()}; lengths lie in 0..{len(flat)}, all tokens")
    if lens.sum() != len(flat):
        raise UserError(f"{path}: 'lens' adds up to {lens.sum()}, but 'flat' has {len(flat)} tokens; write both anew")
    empty = np.flatnonzero(lens.sum(1) == 0)
    if len(empty):
        raise UserError(f"{path}: sample {empty[0]} (from 0) has no token; leave it out of 'lens'")
    if not ((lens[:, 1] > 0) & (lens[:, 0] < max_length)).any():
        raise UserError(
            f"{path}: none of {len(lens)} samples has a response token within --max-length {max_length}; the second "
            "column of 'lens' counts them"
        )


def plan_epoch(lengths: np.ndarray, batch_size: int, seed: int, epoch: int) -> list[np.ndarray]:
    """Which samples form which batch of an epoch: a pure function of its arguments, so that a run can resume.

    Samples of like length stand together (inside windows of `BUCKET` batches). What does not fill a last batch is left
    out, at random and not by length.
    """
    order = np.random.default_rng([seed, epoch]).permutation(len(lengths))
    order = order[: len(order) // batch_size * batch_size]
    batches: list[np.ndarray] = []
    window = batch_size * BUCKET
    for start in range(0, len(order), window):
        part = order[start : start + window]
        part = part[np.argsort(lengths[part], kind="stable")]
        batches += [part[i : i + batch_size] for i in range(0, len(part), batch_size)]
    return [batches[i] for i in np.random.default_rng([seed, epoch, 1]).permutation(len(batches))]


def batches(
    data: TokenFile, batch_size: int, seed: int, first_step: int, num_steps: int, share: Share = ALONE
) -> Iterator[TrainBatch]:
    """Batches of steps first_step..num_steps-1; epochs follow one another without a break.

    `batch_size` counts the samples of all processes; each reads its own alone, as wide as the widest of all.
    """
    lengths = np.minimum(data.lens.sum(1), data.max_length)
    plan: list[np.ndarray] = []
    epoch = -1
    per_epoch = len(plan_epoch(lengths, batch_size, seed, 0))
    assert per_epoch, "fewer samples than a batch takes"
    for step in range(first_step, num_steps):
        if step // per_epoch != epoch:
            epoch = step // per_epoch
            plan = plan_epoch(lengths, batch_size, seed, epoch)
        batch = data.collate(plan[step % per_epoch][share.rank :: share.world])
        yield batch.widened(most_of(batch.tokens.shape[1]))


def samples_of_batch(data: TokenFile, batch_size: int, seed: int, index: int) -> np.ndarray:
    """The numbers of the samples in one of the batches, counted from the first step on."""
    lengths = np.minimum(data.lens.sum(1), data.max_length)
    epoch, place = divmod(index, len(data) // batch_size)
    return plan_epoch(lengths, batch_size, seed, epoch)[place]
