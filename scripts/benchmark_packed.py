"""Time packed decoding: plain, host and loop at several numbers of live sequences; JSON after each of them.

The prompts are a set's, each in the target's chat template; all are decoded each time, so few live sequences take long.
"""

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import dloop
from dloop.batch import generate_many
from dloop.bench.decode import clock, peak_memory
from dloop.bench.store import write
from dloop.bench.tasks import load
from dloop.chat import load_tokenizer
from dloop.cli.answer import device_of
from dloop.cli.args import option, parse
from dloop.drafters.host import HostDrafter
from dloop.gate import NEVER_OPENS
from dloop.records import hardware, versions
from dloop.settings import Settings
from dloop.targets.hf import HFTarget


@dataclass(frozen=True, kw_only=True)
class Command:
    """Time packed decoding: tokens a second for plain, host and loop at several numbers of live sequences."""

    model: str = option("smollm2", "target")
    draft_model: str = option("demo", "drafter")
    dataset: str = option("gsm8k", "whose prompts are decoded, the first turn of each")
    data_dir: Path | None = option(None, "folder of DATASET.jsonl; else it is downloaded")
    max_samples: int = option(64, "prompts")
    max_new_tokens: int = option(128, "of a text; stop tokens end it earlier")
    live: tuple[int, ...] = option((1, 4, 16, 32), "sequences decoded at a time")
    loop_gate: float = option(-0.5, "of the loop")
    dtype: str = option("bfloat16", "float32 or bfloat16")
    device: str = option("auto", "cpu, cuda ...; auto takes the GPU if there is one")
    repeats: int = option(3, "timed passes over all prompts, the settings in turns, after one to warm up")
    output: Path = option(Path("packed.json"), "where the figures go")


@dataclass(frozen=True)
class Pass:
    """All prompts once: texts in the prompts' order."""

    texts: list[list[int]]
    seconds: float
    rounds: int


Way = tuple[HostDrafter | None, Settings]


def decode_all(target: HFTarget, way: Way, prompts: list[list[int]], live: int) -> Pass:
    """Decode all prompts, at most `live` at a time."""
    started = clock(target.device)
    done = sorted(generate_many(target, way[0], prompts, way[1], live), key=lambda text: text.index)
    seconds = clock(target.device) - started
    return Pass([text.tokens for text in done], seconds, sum(len(text.rounds) for text in done))


def measure(
    target: HFTarget, ways: dict[str, Way], prompts: list[list[int]], live: int, repeats: int
) -> Iterator[dict[str, object]]:
    """One row a way: the median pass, the fastest and the slowest; how many texts are plain decoding's."""
    passes: dict[str, list[Pass]] = {name: [] for name in ways}
    for _ in range(repeats + 1):
        for name, way in ways.items():
            passes[name].append(decode_all(target, way, prompts, live))
    plain = passes["plain"][0].texts
    for name, (first, *timed) in passes.items():
        count, seconds = sum(map(len, first.texts)), sorted(each.seconds for each in timed)
        yield {
            "live": live,
            "setting": name,
            "tokens": count,
            "tokens_per_s": count / seconds[len(seconds) // 2],
            "range_tokens_per_s": [count / seconds[-1], count / seconds[0]],
            "rounds": first.rounds,  # 0: plain decoding that stayed on the device
            "texts": len(plain),
            "texts_like_plain": sum(a == b for a, b in zip(first.texts, plain, strict=True)),
            "peak_memory_bytes": peak_memory(target.device),
        }


def main(words: list[str]) -> int:
    command = parse(Command, "benchmark_packed.py", words)
    target = dloop.load_target(command.model, dtype=command.dtype, device=device_of(command.device))
    drafter, tokenizer = dloop.load_drafter(command.draft_model, target), load_tokenizer(target.folder, target.name)
    assert tokenizer is not None
    samples = load(command.dataset, command.data_dir, command.max_samples).samples
    prompts = [tokenizer.encode_chat([{"role": "user", "content": sample.turns[0]}]) for sample in samples]
    host, loop = (
        Settings(max_new_tokens=command.max_new_tokens, loop_gate=g) for g in (NEVER_OPENS, command.loop_gate)
    )
    ways: dict[str, Way] = {"plain": (None, host), "host": (drafter, host), "loop": (drafter, loop)}
    facts = {"schema": 1, "command": asdict(command), "hardware": hardware(target.device), "versions": versions()}
    rows: list[dict[str, object]] = []
    for live in command.live:
        for row in measure(target, ways, prompts, live, command.repeats):
            rows.append(row)
            print(json.dumps(row), flush=True)
        write(command.output, json.dumps({**facts, "rows": rows}, indent=1, default=str) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
