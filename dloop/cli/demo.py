"""`dloop demo`: its flags and prompts. The work is in `dloop.cli.race`: help and typing errors load no torch."""

from dataclasses import dataclass
from typing import Literal

from dloop.cli.args import Common, option

PROMPTS = {
    "json": 'Extract the name, age and city as JSON: "Maria Lopez, 34, moved to Madrid last spring."',
    "code": "Write a Python function that checks whether a word is a palindrome.",
    "list": "List five fruits that are rich in vitamin C, with one sentence about each.",
    "story": "Write a short story about a lighthouse keeper who finds a message in a bottle.",
}


@dataclass(frozen=True, kw_only=True)
class Command(Common):
    """Race three ways to decode the same answers: plain, the drafter as released, and the loop.

    About a minute on two CPU cores, after a small real model has been fetched once. Prints acceptance lengths, speeds
    against plain decoding in this very run, whether the texts are the same, and one answer token by token.
    """

    loop_gate: float = option(-0.5, "the loop's gate: another stage follows while a stage scores at least this")
    max_new_tokens: int = option(64, "most tokens of an answer")
    prompts: int = option(len(PROMPTS), f"how many of the prompts: {', '.join(PROMPTS)}")
    dtype: Literal["bfloat16", "float32"] = option("bfloat16", "arithmetic; in float32 all texts are identical")
    device: str = option("auto", "cpu, cuda, cuda:1 ...; auto takes the GPU if there is one")
    engine: Literal["auto", "fast", "twin"] = option("auto", "what decodes: static memory, or transformers' forward")
    model: str = option("smollm2", "another target: a folder or a hub id")
    draft_model: str = option("demo", "another drafter for it: a folder or a hub id")


def run(command: Command) -> int | None:
    from dloop.cli.race import race  # torch and transformers only from here on

    return race(command)
