"""The loop's gain for one family on one GPU, from nothing, in calls of a few minutes.

The target answers prompts; a host drafter is trained on its answers, then twice as many steps again: with a loop stage,
and as long without one (the control). All are measured in turn on the paper's sets, and the report is written.
Every step is one `dloop` command. `campaign.jsonl` holds a row of each: what ran, for how long, how it ended. Finished
steps are not run again; what the time ends goes on in the next call: repeat until the exit status is 0.
"""

import json
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from glob import escape
from importlib import import_module
from pathlib import Path
from typing import Literal

import numpy as np
from transformers import AutoConfig

from dloop.cli.args import option, parse
from dloop.cli.bench import others
from dloop.cli.main import COMMANDS
from dloop.drafters.config import DSparkConfig
from dloop.drafters.dflash import DFlashConfig
from dloop.drafters.domino import DominoConfig
from dloop.drafters.eagle3 import Eagle3Config, published_taps
from dloop.drafters.families import write_config
from dloop.drafters.host import HostConfig
from dloop.errors import UserError
from dloop.offline import smollm2
from dloop.records import Json

AGAIN = 75  # exit status: the time is up, the same call goes on (EX_TEMPFAIL of sysexits.h)
STOPPED = 128 + signal.SIGINT
EAGLE3_WORDS = 16384
GRACE_S = 90.0  # for a command to save what it has
SETS = "gsm8k,math500,aime25,humaneval,mbpp,livecodebench,mt-bench,alpaca"
Run = Callable[[Sequence[str], float], int]


@dataclass(frozen=True, kw_only=True)
class Campaign:
    """Data, host, loop-aware drafter and control of one family, measured on the paper's sets."""

    prompts: Path | None = option(None, "questions to learn from, in random order, as for dloop data", group="data")
    model: str = option("smollm2", "the target: smollm2, a folder or a hub id", group="models")
    family: Literal["dspark", "dflash", "domino", "eagle3"] = option("dspark", "of the drafter", group="models")
    layers: int = option(2, "of a block drafter, copied from the target's last ones", group="models")
    stage: int = option(3, "tokens of a block drafter's stage", group="models")
    rank: int = option(32, "of DSpark's Markov head and Domino's embedding; a quarter of its GRU's", group="models")
    mask_token_id: int = option(3, "a token that no text holds, of block drafters", group="models")
    draft_vocab_size: int | None = option(
        None, "words that the drafter can name; unless given EAGLE-3 16384, others all", group="models"
    )
    tokens: Path | None = option(None, "answers that are there already, in place of new ones (.npz)", group="data")
    greedy_samples: int = option(40000, "answers at temperature 0", group="data")
    sampled_samples: int = option(15000, "answers at temperature 0.7, top-p 0.8, top-k 20", group="data")
    answer_tokens: int = option(256, "most tokens of an answer", group="data")
    live: int = option(1024, "answers decoded at once", group="data")
    host_steps: int = option(16000, "of the host's training", group="training")
    loop_steps: int = option(4500, "of loop-aware training, and of the control", group="training")
    learning_rate: float = option(2e-3, "peak of the host's training; half of it in the others", group="training")
    batch_size: int = option(48, "sequences of a step", group="training")
    anchors: int = option(64, "of a sequence", group="training")
    max_length: int = option(512, "tokens of a sample", group="training")
    max_stage: int = option(3, "deepest loop stage of training", group="training")
    fast: bool = option(True, "compile, CUDA graphs and cached features: a GPU", group="training")
    dataset: str = option(SETS, "sets to measure", group="measurement")
    data_dir: Path | None = option(None, "a folder of NAME.jsonl, in place of a download", group="measurement")
    max_samples: int = option(16, "of each set", group="measurement")
    max_new_tokens: int = option(256, "most tokens of a measured answer", group="measurement")
    gates: list[str] = option(["-0.5"], "open gates to measure; the first is the report's", group="measurement")
    bench: str = option("", "more flags of dloop bench, without their dashes: 'tree-budget=0'", group="measurement")
    dtype: Literal["bfloat16", "float32"] = option("bfloat16", "arithmetic", group="run")
    output_dir: Path = option(Path("outputs/reproduce-small"), "where everything goes", group="run")
    minutes: float = option(8.5, "of this call; more calls go on", group="run")

    def __post_init__(self) -> None:
        """Raises UserError for what no step could use."""
        if not self.minutes > 0:
            raise UserError(f"--minutes {self.minutes} must be a number > 0")
        if not self.gates:
            raise UserError("--gates names none; give at least one, such as -0.5")
        for path in filter(None, (self.prompts, self.tokens, self.data_dir)):
            if not path.exists():
                raise UserError(f"{path} does not exist; correct --prompts, --tokens or --data-dir")
        if (self.prompts is None) == (self.tokens is None):
            raise UserError("give --prompts to have the target answer them, or --tokens with answers, not both")


