"""`dloop latency` on a tiny shape: what is counted and written is exact; times are only known to be positive."""

import json
from pathlib import Path

import pytest
import torch

from dloop.api import start
from dloop.bench.latency import run as latency_run
from dloop.bench.latency.book import Entry
from dloop.bench.latency.floors import extend_cost, stage_cost, verify_cost
from dloop.bench.latency.models import drafter_config, random_drafter, random_pair, random_target
from dloop.bench.latency.replay import Work, play, sessions, work_of
from dloop.bench.latency.rounds import Chance, Script, Step, drawn_scripts, read_scripts
from dloop.bench.latency.shapes import SHAPES, shape_of, smaller
from dloop.bench.latency.stages import block_stages
from dloop.bench.latency.timing import Ceilings, Job, in_turns, measure_ceilings
from dloop.bench.latency.verify import Stock, Verifiers, chain
from dloop.bench.measure import Response
from dloop.bench.store import lines_of
from dloop.cli.main import entry
from dloop.drafters.families import build
from dloop.errors import UserError
from dloop.fast.target import FastTarget
from dloop.loop import Session
from dloop.records import round_record
from dloop.settings import Settings
from dloop.testing import good_drafter, tiny_target

CPU, META = torch.device("cpu"), torch.device("meta")
TINY = ["latency", "--shape", "tiny", "--dtype", "float32", "--device", "cpu", "--repeats", "2"]
ROWS = [*TINY, "--rows", "1,5", "--context", "20,33"]


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def small_ceilings(monkeypatch):
    """Large copies and products tell nothing here."""
    monkeypatch.setattr(latency_run, "measure_ceilings", lambda device, dtype: Ceilings(1e10, 1e11))


@pytest.fixture(scope="module")
def pair():
    return random_pair(shape_of("tiny"), CPU, torch.float32, block_size=3)


def out_of(capsys, *words: str) -> object:
    """Run a good command line; its one document."""
    code = entry([*words, "--json"])
    out, err = capsys.readouterr()
    assert code == 0, err
    return json.loads(out)


def refused(capsys, *words: str) -> str:
    """Run a command line that must end with 2 and one line on standard error; give the line."""
    assert entry(words) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1, err
    return err


def responses(lengths: tuple[int, ...], gate: float = -1.0, stage_len: int = 3) -> list[Response]:
    """Rounds that a tiny pair really decoded, some of them looped."""
    target = tiny_target()
    found = []
    for index, length in enumerate(lengths):
        prompt = list(range(index, index + length))
        text = [r for r in start(target, None, prompt, Settings(max_new_tokens=40))]
        tokens = prompt + [token for r in text for token in r.emitted]
        drafter = good_drafter(target, [tokens], stage_len=stage_len)
        rounds = list(start(target, drafter, prompt, Settings(max_new_tokens=30, loop_gate=gate)))
        header = {"sample": index, "turn": 0, "turns": 1, "rounds": len(rounds)}
        found.append(Response(header, [round_record(round) for round in rounds]))
    return found


