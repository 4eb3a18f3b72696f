"""`dloop check`: a right pair passes, and a planted fault of each kind is caught by the part that is to catch it."""

import dataclasses
import json
from collections.abc import Callable, Iterable
from dataclasses import replace

import pytest
import test_cli
import torch
from torch import Tensor

import dloop
from dloop.certificate import law
from dloop.certificate.certify import certify, count_findings
from dloop.certificate.control import turns_over
from dloop.certificate.findings import Fault, LawFinding, MemoryFinding, Pair, Plan, TextFinding
from dloop.certificate.ground import Place, decode_text, lay_ground
from dloop.certificate.law import Tally, check_law, place_of
from dloop.certificate.margins import Difference, deviation, first_difference, near_tie
from dloop.certificate.texts import judge_text
from dloop.cli import check_run
from dloop.cli.main import entry
from dloop.drafters.block import BlockDrafter, BlockMemory
from dloop.judge import Match, Reject
from dloop.settings import Settings, judge_of
from dloop.targets.hf import HFMemory, HFTarget
from dloop.testing import good_drafter, tiny_drafter, tiny_target
from dloop.types import Draft, Features, Rows, Seen, Verdict

PROMPT = [5, 9, 11, 60]
PLAN = Plan(
    prompts={"a": PROMPT},
    gates=(1.0, -2.0, float("-inf")),
    max_new_tokens=24,
    max_stages=3,
    temperature=1.0,
    seed=0,
)
PLACE = Place(part="greedy", dtype="float32", prompt="a")
tiny = test_cli.tiny  # a fixture
pytestmark = pytest.mark.usefixtures("unchecked")  # planted parts are no parts of the package


# planted faults of the target's memory


class KeepsOneMore(HFMemory):
    """The row after the last accepted one stays, where there is one."""

    def verify(self, rows: Rows) -> Seen:
        self.size = len(rows)
        return super().verify(rows)

    def commit(self, slot: int, path: list[int]) -> None:
        super().commit(slot, [*path, path[-1] + 1] if path and path[-1] + 1 < self.size else path)


class BlocksOnePositionLate(HFMemory):
    """Verifications of several rows are rotated one position too far."""

    def verify(self, rows: Rows) -> Seen:
        late = [position + (len(rows) > 1) for position in rows.position]
        return super().verify(replace(rows, position=late))


class AlwaysOnePositionLate(HFMemory):
    """So is plain decoding: the texts agree, and all are wrong."""

    def verify(self, rows: Rows) -> Seen:
        return super().verify(replace(rows, position=[position + 1 for position in rows.position]))


class SeesAhead(HFMemory):
    """Rows of a verification see the rows after them."""

    def _forward(self, slot: int, tokens: list[int], positions: list[int], mask: Tensor | None, keep: int) -> Seen:
        if len(tokens) > 1 and keep == 0:
            mask = torch.zeros(1, 1, len(tokens), self.committed[slot] + len(tokens), dtype=self.target.dtype)
        return super()._forward(slot, tokens, positions, mask, keep)


class BlocksTooRough(HFMemory):
    """Logits of several rows at a time are off by more than their arithmetic rounds; the best hardly ever changes."""

    def verify(self, rows: Rows) -> Seen:
        seen = super().verify(rows)
        noise = torch.randn(seen.logits.shape, generator=torch.Generator().manual_seed(len(rows)))
        rough = seen.logits + 0.15 * seen.logits.float().std() * noise
        return seen if len(rows) == 1 else replace(seen, logits=rough.to(seen.logits.dtype))


def with_memory(target: HFTarget, memory: type[HFMemory]) -> HFTarget:
    """The same target with another memory."""

    class Planted(HFTarget):
        def open(self, taps: tuple[int, ...] = ()) -> HFMemory:
            return memory(self, taps)

    return Planted(**{field.name: getattr(target, field.name) for field in dataclasses.fields(HFTarget)})


# of the drafter's


class KeepsItsTail(BlockMemory):
    """The gap rows of a round stay in front of the verified ones."""

    def extend(self, slot: int, position: int, tokens: list[int], features: Features) -> None:
        if position == 0:
            return super().extend(slot, position, tokens, features)
        self.slots[slot].hidden.clear()
        positions = torch.arange(position, position + len(tokens))[None]
        memory = self.slots[slot].memory
        memory.append(self.drafter.model.project(self.drafter.model.context(features.taps[None]), positions))
        memory.commit()
        return None


