"""EAGLE-3 on a target that cannot verify branches: its published trees become chains; a tree asked for is refused."""

import io
import json
import sys
from pathlib import Path

import pytest
import test_cli
import torch

import dloop
from dloop.batch import generate_many
from dloop.cli.main import entry
from dloop.errors import UserError
from dloop.settings import Settings
from dloop.targets import recurrent
from dloop.testing import taught_drafter, tiny_drafter, tiny_target, write_drafter, write_target
from dloop.types import Round

pytestmark = pytest.mark.skipif(not recurrent.is_offered(), reason="Qwen3.5 needs a newer transformers")
PROMPT = [5, 9, 11, 60, 2]
NOTE = "drafts chains (tree_budget 0), not its trees"


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    """A target with a tokenizer and questions, and an EAGLE-3 drafter taught one of its texts."""
    folder = tmp_path_factory.mktemp("chains")
    target = tiny_target("qwen3_5", vocab_size=test_cli.VOCAB)
    write_target(target, folder / "target")
    tokenizer = test_cli.byte_tokenizer()
    tokenizer.save_pretrained(folder / "target")
    ids = tokenizer("Hello")["input_ids"]
    text = ids + dloop.generate_autoregressive(target, ids, 24).tokens
    write_drafter(taught_drafter(target, [text], family="eagle3", stage_len=7), folder / "eagle3", "specforge")
    (folder / "mine.jsonl").write_text(json.dumps({"turns": ["Hello"]}) + "\n")
    return folder


@pytest.fixture(scope="module")
def pair(home):
    """Target and drafter, as loaded."""
    target = dloop.load_target(str(home / "target"), dtype="float32")
    return target, dloop.load_drafter(str(home / "eagle3"), target)


def words(home: Path, command: str, *more: str) -> list[str]:
    names = ["--model", str(home / "target"), "--draft-model", str(home / "eagle3")]
    return [command, *names, "--dtype", "float32", "--device", "cpu", "--max-new-tokens", "12", *more]


def are_chains(rounds: list[Round]) -> bool:
    return bool(rounds) and all(round.draft.is_chain and len(round.drafted) % 7 == 0 for round in rounds)


@pytest.mark.parametrize("law", [{}, {"temperature": 1.0, "seed": 3}], ids=["greedy", "reject"])
@pytest.mark.parametrize("gate", [1.0, float("-inf")], ids=["host", "loop"])
def test_by_default_every_stage_is_a_chain(pair, law, gate):
    target, drafter = pair
    out = dloop.generate(target, drafter, PROMPT, 16, loop_gate=gate, max_stages=2, **law)
    assert are_chains(out.rounds)
    if not law:
        assert out.tokens == dloop.generate_autoregressive(target, PROMPT, 16).tokens
        given = dloop.generate(target, drafter, PROMPT, 16, loop_gate=gate, max_stages=2, tree_budget=0)
        assert [r.drafted for r in given.rounds] == [r.drafted for r in out.rounds]


def test_rejection_sampling_may_be_asked_for(pair):
    target, drafter = pair
    auto, named = (
        dloop.generate(target, drafter, PROMPT, 16, temperature=1.0, seed=3, verify=verify)
        for verify in ("auto", "reject")
    )
    assert auto.tokens == named.tokens
    assert named.rounds[0].drafted == auto.rounds[0].drafted


def test_it_is_said_once(home, pair, caplog):
    target = pair[0]
    drafter = dloop.load_drafter(str(home / "eagle3"), target)
    for _ in range(2):
        dloop.generate(target, drafter, PROMPT, 4)
    [line] = [record.getMessage() for record in caplog.records if NOTE in record.getMessage()]
    assert str(home / "eagle3") in line and "recurrent layers" in line
    caplog.clear()
    plain = tiny_target("qwen3")
    folder = write_drafter(tiny_drafter(plain, family="eagle3"), home / "other", "specforge")
    dloop.load_drafter(str(folder), plain)
    dloop.load_drafter(str(write_drafter(tiny_drafter(target), home / "block", "specforge")), target)
    assert NOTE not in caplog.text


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"tree_budget": 60}, "tree_budget=60: .* recurrent layers, whose state follows one path.*use 0"),
        ({"stage_tree_budget": 48}, "stage_tree_budget=48: .* recurrent layers"),
        ({"topk_k": 4}, "topk_k=4 does not apply to eagle3 with tree_budget 0"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_a_tree_that_is_asked_for_is_refused_before_the_first_token(pair, asked, message):
    target, drafter = pair
    calls = list[int]()
    handle = target.backbone.register_forward_hook(lambda *_: calls.append(1))
    try:
        with pytest.raises(UserError, match=message):
            dloop.stream(target, drafter, PROMPT, 8, **asked)
        with pytest.raises(UserError, match=message):
            dloop.attach(target, drafter, **asked)
        with pytest.raises(UserError, match=message):
            next(generate_many(target, drafter, [PROMPT], Settings(max_new_tokens=8, **asked)))
    finally:
        handle.remove()
    assert not calls


def test_many_at_once(pair):
    target, drafter = pair
    prompts = [PROMPT, PROMPT[1:]]
    found = {done.index: done for done in generate_many(target, drafter, prompts, Settings(max_new_tokens=10))}
    for index, prompt in enumerate(prompts):
        assert found[index].tokens == dloop.generate_autoregressive(target, prompt, 10).tokens
        assert are_chains(found[index].rounds)


def test_transformers_own_generate(pair):
    target, drafter = pair
    ids = torch.tensor([PROMPT])
    given = dict[str, object](attention_mask=torch.ones_like(ids), max_new_tokens=16, do_sample=False, pad_token_id=0)
    plain = target.model.generate(ids, **given).tolist()
    with dloop.attach(target, drafter, loop_gate=-2.0) as attached:
        assert target.model.generate(ids, **given).tolist() == plain
        assert attached.last is not None and attached.last.mode == "dloop" and are_chains(attached.last.rounds[0])


def test_every_command_decodes_it(home, tmp_path, capsys, monkeypatch):
    data = ("--dataset", "mine", "--data-dir", str(home), "--output-dir", str(tmp_path))
    for given in (
        words(home, "generate", "--prompt", "Hello", "--json"),
        words(home, "bench", *data, "--json"),
        words(home, "check", "--prompt", "Hello", "--loop-gate", "-1.0", "--json"),
    ):
        assert entry(given) == 0
        out, err = capsys.readouterr()
        assert json.loads(out)["schema"] == 1 and err.count(NOTE) == 1
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"Hello\n")))
    assert entry(words(home, "chat", "--json")) == 0
    out, err = capsys.readouterr()
    stages = [stage for r in json.loads(out)["turns"][0]["rounds"] for stage in r["stages"]]
    assert stages and all(stage["parents"] == sorted(set(stage["parents"])) for stage in stages)
    assert err.count(NOTE) == 1
    assert entry(words(home, "generate", "--prompt", "Hello", "--tree-budget", "60")) == 2
    assert "recurrent layers" in capsys.readouterr().err.splitlines()[-1]