def new_drafter(given: Campaign) -> HostConfig:
    """A drafter of the target's own shape."""
    try:
        target = AutoConfig.from_pretrained(smollm2() if given.model == "smollm2" else given.model)
    except (OSError, ValueError) as error:
        raise UserError(f"--model {given.model}: no config.json can be read; give a folder or a hub id") from error
    depth = target.num_hidden_layers
    head_dim = getattr(target, "head_dim", None) or target.hidden_size // target.num_attention_heads
    shape = {
        "hidden_size": target.hidden_size, "intermediate_size": target.intermediate_size, "head_dim": head_dim,
        "num_heads": target.num_attention_heads, "num_kv_heads": target.num_key_value_heads,
        "vocab_size": target.vocab_size, "rms_norm_eps": target.rms_norm_eps,
        "rope_theta": target.rope_parameters["rope_theta"], "max_positions": target.max_position_embeddings,
        "attention_bias": False, "num_target_layers": depth,
    }  # fmt: skip
    if given.family == "eagle3":
        words = min(given.draft_vocab_size or EAGLE3_WORDS, target.vocab_size)
        taps = published_taps(depth)
        return Eagle3Config(
            **shape, target_hidden_size=target.hidden_size, draft_vocab_size=words, target_layer_ids=taps
        )
    taps = tuple(sorted({max(0, depth - 2 - back * (depth // 3)) for back in range(3)}))
    shift = 1 if given.family == "dflash" else 0
    block = {
        **shape, "num_layers": given.layers, "block_size": given.stage + shift, "label_shift": shift,
        "mask_token_id": given.mask_token_id, "target_layer_ids": taps,
        "draft_vocab_size": given.draft_vocab_size,
    }  # fmt: skip
    match given.family:
        case "dflash":
            return DFlashConfig(**block)
        case "domino":
            sizes = {"emb_dim": given.rank, "gru_hidden_dim": 4 * given.rank, "pure_draft_prefix_len": 1}
            return DominoConfig(**block, **sizes)
        case _:
            head = {"markov_rank": given.rank, "markov_head_type": "vanilla"}
            return DSparkConfig(**block, **head, confidence_head=True, confidence_with_markov=True)


def answers(given: Campaign, name: str, samples: int, *sampling: str) -> list[str]:
    """The command that has the target answer; its data are NAME.npz."""
    return [
        "data", "--model", given.model, "--prompts", str(given.prompts), "--output",
        str(given.output_dir / f"{name}.npz"), "--max-samples", str(samples), "--max-prompt-tokens",
        str(given.max_length - given.answer_tokens), "--max-new-tokens", str(given.answer_tokens), "--live",
        str(given.live), "--dtype", given.dtype, "--resume", *sampling,
    ]  # fmt: skip


def training(given: Campaign, name: str, *more: str) -> list[str]:
    """The command that trains a drafter; its checkpoints are below NAME/."""
    fast = ["--compile", "--cache-features", "--cuda-graphs"]
    if given.family == "eagle3":  # three times as fast as its dense attention
        fast += ["--attention", "flex"]
    anchors = [] if given.family == "eagle3" else ["--num-anchors", str(given.anchors)]
    weights = ["--dspark-ce-loss-alpha", "1", "--dspark-l1-loss-alpha", "1"] if given.family == "dspark" else []
    tokens = given.tokens or given.output_dir / "tokens.npz"
    return [
        "train", "--target-model-path", given.model, "--train-data-path", str(tokens), "--output-dir",
        str(given.output_dir / name), "--max-length", str(given.max_length), "--batch-size",
        str(given.batch_size), *anchors, *weights, *(fast if given.fast else []), "--dtype", given.dtype,
        "--save-interval", "1000000", "--resume", *more,
    ]  # fmt: skip


def host_alone(given: Campaign) -> list[str]:
    """The flags that leave the loop stage out."""
    return ["--ttt-length-dist", "7"] if given.family == "eagle3" else ["--dloop-max-stage", "0"]


def loop_aware(given: Campaign) -> list[str]:
    """The flags of the loop stage; EAGLE-3's unrolls are whole stages."""
    if given.family == "eagle3":
        return ["--ttt-length-dist", ",".join(str(7 * stages) for stages in range(1, given.max_stage + 1))]
    return ["--dloop-max-stage", str(given.max_stage)]


def measuring(given: Campaign) -> list[str]:
    """The command that measures plain decoding and every drafter, gate closed and open, in turn."""
    drafters = given.output_dir / "drafters"
    place = {name: shlex.quote(f"draft-model={drafters / name}") for name in ("host", "host_as_long", "loop")}
    beside = ["baseline", *(f"{drafter} loop-gate=1" for drafter in place.values())]
    beside += [f"{place['host_as_long']} loop-gate={given.gates[0]}"]
    beside += [f"loop-gate={gate}" for gate in given.gates[1:]]
    source = [] if given.data_dir is None else ["--data-dir", str(given.data_dir)]
    return [
        "bench", "--model", given.model, "--draft-model", str(drafters / "loop"), f"--loop-gate={given.gates[0]}",
        "--dataset", given.dataset, *source, "--max-samples", str(given.max_samples), "--max-new-tokens",
        str(given.max_new_tokens), "--dtype", given.dtype, "--output-dir", str(given.output_dir / "results"),
        *(f"--{flag}" for flag in shlex.split(given.bench)), "--beside", *beside,
    ]  # fmt: skip


def reporting(given: Campaign) -> list[str]:
    """The command that writes the list, the page and the picture of everything that was measured."""
    results, out = given.output_dir / "results", given.output_dir
    files = sorted(results.rglob("summary.json"))
    folders = [path.parent for path in files if json.loads(path.read_text())["draft"] is not None]
    return [
        "report", "--results", str(results), "--compare", "host_as_long", "dloop", "--name",
        *(f"{escape(str(folder))}={setting_of(given, folder)}" for folder in folders), "--gain", str(out / "gain.json"),
        "--markdown", str(out / "gain.md"), "--plot", str(out / "gain.png"),
    ]  # fmt: skip


def setting_of(given: Campaign, folder: Path) -> str:
    """What the paper's ablation calls a run: by its drafter, and by whether its gate can open."""
    summary = json.loads((folder / "summary.json").read_text())
    drafter, gate = Path(summary["draft"]).name, str(summary["setting"]["loop_gate"])
    if gate == "1.0":
        return {"loop": "trained"}.get(drafter, drafter)
    name = {"loop": "dloop", "host_as_long": "loop"}[drafter]
    return name if gate in (given.gates[0], str(as_number(given.gates[0]))) else f"{name}:{gate}"


def as_number(gate: str) -> float | str:
    """A gate as results have it; "auto" is its own name."""
    return gate if gate.startswith("auto") else float(gate)


def write_drafter(given: Campaign) -> None:
    """The new drafter's config.json."""
    config = write_config(new_drafter(given), given.dtype)
    (given.output_dir / "config.json").write_text(json.dumps(config, indent=1) + "\n")


def join_answers(given: Campaign) -> None:
    """One token file of both: greedy answers, then sampled ones."""
    parts = [np.load(given.output_dir / f"{name}.npz") for name in ("greedy", "sampled")]
    joined = {key: np.concatenate([part[key] for part in parts]) for key in ("flat", "lens")}
    np.savez(given.output_dir / "tokens.npz", **joined)


def link(given: Campaign, name: str) -> None:
    """A name for a run's last checkpoint that does not tell its step: drafters/NAME."""
    last = max((given.output_dir / name).glob("epoch_*_step_*"), key=lambda path: int(path.name.rpartition("_")[2]))
    place = given.output_dir / "drafters" / name
    place.parent.mkdir(exist_ok=True)
    place.unlink(missing_ok=True)
    place.symlink_to(last.resolve())


@dataclass(frozen=True)
class Step:
    """A `dloop` command, and what is done here when it has ended well."""

    name: str
    command: Callable[[Campaign], list[str]]
    afterwards: Callable[[Campaign], None] = lambda given: None


def plan(given: Campaign) -> list[Step]:
    """All steps in their order."""
    sampling = ("--temperature", "0.7", "--top-p", "0.8", "--top-k", "20", "--seed", "1")
    start = given.output_dir / "drafters" / "host"

    def trained(name: str, steps: int, more: Callable[[Campaign], list[str]], *begin: str) -> Step:
        rate = given.learning_rate if name == "host" else given.learning_rate / 2
        flags = ("--max-steps", str(steps), "--learning-rate", str(rate), *begin)
        return Step(name, lambda given: training(given, name, *flags, *more(given)), partial(link, name=name))

    from_host = ("--draft-init-path", str(start), "--seed", "43")
    data = [
        Step("greedy", lambda given: answers(given, "greedy", given.greedy_samples)),
        Step("sampled", lambda given: answers(given, "sampled", given.sampled_samples, *sampling), join_answers),
    ]
    return [
        *(data if given.tokens is None else []),
        trained("host", given.host_steps, host_alone, "--draft-config-path", str(given.output_dir / "config.json")),
        trained("loop", given.loop_steps, loop_aware, *from_host),
        trained("host_as_long", given.loop_steps, host_alone, *from_host),
        Step("measured", measuring),
        Step("report", reporting),
    ]


def run_dloop(words: Sequence[str], seconds: float) -> int:
    """The exit status of a `dloop` command; AGAIN or STOPPED if the time or the user ended it, after it has saved."""
    command = [sys.executable, "-m", "dloop", *words]
    with subprocess.Popen(command, process_group=0) as process:  # a terminal's Ctrl-C reaches it once, from here
        try:
            return process.wait(seconds)
        except (subprocess.TimeoutExpired, KeyboardInterrupt) as error:
            status = STOPPED if isinstance(error, KeyboardInterrupt) else AGAIN
        process.send_signal(signal.SIGINT)
        try:
            process.wait(GRACE_S)
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            process.kill()
    return status


def rows_of(log: Path) -> list[dict[str, Json]]:
    """What earlier calls wrote down. Raises UserError for a line that was not written to its end."""
    rows: list[dict[str, Json]] = []
    for number, line in enumerate(log.read_text().splitlines() if log.exists() else [], 1):
        try:
            rows.append(json.loads(line))
        except ValueError as error:
            raise UserError(f"{log}, line {number}, is damaged; remove it, and its step runs again") from error
    return rows


def refuse_another(given: Campaign, rows: Sequence[dict[str, Json]]) -> None:
    """Raises UserError where a step before the measurement has ended with other settings: later ones built on it."""
    for step in plan(given)[:-2]:
        words = step.command(given)
        if any(row["step"] == step.name and row["exit"] == 0 and row["command"] != words for row in rows):
            raise UserError(f"{given.output_dir} holds {step.name!r} of other settings; give another --output-dir")


def check(given: Campaign) -> None:
    """Raises UserError for flags that a later step would refuse, the settings measured beside others included."""
    for step in plan(given)[:-1]:  # the report's are made of results
        name, *words = step.command(given)
        command = parse(import_module(COMMANDS[name].module).Command, f"dloop {name}", words)
        if step.name == "measured":
            others(command)


def go_on(given: Campaign, run: Run = run_dloop) -> int:
    """Run what is left of the plan as far as the time goes; the exit status."""
    check(given)
    log, end = given.output_dir / "campaign.jsonl", time.monotonic() + 60 * given.minutes
    refuse_another(given, rows_of(log))
    given.output_dir.mkdir(parents=True, exist_ok=True)
    write_drafter(given)
    for step in plan(given):
        words = step.command(given)
        earlier = [row for row in rows_of(log) if row["command"] == words]
        if any(row["exit"] == 0 for row in earlier):
            continue
        if end <= time.monotonic():
            return AGAIN
        print(f"reproduce_small: {step.name}: dloop {shlex.join(words)}", file=sys.stderr, flush=True)
        started = time.monotonic()
        status = run(words, end - started)
        if status == 0:
            step.afterwards(given)
        seconds = round(time.monotonic() - started, 1)
        row = {"step": step.name, "exit": status, "seconds": seconds, "restarts": len(earlier), "command": words}
        with log.open("a") as file:
            file.write(json.dumps(row) + "\n")
        if status:
            return status
    return 0


def main() -> int:
    """One call."""
    try:
        given = parse(Campaign, "reproduce_small.py", sys.argv[1:])
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # no command goes on without the one that began it
        status = go_on(given)
    except UserError as error:
        print(f"reproduce_small: {error}", file=sys.stderr)
        return 2
    if status == AGAIN:
        print("reproduce_small: the time is up; the same call goes on", file=sys.stderr)
    if status == STOPPED:
        print("reproduce_small: stopped; the same call goes on", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