def with_tail(drafter: BlockDrafter) -> BlockDrafter:
    class Planted(BlockDrafter):
        def open(self) -> BlockMemory:
            return KeepsItsTail(self)

    return Planted(**{field.name: getattr(drafter, field.name) for field in dataclasses.fields(BlockDrafter)})


# of the judge


class TakesOneMore(Match):
    """The first rejected token is accepted too."""

    def __call__(self, draft: Draft, logits: Tensor) -> Verdict:
        verdict = super().__call__(draft, logits)
        node = len(verdict.path) + 1
        if node >= len(draft.tokens):
            return verdict
        return Verdict(path=[*verdict.path, node], bonus=int(logits[node].argmax()))


class BonusOfTheRowBefore(Match):
    """After a rejection the bonus comes from one row too early."""

    def __call__(self, draft: Draft, logits: Tensor) -> Verdict:
        verdict = super().__call__(draft, logits)
        return replace(verdict, bonus=int(logits[len(verdict.path) - 1].argmax())) if verdict.path else verdict


class NoiseByRow(Match):
    """The noise of sampling is keyed by the row in the forward, not by the position in the text."""

    def choose(self, logits: Tensor, positions: list[int]) -> list[int]:
        return super().choose(logits, list(range(len(positions))))


class ForgetsTheResidual(Reject):
    """After a rejection it draws from p, not from what p has beyond q."""

    def __call__(self, draft: Draft, logits: Tensor) -> Verdict:
        verdict = super().__call__(draft, logits)
        node = len(verdict.path)
        return replace(verdict, bonus=Match(self.sampling).choose(logits[node][None], [draft.positions[node] + 1])[0])


class InflatesTheRatio(Reject):
    """Judges by half the law that drafts were drawn from."""

    def __call__(self, draft: Draft, logits: Tensor) -> Verdict:
        return super().__call__(replace(draft, probs=[q / 2 for q in draft.probs]), logits)


def rule(match: type[Match] = Match, reject: type[Reject] = Reject) -> Callable[..., Match | Reject]:
    """The pair's rule of acceptance with these in place of the right ones."""

    def planted(*given) -> Match | Reject:
        right = judge_of(*given)
        return (match if isinstance(right, Match) else reject)(right.sampling)

    return planted


# the pair


def in_dtype(target: HFTarget, dtype: str) -> HFTarget:
    target.model.to(getattr(torch, dtype))
    return target


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def pair(request) -> Pair:
    return right_pair(request.param)


@pytest.fixture(scope="module")
def float32() -> Pair:
    return right_pair("float32")


