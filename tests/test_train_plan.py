"""`dloop train --dry-run`: counts that can be checked by hand, and a profile that leaves the weights alone."""

import json
import sys

import numpy as np
import pytest
import test_cli
import torch
from test_train import command, token_file, written

from dloop.bench.training import Kept, costs, flop_counter
from dloop.cli.main import entry
from dloop.detect import MTP_FAMILY
from dloop.testing import tiny_drafter, tiny_target
from dloop.train.batch import TokenFile
from dloop.train.objective import ObjectiveSettings
from dloop.train.objectives import objective_of
from dloop.train.optim import Optimizer
from dloop.train.trainer import Step


@pytest.fixture
def folders(tmp_path):
    target = tiny_target("llama", seed=3)
    return written(tmp_path, target, tiny_drafter(target))


def test_a_dry_run_tells_its_plan_and_leaves_nothing(folders, capsys):
    assert entry(command(folders, "--dry-run")) == 0
    data = TokenFile.read(folders / "tokens.npz", 3072)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"data 12 samples, {data.lens.sum()} tokens, {data.lens[:, 1].sum()} of them labels"
    assert lines[1] == "run 3 steps of 4 samples, up to 4 anchors each: 1.00 passes"
    assert not (folders / "out").exists()


def test_a_profile_measures_every_depth(folders, capsys):
    words = command(folders, "--dry-run", "--profile", "--peak-tflops", "0.5", "--json")
    assert entry(words) == 0
    done = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert done["plan"]["depths"] == [1, 2, 3] and done["peak"] == "stated"
    assert [row["depth"] for row in done["profile"]] == [1, 2, 3]
    for row in done["profile"]:
        assert row["anchors"] == 16 and row["rows"] == 16 * 4 * (row["depth"] + 1) and row["peak_bytes"] is None
        assert row["utilisation"] == pytest.approx(row["flops"] / row["ms"] * 1e3 / 0.5e12)
        assert (
            row["estimate_bytes"] > row["kept_bytes"] + done["plan"]["target_bytes"] + 16 * done["plan"]["parameters"]
        )
    flops, kept = ([row[name] for row in done["profile"]] for name in ("flops", "kept_bytes"))
    assert flops == sorted(flops) and kept == sorted(kept) and flops[0] < flops[2] and kept[0] < kept[2]
    assert entry(command(folders, "--dry-run", "--profile", "--dloop-max-stage", "0")) == 0
    assert "measured on a matrix product" in capsys.readouterr().out


def prompts_of_another_target(folder):
    np.savez(folder / "held.npz", flat=np.full(20, 9999), lens=np.array([[4, 16]]))
    return ["--eval-data-path", str(folder / "held.npz")]


def no_prompts(folder):
    (folder / "held.jsonl").write_text("no JSON\n")
    test_cli.byte_tokenizer().save_pretrained(folder / "target")
    return ["--eval-data-path", str(folder / "held.jsonl")]


def a_finished_run(folder, *more):
    assert entry(command(folder)) == 0
    return list(more)


def a_damaged_log(folder):
    assert entry(command(folder)) == 0
    path = folder / "out" / "train.csv"
    path.write_text(path.read_text().replace("2,0,", "x,"))
    return ["--resume"]


def measured_otherwise(folder):
    held = token_file(folder / "held.npz", tiny_target("llama", seed=3), samples=2)
    more = ["--eval-data-path", str(held), "--eval-max-new-tokens", "8"]
    assert entry(command(folder, *more)) == 0
    return [*more, "--resume", "--eval-gate", "0"]


def no_label(folder):
    lens = np.array([[20, 1]] * 64 + [[4, 17]])
    np.savez(folder / "tokens.npz", flat=np.full(lens.sum(), 5), lens=lens)
    return ["--max-length", "20", "--batch-size", "1"]


