"""Time DSpark's training step in its variants, on random weights of a given shape; JSON after each measurement.

The default shape is a drafter of 18.6 M parameters for SmolLM2-135M, 48 sequences x 64 anchors x 7 rows.
`--hidden-size 64 --target-layers 4 --vocab-size 500 --sequences 2 --width 128 --steps 2` runs on a CPU.
"""

import itertools
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from dloop.bench.store import write
from dloop.bench.training import flop_counter, matrix_rate, timed
from dloop.cli.args import option, parse
from dloop.drafters.config import DSparkConfig
from dloop.drafters.dspark import DSpark
from dloop.records import hardware, versions
from dloop.targets.hf import HFTarget, run_backbone
from dloop.train import packed
from dloop.train.batch import TokenFile
from dloop.train.cache import cache_features, features_of
from dloop.train.objective import ObjectiveSettings
from dloop.train.objectives import objective_of
from dloop.train.optim import Optimizer
from dloop.train.trainer import GraphedStep, Step

VARIANTS = ["eager", "ungrouped", "compile", "graphs", "compile+graphs", "cached", "compile+graphs+cached"]
GROUP = packed.GROUP
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Time DSpark's training step: milliseconds a step, peak memory, and the floor of its matrix products."""

    sequences: int = option(48, "of a step")
    width: int = option(512, "tokens of a sequence")
    anchors: int = option(64, "of a sequence")
    rows: int = option(7, "of a stage")
    layers: int = option(3, "of the drafter")
    rank: int = option(64, "of the Markov head")
    hidden_size: int = option(576, "of target and drafter")
    target_layers: int = option(30, "of the target")
    vocab_size: int = option(49152, "of both")
    depths: tuple[int, ...] = option((0, 1, 2, 3), "loop stages to time; 0 is the host alone")
    variants: list[str] = option([], f"some of {', '.join(VARIANTS)}; ungrouped: eager, all anchors share keys")
    steps: int = option(20, "timed steps, after 3 others")
    output: Path = option(Path("training-step.json"), "where the figures go")


def build(shape: Shape) -> tuple[HFTarget, DSparkConfig, TokenFile]:
    """A target and data of this shape, and the drafter's configuration."""
    torch.manual_seed(0)
    size = {
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.hidden_size * 8 // 3,
        "vocab_size": shape.vocab_size,
    }
    heads, shared = shape.hidden_size // 64, max(1, shape.hidden_size // 192)
    config = AutoConfig.for_model(
        "llama", **size, num_hidden_layers=shape.target_layers, num_attention_heads=heads, head_dim=64,
        num_key_value_heads=shared, tie_word_embeddings=True, max_position_embeddings=8192,
    )  # fmt: skip
    dtype = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).to(DEVICE).eval().requires_grad_(False)
    taps = tuple(int(layer) for layer in np.linspace(1, shape.target_layers - 2, 5))
    draft = DSparkConfig(
        **size, num_layers=shape.layers, num_heads=heads, num_kv_heads=shared, head_dim=64, rms_norm_eps=1e-5,
        rope_theta=1e5, max_positions=8192, attention_bias=False, block_size=shape.rows, label_shift=0, mask_token_id=0,
        target_layer_ids=taps, num_target_layers=shape.target_layers, markov_rank=shape.rank,
        markov_head_type="vanilla", confidence_head=True, confidence_with_markov=True,
    )  # fmt: skip
    lens = np.array([[shape.width // 8, shape.width - shape.width // 8]] * shape.sequences)
    flat = np.random.default_rng(0).integers(1, shape.vocab_size, int(lens.sum()))
    starts = np.arange(shape.sequences) * shape.width
    return HFTarget("random", model, frozenset()), draft, TokenFile(flat, lens, starts, shape.width)


def step_of(shape: Shape, variant: str, target: HFTarget, draft: DSparkConfig, data: TokenFile) -> Step | GraphedStep:
    """A fresh drafter's step with the accelerations of a variant."""
    model = DSpark(draft).to(DEVICE)
    objective = objective_of(model, target.vocabulary, ObjectiveSettings(num_anchors=shape.anchors))
    if "compile" in variant:
        objective.row_sums = torch.compile(objective.row_sums)
    taps = draft.target_layer_ids
    features = cache_features(target, data, taps, 16) if "cached" in variant else partial(features_of, target, taps)
    step = Step(objective, features, Optimizer(model.parameters(), 1.0))
    return GraphedStep(step) if "graphs" in variant else step


def measure(shape: Shape) -> Iterator[dict[str, object]]:
    """The matrix rate, the frozen target by itself, then every variant at every depth."""
    target, draft, data = build(shape)
    batch, taps = data.collate(np.arange(shape.sequences)).to(DEVICE), draft.target_layer_ids
    rate = matrix_rate(target.dtype, DEVICE)
    yield {"what": "matrix rate", "flops_per_s": rate}
    whole = {"input_ids": batch.tokens, "use_cache": False}
    own = torch.no_grad()(lambda: run_backbone(target, whole, taps))
    yield {"what": "target, its own forward", **timed(own, shape.steps, DEVICE)}
    yield {"what": "target, its layers", **timed(lambda: target.features(batch.tokens, taps), shape.steps, DEVICE)}
    for variant, depth in itertools.product(shape.variants or VARIANTS, shape.depths):
        row: dict[str, object] = {"what": "step", "variant": variant, "depth": depth}
        if "graphs" in variant and DEVICE.type != "cuda":
            yield {**row, "left_out": "CUDA graphs need a GPU"}
            continue
        packed.GROUP = shape.anchors if variant == "ungrouped" else GROUP
        step = step_of(shape, variant, target, draft, data)
        row |= timed(partial(step, [batch], depth), shape.steps, DEVICE)
        if variant == "eager":
            with flop_counter() as counter:
                step([batch], depth)
            row |= {"flops": counter.get_total_flops(), "floor_ms": 1000 * counter.get_total_flops() / rate}
        yield {**row, "parameters": sum(p.numel() for p in step.objective.model.parameters())}


def main(words: list[str]) -> int:
    shape = parse(Shape, "benchmark_training_step.py", words)
    if unknown := [name for name in shape.variants if name not in VARIANTS]:
        raise SystemExit(f"--variants {unknown[0]} is not known; choose some of {', '.join(VARIANTS)}")
    facts = {"schema": 1, "shape": asdict(shape), "hardware": hardware(DEVICE), "versions": versions()}
    rows: list[dict[str, object]] = []
    for row in measure(shape):
        rows.append(row)
        write(shape.output, json.dumps({**facts, "rows": rows}, indent=1, default=str) + "\n")
        print(json.dumps(row), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