def right_pair(dtype: str) -> Pair:
    target = in_dtype(tiny_target(num_layers=3), dtype)
    text = dloop.generate_autoregressive(target, PROMPT, max_new_tokens=24).tokens
    half = text[: len(text) // 2]  # it knows half of the text: long accepted runs and rejections
    return Pair(target=target, drafter=good_drafter(target, [PROMPT + half]), dtype=dtype)


def faults_of(pair: Pair, plan: Plan = PLAN, *, sampled: bool = False) -> list[Fault]:
    return [fault for finding in certify(pair, plan, sampled=sampled) for fault in finding.faults]


def kinds_of(faults: Iterable[Fault]) -> set[str]:
    return {fault.kind for fault in faults}


# no false alarm


def test_a_right_pair_has_no_fault(pair):
    findings = list(certify(pair, PLAN, sampled=True))
    assert [fault for finding in findings for fault in finding.faults] == []
    assert len(findings) == count_findings(PLAN, sampled=True)
    greedy, memory, sampled, sampled_law = findings
    assert isinstance(greedy, TextFinding) and [gate.gate for gate in greedy.gates] == list(PLAN.gates)
    assert [control.rows for control in greedy.controls] == [5, 13]
    assert greedy.text == dloop.generate_autoregressive(pair.target, PROMPT, max_new_tokens=24).tokens
    assert isinstance(memory, MemoryFinding) and memory.probes > 2
    assert isinstance(sampled, TextFinding) and sampled.text != greedy.text
    assert isinstance(sampled_law, LawFinding) and sampled_law.forbidden == 0 and sampled_law.drafted > 20
    if pair.dtype == "float32":
        assert all(gate.difference is None for finding in (greedy, sampled) for gate in finding.gates)


def test_the_good_drafter_accepts_and_is_rejected(float32):
    """Else the planted faults below would prove little."""
    ground, _ = lay_ground(float32, PROMPT, Settings(max_new_tokens=24), PLACE)
    text = decode_text(float32, float32.drafter, PROMPT, Settings(max_new_tokens=24, loop_gate=float("-inf")))
    accepted = [r.accepted for r in text.generation.rounds]
    assert max(accepted) >= float32.drafter.config.stage_len and 0 in accepted
    assert text.tokens == ground.plain.tokens
    assert torch.equal(text.rows.argmax(-1), torch.tensor(text.tokens))  # row i is what token i was chosen from


# planted faults


@pytest.mark.parametrize(
    ("memory", "kinds"),
    [
        (KeepsOneMore, ["verification", "target_memory"]),
        (BlocksOnePositionLate, ["control", "target_memory"]),
        (AlwaysOnePositionLate, ["reference"]),
        (SeesAhead, ["control", "target_memory"]),
        (BlocksTooRough, ["control"]),
    ],
)
def test_a_fault_of_the_target_is_caught_and_placed(pair, memory, kinds):
    """The control tells a wrong verification from rows that a rejection left; one forward tells both from plain."""
    faults = faults_of(replace(pair, target=with_memory(pair.target, memory)))
    found = list(dict.fromkeys(fault.kind for fault in faults))
    if memory is AlwaysOnePositionLate:  # in float32 a fresh memory's prefill differs too
        found = [kind for kind in found if kind != "target_memory"]
    assert found == kinds
    assert all(fault.harms_text and fault.measured > fault.limit for fault in faults)


@pytest.mark.parametrize("match", [TakesOneMore, BonusOfTheRowBefore])
def test_a_wrong_acceptance_points_at_the_judge(pair, match):
    faults = faults_of(replace(pair, judge_of=rule(match=match)))
    assert "judge" in kinds_of(faults)
    assert kinds_of(fault for fault in faults if fault.part == "greedy") == {"judge"}
    first = faults[0]
    assert first.prompt == "a" and first.gate in PLAN.gates and first.index is not None
    assert first.plain != first.other and first.gap > 0 and first.harms_text


def test_noise_keyed_by_the_row_is_caught_where_texts_are_sampled(float32):
    faults = faults_of(replace(float32, judge_of=rule(match=NoiseByRow)), sampled=True)
    assert {(fault.part, fault.kind) for fault in faults} == {("sampled", "judge")}


@pytest.mark.parametrize("reject", [ForgetsTheResidual, InflatesTheRatio])
def test_a_wrong_rejection_breaks_the_law(float32, reject):
    hot = replace(PLAN, temperature=3.0)  # the random drafter's law and the target's then overlap
    random = replace(float32, drafter=tiny_drafter(float32.target))
    right = check_law(random, hot)
    assert right.faults == [] and right.is_sharp
    faults = check_law(replace(random, judge_of=rule(reject=reject)), hot).faults
    assert kinds_of(faults) == {"law"}


def test_a_law_check_says_so_where_it_is_blunt(float32):
    """Two tokens a text show next to nothing: no fault, and no claim."""
    law_found = check_law(float32, replace(PLAN, max_new_tokens=2, gates=(1.0,)))
    assert law_found.faults == [] and not law_found.is_sharp and law_found.texts == 6


def test_a_bonus_that_is_not_drawn_breaks_the_law():
    """Where drafts are always accepted, only the bonus can be wrong: the second test sees it, the first cannot."""
    tally, generator = Tally(torch.Generator().manual_seed(0)), torch.Generator().manual_seed(1)
    for _ in range(200):
        p = torch.rand(11, generator=generator).softmax(-1)
        tally.add(law.Spot(int(p.argmax()), p, None))
    assert kinds_of(law.faults_of(tally, "float32")) == {"law"} and tally.deviations == 0


def test_a_forbidden_token_breaks_the_law():
    tally = Tally(torch.Generator().manual_seed(0))
    tally.add(law.Spot(2, torch.tensor([0.5, 0.5, 0.0]), torch.tensor([0.3, 0.3, 0.4])))
    assert law.faults_of(tally, "float32")[0].measured == 1


def test_a_stale_drafter_costs_acceptance_and_not_the_text(float32):
    faults = faults_of(replace(float32, drafter=with_tail(float32.drafter)))
    assert {(fault.part, fault.kind) for fault in faults} == {("memory", "drafter_memory")}
    assert not any(fault.harms_text for fault in faults)


def test_a_text_that_ends_elsewhere_is_a_fault(float32):
    ground, _ = lay_ground(float32, PROMPT, Settings(max_new_tokens=9), PLACE)
    short = replace(ground.plain, tokens=ground.plain.tokens[:-1], rows=ground.plain.rows[:-1])
    assert judge_text(ground, ground.plain, PLACE) == []
    assert kinds_of(judge_text(ground, short, PLACE)) == {"ending"}


@pytest.mark.parametrize(("gap", "kinds"), [(0.5e-4, set()), (3e-4, {"verification"})], ids=["near-tie", "fault"])
def test_a_difference_is_a_near_tie_up_to_the_limit_and_a_fault_beyond(float32, gap, kinds):
    ground, _ = lay_ground(float32, PROMPT, Settings(max_new_tokens=9), PLACE)
    best, second = ground.plain.rows[4].topk(2).indices.tolist()
    plain, other = ground.plain.rows.clone(), ground.plain.rows.clone()
    plain[4, second] = plain[4, best] - gap
    other[4, second] = plain[4, best] + 1e-5
    other[4, best] = plain[4, best]
    near = replace(ground, plain=replace(ground.plain, rows=plain), limit=1.0)
    tokens = [*ground.plain.tokens[:4], second]
    text = replace(ground.plain, tokens=tokens, rows=other[:5])
    found = judge_text(near, text, PLACE)
    assert kinds_of(found) == kinds
    assert not found or (found[0].index, found[0].plain, found[0].other) == (4, best, second)


def test_a_row_that_lies_apart_is_a_fault_though_the_text_is_the_same(float32):
    ground, _ = lay_ground(float32, PROMPT, Settings(max_new_tokens=9), PLACE)
    rows = ground.plain.rows.clone()
    rows[6, ground.plain.tokens[6]] += 1.0  # surer of the same token
    (fault,) = judge_text(ground, replace(ground.plain, rows=rows), PLACE)
    assert (fault.kind, fault.index) == ("verification", 6)


def test_the_target_alone_repeats_a_turn_that_arithmetic_made(pair):
    """In the same blocks the same logits: it prefers what its own rows prefer, and not what a judge made up."""
    ground, _ = lay_ground(pair, PROMPT, Settings(max_new_tokens=24), PLACE)
    text = decode_text(pair, pair.drafter, PROMPT, Settings(max_new_tokens=24, loop_gate=-2.0))
    for index in (3, 9, 20):
        best, second = text.rows[index].topk(2).indices.tolist()
        turned = Difference(index=index, plain=second, other=best, gap=0.0)
        assert turns_over(pair, ground, text, turned)
        assert not turns_over(pair, ground, text, replace(turned, plain=best, other=second))


def test_margins():
    assert first_difference([1, 2, 3], [1, 2], lambda index: torch.zeros(5)) is None
    found = first_difference([1, 2, 3], [1, 4, 3], lambda index: torch.tensor([0.0, 0, 3, 0, 1]))
    assert found == Difference(index=1, plain=2, other=4, gap=2.0)
    rows = torch.randn(3, 50, generator=torch.Generator().manual_seed(0))
    assert deviation(rows + 7, rows).max() < 1e-6  # a common shift changes no choice
    assert deviation(rows * 1.1, rows).tolist() == pytest.approx([0.1] * 3, rel=1e-4)
    assert near_tie("float32", rows, rows + torch.rand(3, 50)).tolist() == pytest.approx([1e-4] * 3)
    assert near_tie("bfloat16", rows, rows).tolist() == [0.25] * 3
    assert near_tie("bfloat16", rows, rows * 1.5).min() > 2


def test_places_are_uniform_and_cover_the_unit():
    p = torch.tensor([0.5, 0.25, 0.25], dtype=torch.float64)
    order = torch.tensor([2.0, 1.0, 1.0])
    assert [place_of(p, order, token, 0.0) for token in range(3)] == [0.5, 0.0, 0.0]
    assert [place_of(p, order, token, 1.0) for token in range(3)] == [1.0, 0.5, 0.5]


# the command


SMALL = ("--max-new-tokens", "12", "--loop-gate", "1.0,-inf", "--prompt", "Hello")


def words_of(tiny: test_cli.Folders) -> list[str]:
    return ["check", "--model", str(tiny.target), "--draft-model", str(tiny.drafter), *SMALL]


def test_a_certificate_that_cannot_be_written_costs_no_verdict(tiny, capsys):
    assert entry([*words_of(tiny), "--output", "/proc/certificate.json"]) == 2  # nobody can write there
    out, err = capsys.readouterr()
    assert "lossless" in out and "/proc/certificate.json cannot be written" in err and len(err.splitlines()) <= 2


def test_a_certificate_is_one_document(tiny, capsys, tmp_path):
    file = tmp_path / "certificate.json"
    assert entry([*words_of(tiny), "--json", "--output", str(file)]) == 0
    out, err = capsys.readouterr()
    assert "fault" not in err
    found = json.loads(out)
    assert json.loads(file.read_text()) == found
    assert (found["schema"], found["certified"], found["lossless"], found["faults"]) == (1, True, True, [])
    assert found["setting"]["gates"] == [1.0, "-inf"]
    assert [part["part"] for part in found["findings"]["float32"]] == ["greedy", "memory", "sampled", "law"]
    assert [part["part"] for part in found["findings"]["bfloat16"]] == ["greedy", "memory"]
    assert found["prompts"]["1"]["text"] == "Hello"
    assert len(found["checkpoint_sha256"]["target"]) == len(found["checkpoint_sha256"]["draft"]) == 64
    assert found["versions"]["dloop"] == dloop.__version__ and found["hardware"]["cores"]


def test_the_report_says_certified(tiny, capsys):
    assert entry([*words_of(tiny), "--dtype", "float32"]) == 0
    out = capsys.readouterr().out
    assert "Certified: lossless" in out and "of 12 flip" in out and "gate -inf" in out


def plant(monkeypatch, **parts) -> None:
    """Let the command load a pair with planted parts."""
    load = check_run.load_pair

    def planted(*given):
        pair, tokenizer = load(*given)
        return replace(pair, **{name: change(pair) for name, change in parts.items()}), tokenizer

    monkeypatch.setattr(check_run, "load_pair", planted)


def test_a_fault_is_1_and_one_line_that_says_where_and_what(tiny, capsys, monkeypatch):
    plant(monkeypatch, judge_of=lambda pair: rule(match=TakesOneMore))
    assert entry([*words_of(tiny), "--dtype", "float32", "--json"]) == 1
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert not found["certified"] and not found["lossless"]
    fault = found["faults"][0]
    assert fault["kind"] == "judge" and fault["prompt"] == "1" and fault["gap"] > 0
    lines = [line for line in err.splitlines() if line.startswith("dloop check: fault: ")]
    assert len(lines) == len(found["faults"])
    assert f"float32, greedy, prompt 1, gate {fault['gate']:g}, token {fault['index']} is " in lines[0]
    assert "rule of acceptance" in lines[0]


def test_a_fault_of_the_drafter_is_1_and_lossless(tiny, capsys, monkeypatch):
    plant(monkeypatch, drafter=lambda pair: with_tail(pair.drafter))
    assert entry([*words_of(tiny), "--dtype", "float32"]) == 1
    out, err = capsys.readouterr()
    assert "the texts are the target's, but the pair has a fault" in " ".join(out.split())
    assert "drafter memory" in err and "acceptance suffers" in err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--loop-gate", "nan"], "--loop-gate nan"),
        (["--loop-gate", ""], "--loop-gate is empty"),
        (["--max-new-tokens", "1"], "leaves nothing to draft"),
        (["--max-stages", "0"], "must be at least 1"),
        (["--temperature", "0"], "not a temperature to sample at"),
        (["--prompt", " "], "--prompt is empty"),
        (["--output", "/nowhere/certificate.json"], "must be a file in a folder that is there"),
        (["--seed", "-1"], "seed=-1"),
        (["--prompt", "x" * 300], "exceed the context"),
    ],
)
def test_a_users_error_is_2(tiny, capsys, words, message):
    assert entry([*words_of(tiny), "--dtype", "float32", *words]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and message in err


def test_a_certificate_is_of_a_pair(tiny, capsys):
    assert entry(["check", "--model", str(tiny.target)]) == 2
    assert "needs --draft-model" in capsys.readouterr().err