STARTS = {  # what the real run would fail on before its first step
    "batch": (lambda _: ["--batch-size", "13"], "--batch-size 13"),
    "no batch": (lambda _: ["--batch-size", "0"], "--batch-size 0"),
    "steps": (lambda _: ["--max-steps", "0"], "--max-steps 0"),
    "parts": (lambda _: ["--accumulation-steps", "0"], "--accumulation-steps 0"),
    "log": (lambda _: ["--log-interval", "-1"], "--log-interval -1"),
    "save": (lambda _: ["--save-interval", "0"], "--save-interval 0"),
    "no eval file": (lambda _: ["--eval-data-path", "absent.npz"], "--eval-data-path absent.npz"),
    "foreign eval file": (prompts_of_another_target, "held.npz has the token 9999"),
    "no prompts": (no_prompts, "held.jsonl has no prompt"),
    "output": (lambda _: ["--output-dir", "/proc/none/x"], "/proc/none/x cannot be written to"),
    "finished": (a_finished_run, "add --resume"),
    "other settings": (lambda folder: a_finished_run(folder, "--resume", "--seed", "1"), "other settings"),
    "damaged log": (a_damaged_log, "line 3 is damaged"),
    "another gate": (measured_otherwise, "measured with gate=-0.5"),
    "no label": (no_label, "has a label within"),
    "tracker": (lambda _: ["--report-to", "tensorboard"], "pip install tensorboard"),
}


@pytest.mark.parametrize(("spoil", "part"), STARTS.values(), ids=STARTS)
def test_a_dry_run_fails_as_the_run_would_and_leaves_nothing(folders, capsys, monkeypatch, spoil, part):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    more = spoil(folders)
    before, lines = sorted(folders.rglob("*")), []
    for dry in (["--dry-run"], []):
        capsys.readouterr()
        assert entry(command(folders, *more, *dry)) == 2
        assert sorted(folders.rglob("*")) == before or not dry
        out, err = capsys.readouterr()
        lines.append(err.strip().splitlines()[-1])
        assert out == ""
    assert part in lines[0] and lines[0] == lines[1]


@pytest.mark.parametrize(
    "words", [["--profile"], ["--dry-run", "--peak-tflops", "1"], ["--dry-run", "--profile", "--peak-tflops", "0"]]
)
def test_a_profile_without_its_dry_run_is_refused(folders, capsys, words):
    assert entry(command(folders, *words)) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_attention_of_heads_that_share_keys_is_counted():
    """torch 2.11's own formula refuses them; only a GPU's kernels reach it, so they are called by name."""
    q, k = (torch.empty(1, heads, 16, 64, dtype=torch.bfloat16, device="meta") for heads in (8, 2))
    aten = torch.ops.aten
    with flop_counter() as counter:
        out, lse, *_ = aten._scaled_dot_product_flash_attention(q, k, k, 0.0, True)
        forward = counter.get_total_flops()
        empty, seed = (torch.empty(n, dtype=torch.int32, device="meta") for n in (0, 2))
        aten._scaled_dot_product_flash_attention_backward(
            out, q, k, k, out, lse, empty, empty, 16, 16, 0.0, True, seed, seed
        )
    assert forward == 2 * 8 * 16 * 16 * 2 * 64 and counter.get_total_flops() == 3.5 * forward


def test_flops_are_those_of_the_products_and_weights_stay():
    target = tiny_target("qwen3", seed=3)
    drafter = tiny_drafter(target, family=MTP_FAMILY)
    model = drafter.model.requires_grad_(True)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    objective = objective_of(model, target.vocabulary, ObjectiveSettings())
    step = Step(objective, lambda batch: target.features(batch.tokens, ()), Optimizer(model.parameters(), 1.0))
    data = TokenFile(torch.arange(3, 35).numpy(), torch.tensor([[4, 28]]).numpy(), torch.tensor([0]).numpy(), 64)
    batch = data.collate(torch.tensor([0]).numpy())
    one, two = costs(step, [batch], [1, 2], 1e12, 0)
    assert (one.anchors, one.rows, two.rows) == (0, 64, 128)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    head = 2 * 64 * 32 * target.vocab_size  # one product of all rows with the head
    assert two.flops - one.flops > 2 * head  # values and gradients of one step more


def test_what_is_kept_is_counted_once_and_only_while_it_lives():
    x, weight = torch.ones(10, requires_grad=True), torch.ones(10, requires_grad=True)
    kept = Kept([weight])
    with kept:
        y = x * weight
        z = y.sin() + y.cos()
    assert kept.now == kept.most == 10 * 4 * 2  # x and y; the weight is known
    z.sum().backward()
    del y, z
    assert kept.now == 0
