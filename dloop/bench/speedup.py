"""Speed-ups: a ratio of two summaries, or the reason why there is none."""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple, cast

from dloop.bench.store import read_object, slug
from dloop.records import Json

Summary = Mapping[str, object]
SAMPLING = ("max_new_tokens", "temperature", "top_k", "top_p")


class Speedup(NamedTuple):
    """Baseline's time per token over this one's; one of the two is None."""

    value: float | None
    reason: str | None


def machine(hardware: Mapping[str, Json]) -> str:
    """The GPU's name, or the CPU's with the number of threads, which decides its speed."""
    return str(hardware["gpu"] or f"{hardware['cpu']}, {hardware['threads']} threads")


def device_name(hardware: Mapping[str, Json]) -> str:
    """The GPU's or the CPU's name."""
    return str(hardware["gpu"] or hardware["cpu"])


def baseline_folder(output_dir: Path, target: str, device: str, dataset: str) -> Path:
    """Where the baseline of a target on a device lies."""
    return output_dir / slug(target) / f"baseline--{slug(device)}" / dataset


def find_baseline(output_dir: Path, target: str, device: str, dataset: str) -> Summary | None:
    """The baseline measured on this device, else one of another device (whose name will be the reason), else None."""
    here = baseline_folder(output_dir, target, device, dataset)
    others = sorted((output_dir / slug(target)).glob(f"baseline--*/{dataset}"))
    found = [folder / "summary.json" for folder in (here, *others) if (folder / "summary.json").is_file()]
    return read_object(found[0]) if found else None


def speedup(summary: Summary, baseline: Summary | None) -> Speedup:
    """Ratio of the mean times per output token, only between runs of the same work on the same machine."""
    if summary["draft"] is None:
        return Speedup(None, "this is the baseline")
    if baseline is None:
        return Speedup(None, "no baseline: measure it with --baseline")
    theirs, ours = facts(baseline), facts(summary)
    for name in ours:
        if theirs[name] != ours[name]:
            shown = f": {theirs[name]} there, {ours[name]} here" if name in SHOWN else ""
            return Speedup(None, f"the baseline has another {name}{shown}")
    slow, fast = baseline["time_per_output_token_ms"], summary["time_per_output_token_ms"]
    if not isinstance(slow, float) or not isinstance(fast, float) or fast <= 0:
        return Speedup(None, "no time was measured")
    return Speedup(slow / fast, None)


SHOWN = ("machine", "dtype", "engine", "max_new_tokens", "temperature", "top_k", "top_p")


def facts(summary: Summary) -> dict[str, object]:
    """What must be the same for a ratio of times to mean anything."""
    setting = cast(Summary, summary["setting"])
    hashes = cast(Summary, summary["checkpoint_sha256"])
    failures = cast(list[Summary], summary["failure_messages"])
    return {
        "machine": machine(cast(Mapping[str, Json], summary["hardware"])),
        "dtype": summary["dtype"],
        "engine": summary["engine"],
        "set of prompts": (summary["data_sha256"], summary["template_sha256"]),
        "choice of samples": summary["samples"],
        **{name: setting[name] for name in SAMPLING},
        "target checkpoint": hashes["target"],
        "list of failed samples": sorted((str(f["sample"]), str(f["turn"])) for f in failures),
    }