@pytest.fixture(scope="module")
def recorded(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("bench") / "rounds.jsonl"
    path.write_text(lines_of(responses((9, 14))))
    return path


# shapes


@pytest.mark.parametrize("name", SHAPES)
def test_a_shape_has_the_published_number_of_parameters(name):
    assert sum(weight.numel() for weight in built_on_meta(name).model.parameters()) == SHAPES[name].num_parameters


def built_on_meta(name: str):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dloop.bench.latency.models.fill", lambda module, seed: None)
        return random_target(SHAPES[name], META, torch.bfloat16)


@pytest.mark.parametrize(
    ("family", "published"),
    [
        ("dspark", (615_221_249, 1_126_422_017)),
        ("dflash", (537_427_200, 1_048_626_432)),
        ("domino", (588_250_368, 1_104_561_408)),
    ],
)
def test_drafters_have_the_published_numbers_of_parameters(family, published):
    for name, count in zip(("qwen3-4b", "qwen3-8b"), published, strict=True):
        with META:
            model = build(drafter_config(SHAPES[name], family=family))
        assert sum(weight.numel() for weight in model.parameters()) == count


def test_random_weights_are_seeded_and_give_finite_logits_in_bfloat16():
    shape = shape_of("tiny")
    first, second = (random_target(shape, CPU, torch.bfloat16) for _ in range(2))
    assert first.dtype == torch.bfloat16 and first.stop_ids == frozenset()
    weights = list(zip(first.model.parameters(), second.model.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b in weights)
    logits = first.open().prefill(0, list(range(50))).logits
    assert torch.isfinite(logits).all() and logits.float().std() > 0.1


def test_an_assistant_shares_the_vocabulary_and_is_smaller():
    assert smaller(shape_of("qwen3-8b")) is shape_of("qwen3-0.6b")
    assert smaller(shape_of("qwen3-0.6b")) is None and smaller(shape_of("llama-3.1-8b")) is None


# floors


def test_floors_are_those_of_the_published_table():
    """Measured beforehand on one H200 at 4.37 TB/s: 1.84 ms a forward of Qwen3-4B, 0.55 ms a DSpark stage."""
    target = built_on_meta("qwen3-4b")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dloop.bench.latency.models.fill", lambda module, seed: None)
        drafter = random_drafter(shape_of("qwen3-4b"), target)
    machine = Ceilings(4.37e12, 790e12)
    assert machine.floor_ms(*verify_cost(target, 1, 1024)) == pytest.approx(1.84, rel=0.03)
    assert machine.floor_ms(*verify_cost(target, 16, 1024)) == pytest.approx(1.84, rel=0.03)
    assert machine.floor_ms(*verify_cost(target, 256, 1)) == pytest.approx(2.6, rel=0.03)  # products alone
    assert machine.floor_ms(*stage_cost(drafter, 1024)) == pytest.approx(0.55, rel=0.03)


def test_bytes_and_operations_count_each_weight_once(pair):
    shape, target, config = shape_of("tiny"), pair.target, pair.drafter.config
    cost = verify_cost(target, 3, 20)
    kv = 6 * 2 * 2 * 16  # layers, keys and values, heads, width
    assert cost.num_bytes == 4 * (shape.num_parameters + kv * (20 + 3) + 3 * 64)
    matrices = sum(w.numel() for w in target.model.parameters() if w.ndim > 1)
    assert cost.flop == 2 * matrices * 3 + 4 * (3 * 20 + 6) * 6 * 4 * 16  # the tied head is the embedding
    fused = pair.drafter.model.fc.weight.numel() + 64 + 2 * (2 * 64 * 32 + 16)
    assert extend_cost(pair.drafter, 5).num_bytes == 4 * (fused + 5 * (2 * 64 + 2 * 2 * 2 * 16))
    markov = config.vocab_size * 256 * config.block_size  # read again for every token
    assert stage_cost(pair.drafter, 0).num_bytes > 4 * (markov + target.vocabulary.head.numel())


@pytest.mark.parametrize("family", ["dflash", "domino"])
def test_a_family_s_own_head_is_read_again_for_every_token(pair, family):
    """Beside the backbone, over blocks of 16."""
    drafter = random_drafter(shape_of("tiny"), pair.target, family=family)
    backbone = [
        w for name, w in drafter.model.named_parameters() if name.startswith("layers.") or name == "norm.weight"
    ]
    shared = (
        sum(weight.numel() for weight in backbone) + 512 * 64 + 2 * 2 * 2 * 16 * 20 + 16 * 64
    )  # head, k and v, rows
    gru, projection = 3 * 1024 * (64 + 1024), 256 * (64 + 1024) + 512 * 256
    own = {"dflash": 0, "domino": 16 * (gru + 64) + 15 * projection}[family]  # the first row goes uncorrected
    cost = stage_cost(drafter, 20)
    assert cost.num_bytes == 4 * (shared + own)
    matrices = sum(weight.numel() for weight in backbone if weight.ndim > 1)
    products = (
        16 * matrices + drafter.stage_len * 512 * 64 + {"dflash": 0, "domino": 16 * gru + 15 * projection}[family]
    )
    assert cost.flop == 2 * products + 4 * 16 * (20 + 16) * 2 * 4 * 16


@pytest.mark.parametrize("family", ["dflash", "domino"])
def test_stages_of_other_families_are_those_that_decoding_drafts(pair, family):
    """On both engines, the first and a further one."""
    drafter = random_drafter(shape_of("tiny"), pair.target, family=family)
    pieces = block_stages(drafter, pair.target, 20, 64)
    for kind in (f"{family}_first", f"{family}_later"):
        found = {}
        for job in pieces[kind].jobs:
            job.prepare()
            (found[job.name],) = job.work()
        assert {len(stage.tokens) for stage in found.values()} == {drafter.stage_len} and len(found) == 2


# timing


def test_jobs_take_turns_and_their_preparation_is_not_timed(monkeypatch):
    calls: list[str] = []
    monkeypatch.setattr("dloop.bench.latency.timing.elapsed_ms", lambda work, device: (work(), len(calls))[1])
    jobs = [Job(name, lambda name=name: calls.append(name), lambda: calls.append("-")) for name in "ab"]
    found = in_turns(jobs, 3, CPU)
    assert "".join(calls) == "-a-b" * 3
    assert found["a"] == (6.0, 4.0, 8.0)  # 2, 6, 10: median and quartiles


def test_ceilings_are_measured(monkeypatch):
    monkeypatch.setattr("dloop.bench.latency.timing.COPY_BYTES", {"cpu": 2**16})
    monkeypatch.setattr("dloop.bench.latency.timing.PRODUCT_SIZE", {"cpu": 64})
    assert min(measure_ceilings(CPU, torch.float32)) > 0


def test_every_way_verifies_the_same_rows_over_the_same_context(pair):
    prompt, tokens = list(range(30)), [5, 6, 7]
    verifiers = Verifiers(pair, prompt, 64)
    jobs = {job.name: job for job in verifiers.jobs(tokens)}
    assert set(jobs) == {"stock", "twin", "fast"}
    for _ in range(2):  # the second time nothing of the first is left
        found = {}
        for name, job in jobs.items():
            job.prepare()
            seen = job.work()
            found[name] = seen[0] if name == "stock" else seen.logits
        torch.testing.assert_close(found["twin"], found["stock"])
        torch.testing.assert_close(found["fast"], found["stock"], atol=1e-4, rtol=1e-4)
    alone = Stock(pair.target, prompt + tokens[:2]).verify(chain(tokens[2:], 32))
    torch.testing.assert_close(found["stock"][-1:], alone[0], atol=1e-4, rtol=1e-4)


# rows and stages


def check_entry(found: dict, context: int) -> None:
    assert set(found) == Entry.__required_keys__
    assert (found["shape"], found["context"], found["schema"]) == ("tiny", context, 1)
    assert found["gpu"] and list(found["rows"]) == ["1", "5"]
    for row in found["rows"].values():
        assert set(row) == {"stock_ms", "twin_ms", "fast_ms", "floor_ms"} and min(row.values()) > 0
    kinds = {"first", "later", "extend", "eagle3_chain", "eagle3_later", "eagle3_tree"}
    lengths = {f"{family}_{which}": k for family, k in (("dflash", 15), ("domino", 16)) for which in ("first", "later")}
    kinds |= lengths.keys()
    assert {kind: found["stage_ms"][kind]["stage_len"] for kind in lengths} == lengths
    assert set(found["stage_ms"]) == kinds | {"host"}
    for kind in kinds:
        stage = found["stage_ms"][kind]
        assert min(stage["twin_ms"], stage["fast_ms"], stage["floor_ms"]) > 0
    assert found["stage_ms"]["host"]["loop_ms"] > 0 and found["stage_ms"]["extend"]["rows"] == 8
    assert found["ceilings"] == {"bandwidth_bytes_per_s": 1e10, "matrix_flop_per_s": 1e11}


def test_a_run_writes_one_object_a_context_and_continues_where_it_stopped(tmp_path, capsys):
    path = tmp_path / "latency-tiny.json"
    whole = out_of(capsys, *ROWS, "--output", str(path))
    assert whole == json.loads(path.read_text())
    check_entry(whole[0], 20)
    check_entry(whole[1], 33)

    stopped = json.loads(path.read_text())
    del stopped[0]["rows"]["5"], stopped[1]
    stopped[0]["stage_ms"] = {}
    stopped[0]["rows"]["1"]["stock_ms"] = 123.0
    path.write_text(json.dumps(stopped))
    assert "exists; add --resume" in refused(capsys, *ROWS, "--output", str(path))
    again = out_of(capsys, *ROWS, "--output", str(path), "--resume")
    check_entry(again[0], 20)
    check_entry(again[1], 33)
    assert again[0]["rows"]["1"]["stock_ms"] == 123.0  # on record: not measured again
    for flag, other in (("--repeats", "3"), ("--dtype", "bfloat16")):
        assert f"another {flag[2:]}" in refused(capsys, *ROWS, flag, other, "--output", str(path), "--resume")


def test_what_was_finished_is_on_record_when_a_run_dies(tmp_path, capsys, monkeypatch):
    path, calls = tmp_path / "latency.json", []

    def dies(jobs, repeats, device):
        calls.append(len(jobs))
        if len(calls) == 2:
            raise KeyboardInterrupt
        return in_turns(jobs, repeats, device)

    monkeypatch.setattr(latency_run, "in_turns", dies)
    assert entry([*ROWS, "--output", str(path)]) == 130
    capsys.readouterr()
    left = json.loads(path.read_text())
    assert list(left[0]["rows"]) == ["1"] and left[0]["stage_ms"] == {}


def test_without_a_fast_path_it_says_so_and_leaves_null(capsys, monkeypatch):
    def refuses(_twin):
        raise UserError("this model is not supported")

    monkeypatch.setattr(FastTarget, "of", refuses)
    assert entry([*TINY, "--rows", "2", "--context", "9", "--json"]) == 0
    out, err = capsys.readouterr()
    assert "fast: not available (this model is not supported)" in err
    (found,) = json.loads(out)
    assert found["rows"]["2"]["fast_ms"] is None and found["rows"]["2"]["twin_ms"] > 0
    assert found["stage_ms"]["first"]["fast_ms"] is None and found["fast"].startswith("not available")


def test_the_tables_and_the_picture(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "rows.svg"
    assert entry([*ROWS, "--plot", str(picture)]) == 0
    out = capsys.readouterr().out
    assert "verify 5" in out and "later stage" in out and "floor" in out
    drawn = picture.read_text()
    assert drawn.rstrip().endswith("</svg>") and 'id="axes_2"' in drawn and 'id="axes_3"' not in drawn


# whole rounds


def test_a_replay_does_the_recorded_work_in_both_loops(recorded, tmp_path, capsys):
    steps = [record for response in responses((9, 14)) for record in response.rounds]
    counted = {
        "rounds": len(steps),
        "stages": sum(len(record["stages"]) for record in steps),
        "verified_rows": sum(1 + sum(len(stage["tokens"]) for stage in record["stages"]) for record in steps),
        "accepted": sum(record["accepted"] for record in steps),
    }
    assert counted["stages"] > counted["rounds"] and 0 < counted["accepted"] < counted["verified_rows"]
    path = tmp_path / "replay.json"
    found = out_of(capsys, *TINY, "--replay", str(recorded), "--output", str(path))
    assert found == json.loads(path.read_text())
    assert (found["lossless"], found["synthetic"], found["stage_len"], found["responses"]) == (False, False, 3, 2)
    for loop in ("stock", "fast"):
        assert found["loops"][loop]["work"] == counted
        assert found["loops"][loop]["ms_per_round"] > 0 and found["loops"][loop]["plain_ms_per_token"] > 0
    assert found["loops"]["stock"]["ms_per_round"] / found["loops"]["fast"]["ms_per_round"] == found["ratio"]


class Counted:
    """A memory that counts what it is asked for."""

    def __init__(self, inner):
        self.inner, self.stages, self.rows, self.verifications = inner, 0, 0, 0
        self.read: list[int] = []

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def draft(self, requests):
        self.stages += len(requests)
        return self.inner.draft(requests)

    def verify(self, rows):
        self.rows, self.verifications = self.rows + len(rows), self.verifications + 1
        return self.inner.verify(rows)

    def extend(self, slot, position, tokens, features):
        self.read.append(len(tokens))
        return self.inner.extend(slot, position, tokens, features)


@pytest.mark.parametrize("loop", ["stock", "fast"])
def test_replayed_work_reaches_the_models(pair, loop):
    script = Script(11, [Step(1, 0), Step(3, 9), Step(2, 4), Step(1, 3)])
    target, drafter = map(Counted, sessions(pair, 64)[loop])
    played = play(Session(target, drafter), script, list(range(11)), CPU)
    assert work_of(played.rounds) == Work(rounds=4, stages=7, verified_rows=4 + 21, accepted=16)
    assert (drafter.stages, target.rows, target.verifications) == (7, 25, 4)
    assert drafter.read == [11, 1, 10, 5, 4]  # the prompt, then each round's anchor and accepted tokens
    assert [round.context_len for round in played.rounds] == [11, 12, 22, 27]


def test_a_replay_starts_each_response_after_its_own_prompt(recorded):
    scripts = read_scripts(recorded, 1000)
    assert [script.context for script in scripts.responses] == [9, 14]
    whole = len(scripts.steps)
    assert len(read_scripts(recorded, whole - 1).steps) == whole - 1
    assert len(read_scripts(recorded, 1).responses) == 1


@pytest.mark.parametrize("fault", ["missing", "cut", "empty", "sizes", "tree", "plain"])
def test_records_that_cannot_be_replayed_are_refused(fault, recorded, tmp_path, capsys):
    path, lines = tmp_path / "rounds.jsonl", recorded.read_text()
    if fault == "cut":
        path.write_text(lines[:-20])
    elif fault == "empty":
        path.write_text("")
    elif fault != "missing":
        found = responses((9,)) if fault != "sizes" else responses((9,)) + responses((9, 9), stage_len=2)[1:]
        if fault == "tree":
            looped = next(record for record in found[0].rounds if record["accepted"] > 1)
            looped["path"][0] = 4
        if fault == "plain":
            for record in found[0].rounds:
                record["stages"], record["path"], record["accepted"] = [], [], 0
        path.write_text(lines_of(found))
    message = {"missing": "cannot be read", "tree": "holds trees", "sizes": "of 2, 3 tokens", "plain": "no stages"}
    line = refused(capsys, *TINY, "--replay", str(path))
    assert message.get(fault, "no whole rounds.jsonl") in line and "--replay" in line


def test_drawn_acceptance_is_seeded_and_follows_its_chance():
    some = drawn_scripts(Chance(0.8, 2, 2000, seed=3), 4, [10])
    assert some == drawn_scripts(Chance(0.8, 2, 2000, seed=3), 4, [10])
    assert some != drawn_scripts(Chance(0.8, 2, 2000, seed=4), 4, [10])
    mean = sum(step.accepted for step in some.steps) / 2000
    assert mean == pytest.approx(sum(0.8**i for i in range(1, 9)), rel=0.05)
    assert {step.accepted for step in drawn_scripts(Chance(1.0, 2, 5, 0), 4, [10]).steps} == {8}
    assert {step.accepted for step in drawn_scripts(Chance(0.0, 2, 5, 0), 4, [10]).steps} == {0}


def test_synthetic_numbers_are_marked(tmp_path, capsys):
    words = [*TINY, "--synthetic-acceptance", "0.5", "--replay-rounds", "3", "--context", "12"]
    path = tmp_path / "trial.json"
    found = out_of(capsys, *words, "--output", str(path))
    assert (found["lossless"], found["synthetic"], found["synthetic_acceptance"]) == (False, True, 0.5)
    assert json.loads(path.read_text()) == found and found["loops"]["fast"]["work"]["stages"] == 6
    assert entry(words) == 0
    assert "NO RESULT" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("place", ["gain-trial.json", "latency-trial.json", "gate-x.json", "results/trial.json"])
def test_synthetic_numbers_are_never_put_where_results_are(place, tmp_path, capsys):
    (tmp_path / "results").mkdir()
    words = [*TINY, "--synthetic-acceptance", "0.5", "--output", str(tmp_path / place)]
    assert "synthetic acceptance is no result" in refused(capsys, *words)
    assert not (tmp_path / place).exists()


@pytest.mark.parametrize("neighbour", ["summary.json", "rounds.jsonl", "gain-a.json", "latency-a.json"])
def test_synthetic_numbers_are_never_put_beside_results(neighbour, tmp_path, capsys):
    (tmp_path / neighbour).write_text("{}")
    words = [*TINY, "--synthetic-acceptance", "0.5", "--output", str(tmp_path / "trial.json")]
    assert f"beside {neighbour}" in refused(capsys, *words)


# peers


def test_peers_run_on_the_same_weights_or_say_how_they_are_installed(capsys):
    words = [*TINY, "--rows", "1", "--context", "16", "--peers", "transformers,dflash,flashspec"]
    (found,) = out_of(capsys, *words)
    peers = found["peers"]
    for name in ("dloop twin", "dloop fast", "dloop fast, plain", "transformers", "transformers, prompt lookup"):
        assert peers[name]["status"] == "ok", peers[name]
        assert peers[name]["ms_per_round"] > 0 and peers[name]["tokens_per_round"] >= 1
    assert peers["transformers"]["tokens_per_round"] == 1
    for name in ("dflash", "flashspec"):
        assert peers[name]["status"] == "ok" or peers[name]["install"].startswith(f"pip install --no-deps {name}==")


# errors


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--shape", "qwen3-4"], "did you mean qwen3-4b"),
        (["--shape", "x"], "choose one of qwen3-0.6b"),
        (["--rows", "0"], "--rows 0 must be"),
        (["--rows", "4,4"], "--rows 4,4 must be different"),
        (["--context", ""], '--context "" must be'),
        (["--repeats", "0"], "--repeats 0 must be at least 1"),
        (["--replay-rounds", "0"], "--replay-rounds 0 must be at least 1"),
        (["--context", "5000"], "exceed the 4096 positions of tiny"),
        (["--synthetic-acceptance", "0.5", "--context", "5000"], "exceed the 4096 positions of tiny"),
        (["--synthetic-acceptance", "1.5"], "must lie in [0, 1]"),
        (["--synthetic-acceptance", "0.5", "--replay", "x"], "give one"),
        (["--synthetic-acceptance", "0.5", "--peers", "dflash"], "--peers means nothing"),
        (["--peers", "other"], "expected transformers|dflash|flashspec"),
        (["--resume"], "--resume needs --output"),
        (["--output", "/nowhere/at/all.json"], "/nowhere/at is no folder"),
        (["--plot", "x.gif"], "--plot x.gif must end in"),
        (["--device", "tpu9", "--context", "9"], "tpu9"),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else "",
)
def test_a_users_error_is_one_line_and_2(words, message, capsys):
    line = refused(capsys, *TINY, *words)
    assert line.startswith("dloop latency: error: ") and message in line


@pytest.mark.parametrize("text", ["", "{}", "[1]", '[{"shape": "tiny"}]'])
def test_another_file_is_not_continued(text, tmp_path, capsys):
    path = tmp_path / "x.json"
    path.write_text(text)
    assert "is no file of dloop latency" in refused(capsys, *ROWS, "--output", str(path), "--resume")
    assert path.read_text() == text
