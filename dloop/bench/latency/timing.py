"""Clocks: work timed in turns, medians and quartiles; the two ceilings of a machine."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

WARM_UPS = 3  # of every shape, before anything is timed
COPY_BYTES = {"cuda": 2**30, "cpu": 2**27}  # far beyond the caches
PRODUCT_SIZE = {"cuda": 8192, "cpu": 1024}
CEILING_REPEATS = 20


def nothing() -> None:
    """Nothing to prepare."""


@dataclass(frozen=True)
class Job:
    """One way to do a piece of work; the preparation is not timed."""

    name: str
    work: Callable[[], object]
    prepare: Callable[[], object] = nothing


class Spread(NamedTuple):
    """Milliseconds."""

    median: float
    low: float  # first quartile
    high: float  # third quartile


def warm_up(jobs: Sequence[Job], device: torch.device) -> None:
    """Let compilation, capture and the libraries' own choices happen now."""
    for _ in range(WARM_UPS):
        for job in jobs:
            job.prepare()
            job.work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # sync


def in_turns(jobs: Sequence[Job], repeats: int, device: torch.device) -> dict[str, Spread]:
    """Time every job `repeats` times, one after the other in turns, so that a drift of the machine meets them all."""
    times: dict[str, list[float]] = {job.name: [] for job in jobs}
    for _ in range(repeats):
        for job in jobs:
            job.prepare()
            times[job.name].append(elapsed_ms(job.work, device))
    return {name: spread(found) for name, found in times.items()}


def spread(times: Sequence[float]) -> Spread:
    """Median and quartiles."""
    low, median, high = np.percentile(np.array(times), [25, 50, 75])
    return Spread(float(median), float(low), float(high))


def elapsed_ms(work: Callable[[], object], device: torch.device) -> float:
    """Milliseconds of one run, from an idle device until all its work is done: GPU events, host clock on a CPU."""
    if device.type != "cuda":
        started = time.perf_counter()
        work()
        return 1000 * (time.perf_counter() - started)
    with torch.cuda.device(device):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize(device)  # sync
        start.record()
        work()
        stop.record()
        torch.cuda.synchronize(device)  # sync
        return start.elapsed_time(stop)


class Ceilings(NamedTuple):
    """What this machine does at most, measured in the same run."""

    bandwidth_bytes_per_s: float  # bytes read plus bytes written
    matrix_flop_per_s: float

    def floor_ms(self, num_bytes: float, flop: float) -> float:
        """No version runs much faster: the bytes it must move, or the arithmetic it must do."""
        return 1000 * max(num_bytes / self.bandwidth_bytes_per_s, flop / self.matrix_flop_per_s)


def measure_ceilings(device: torch.device, dtype: torch.dtype) -> Ceilings:
    """A large copy and a large matrix product in this dtype, on random values: zeros are faster."""
    count, size = COPY_BYTES[device.type] // dtype.itemsize, PRODUCT_SIZE[device.type]
    source = torch.randn(count, device=device, dtype=dtype)
    copy = torch.empty_like(source)
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    product = torch.empty_like(a)
    jobs = [Job("copy", lambda: copy.copy_(source)), Job("product", lambda: torch.mm(a, b, out=product))]
    warm_up(jobs, device)
    taken = in_turns(jobs, CEILING_REPEATS, device)
    return Ceilings(
        bandwidth_bytes_per_s=2 * count * dtype.itemsize / (taken["copy"].median / 1000),
        matrix_flop_per_s=2 * size**3 / (taken["product"].median / 1000),
    )
