"""Other drafting tools on the same weights, prompt and machine, through their own public entry points.

Peers: transformers' assisted generation and prompt lookup, dflash 0.1.0 (`dflash_generate`), flashspec 0.3.1
(`SpeculativeEngine`). Nothing of theirs is kept here; for what is not installed, the command that installs it is told.
"""

import importlib
import logging
import warnings
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal, NamedTuple, cast

import torch
from jaxtyping import Int
from torch import Tensor, nn

from dloop.api import start
from dloop.bench.latency.models import Pair, random_target
from dloop.bench.latency.shapes import Shape, smaller
from dloop.bench.latency.timing import Spread, elapsed_ms, spread
from dloop.drafters.block import BlockDrafter
from dloop.records import Json
from dloop.settings import Settings
from dloop.targets.hf import HFTarget

PeerName = Literal["transformers", "dflash", "flashspec"]
INSTALL = {
    "dflash": "pip install --no-deps dflash==0.1.0",
    "flashspec": "pip install --no-deps flashspec==0.3.1 pydantic",
}
NEW_TOKENS, REPEATS = 32, 3
LOOKUP_SIZE = 10  # tokens that transformers' documentation suggests for prompt lookup


class Ran(NamedTuple):
    """One generation."""

    tokens: int  # new ones
    rounds: int  # target forwards after prefill


Generate = Callable[[int], Ran]  # number of new tokens -> what was done


class Setting(NamedTuple):
    """What all contenders share."""

    pair: Pair
    shape: Shape
    prompt: list[int]

    @property
    def ids(self) -> Int[Tensor, "1 T"]:
        """The prompt on the target's device."""
        return torch.tensor([self.prompt], device=self.pair.target.device)


def compare(setting: Setting, names: Sequence[PeerName]) -> dict[str, Json]:
    """Every contender's time a round and a token; random weights accept next to nothing, so rounds compare best."""
    warnings.simplefilter("ignore", FutureWarning)  # of transformers, at how older tools call it
    found: dict[str, Json] = {name: attempt(generate, setting) for name, generate in ours(setting).items()}
    for name in names:
        try:
            contenders = PEERS[name](setting)
            about = version(name)
        except (PackageNotFoundError, ModuleNotFoundError) as error:
            found[name] = {"status": f"not installed ({error})", "install": INSTALL.get(name, f"pip install {name}")}
            continue
        for label, generate in contenders.items():
            found[label] = {"version": about, **attempt(generate, setting)}
    return found


def attempt(generate: Generate, setting: Setting) -> dict[str, Json]:
    """Its numbers, or why there are none: another tool's fault must not end a run."""
    device = setting.pair.target.device
    try:
        generate(NEW_TOKENS)  # warm
        return {"status": "ok", **pace(generate, device)}
    except Exception as error:  # whatever another tool raises is a line of the report
        return {"status": f"failed: {type(error).__name__}: {' '.join(str(error).split())[:200]}"}


def pace(generate: Generate, device: torch.device) -> dict[str, Json]:
    """Decoding alone: the time of many tokens less that of one, which is prefill's."""
    one, many = timed(generate, 1, device), timed(generate, NEW_TOKENS, device)
    ran, first = generate(NEW_TOKENS), generate(1)
    taken, rounds = many.median - one.median, ran.rounds - first.rounds
    return {
        "ms_per_round": taken / rounds,
        "ms_per_token": taken / (ran.tokens - first.tokens),
        "tokens_per_round": (ran.tokens - first.tokens) / rounds,
        "quartiles_ms_per_round": [(bound - one.median) / rounds for bound in (many.low, many.high)],
    }


def timed(generate: Generate, count: int, device: torch.device) -> Spread:
    """Milliseconds of a generation, prefill included."""
    return spread([elapsed_ms(lambda: generate(count), device) for _ in range(REPEATS)])


def ours(setting: Setting) -> dict[str, Generate]:
    """The host drafter (gate closed) and plain decoding, on both engines."""
    pair = setting.pair
    found = {
        "dloop twin": ours_on(setting, pair.target, pair.drafter),
        "dloop twin, plain": ours_on(setting, pair.target, None),
    }
    if pair.fast_target is not None and pair.fast_drafter is not None:
        found["dloop fast"] = ours_on(setting, pair.fast_target, pair.fast_drafter)
        found["dloop fast, plain"] = ours_on(setting, pair.fast_target, None)
    return found


def ours_on(setting: Setting, target: HFTarget, drafter: BlockDrafter | None) -> Generate:
    """Our own loop; no drafter is plain decoding."""

    def generate(count: int) -> Ran:
        rounds = list(start(target, drafter, setting.prompt, Settings(max_new_tokens=count)))
        return Ran(1 + sum(len(round.emitted) for round in rounds), len(rounds))

    return generate


class Forwards:
    """Counts a model's forwards."""

    def __init__(self, model: nn.Module) -> None:
        self.count = 0
        self.handle = model.register_forward_pre_hook(self._add)

    def _add(self, _module: nn.Module, _inputs: object) -> None:
        self.count += 1

    def stop(self) -> int:
        """Forwards after the first, which is prefill's."""
        self.handle.remove()
        return self.count - 1


def transformers_peer(setting: Setting) -> dict[str, Generate]:
    """Assisted generation by the smallest shape of the same vocabulary, prompt lookup, and plain `generate`."""
    target = setting.pair.target
    found = {
        "transformers": hf_generate(setting, {}),
        "transformers, prompt lookup": hf_generate(setting, {"prompt_lookup_num_tokens": LOOKUP_SIZE}),
    }
    if (least := smaller(setting.shape)) is not None:
        assistant = random_target(least, target.device, target.dtype, seed=2).model
        settings = cast(Any, assistant.generation_config)
        settings.num_assistant_tokens = setting.pair.drafter.stage_len
        settings.num_assistant_tokens_schedule = "constant"
        settings.assistant_confidence_threshold = 0.0  # random weights are never confident
        found[f"transformers, assisted by {least.name}"] = hf_generate(setting, {"assistant_model": assistant})
    return found


def hf_generate(setting: Setting, extra: dict[str, object]) -> Generate:
    """The model's own greedy `generate` with these arguments more."""
    model: Any = setting.pair.target.model
    ids = setting.ids

    def generate(count: int) -> Ran:
        forwards = Forwards(model)
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, **extra)
        return Ran(out.shape[1] - ids.shape[1], forwards.stop())

    return generate


def dflash_peer(setting: Setting) -> dict[str, Generate]:
    """Its DFlash loop over our target; its drafter takes the backbone's weights of ours."""
    dflash: Any = importlib.import_module("dflash.model")
    target, drafter = setting.pair.target, setting.pair.drafter
    config = drafter.config
    built = dflash.Qwen3Config(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        rms_norm_eps=config.rms_norm_eps,
        max_position_embeddings=config.max_positions,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
        num_target_layers=config.num_target_layers,
        block_size=config.stage_len + 1,  # its blocks count the anchor
        dflash_config={
            "target_layer_ids": list(config.target_layer_ids),
            "mask_token_id": config.mask_token_id,
        },
    )
    with target.device:
        model = dflash.DFlashDraftModel(built).to(target.dtype).eval()
    model.load_state_dict({key: drafter.model.state_dict()[key] for key in model.state_dict()})
    ids = setting.ids

    def generate(count: int) -> Ran:
        forwards = Forwards(target.model)
        out = dflash.dflash_generate(model, target.model, ids, count, None)
        return Ran(out.shape[1] - ids.shape[1], forwards.stop())

    return {"dflash": generate}


def flashspec_peer(setting: Setting) -> dict[str, Generate]:
    """Its engine as it comes: compiled on a GPU; drafts by the smallest shape of the vocabulary, else by lookup."""
    engine: Any = importlib.import_module("flashspec.engine")
    package: Any = importlib.import_module("flashspec")
    logging.getLogger("flashspec").setLevel(logging.ERROR)
    target, least = setting.pair.target, smaller(setting.shape)
    device, dtype = target.device, target.dtype
    config = package.FlashSpecConfig(
        device=str(device),
        dtype=str(dtype).removeprefix("torch."),
        drafter_strategy="bandit" if least is None else "auto",
        bandit=package.BanditConfig(n_arms=1),
        compile_max_cache_len=max(1024, len(setting.prompt) + 2 * NEW_TOKENS),
        sampling=package.SamplingConfig(temperature=0.0),
    )
    drafter = engine.NgramDrafter()
    if least is not None:
        assistant = random_target(least, device, dtype, seed=2).model
        drafter = engine.HuggingFaceDrafter(least.name, device, dtype, temperature=0.0, model=assistant)
    whole = package.SpeculativeEngine(
        config, [drafter], engine.TargetModel(target.name, device, dtype, model=target.model)
    )
    ids = setting.ids

    def generate(count: int) -> Ran:
        result = whole.generate(ids, max_new_tokens=count)
        return Ran(result.n_tokens_generated, len(result.arm_steps))

    return {"flashspec": generate}


PEERS: dict[PeerName, Callable[[Setting], dict[str, Generate]]] = {
    "transformers": transformers_peer,
    "dflash": dflash_peer,
    "flashspec": flashspec_peer,
}
