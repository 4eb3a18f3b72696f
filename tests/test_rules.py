"""Stop rules: the text stays the target's under each, at any temperature; each does what it publishes."""

import dataclasses
import itertools
import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch

import dloop
from dloop.batch import generate_many
from dloop.bench.measure import full_acceptance_rate
from dloop.drafters.gemma4 import FAMILY as GEMMA_FAMILY
from dloop.drafters.mtp import FAMILY as MTP_FAMILY
from dloop.drafters.watched import figures
from dloop.errors import UserError
from dloop.gate import FixedGate
from dloop.judge import Match, Reject
from dloop.loop import Limits, Session, decode, run_one
from dloop.records import rebuild, round_record
from dloop.rules.choose import HEAD_OF, RULES, longest_of
from dloop.rules.heads import HEADS, HeadConfig, load_head, save_head
from dloop.rules.parameter import parameters_of
from dloop.rules.plain import DDD, DISCO, SVIP, AdaEDL, BiLD, LLMCad, best_threshold
from dloop.sampling import Draw, law
from dloop.settings import Settings
from dloop.stop import AfterRule, BeforeRule, Drawn, Row, RuledRequest, Watch, shortened, under
from dloop.testing import (
    CHAIN_KINDS,
    WINDOW_KINDS,
    ScriptedDrafter,
    TableTarget,
    chain,
    taught_drafter,
    tiny_drafter,
    tiny_target,
)
from dloop.trees.shape import TreeShape
from dloop.types import Draft, Features, First, Round, Sampling, Stage, StageRecord, StageRequest

LENGTH, K = 20, 3
PROMPT = [5, 9, 3, 11, 7]
FAMILIES = ["dspark", "dflash", "domino", "eagle3"]
STEPS = {"dflash": 50, "domino": 50}
LOOSE = {"dspark": "dspark:threshold=0.3"}  # what must be given


def spec(rule: str, *more: str) -> str:
    text = LOOSE.get(rule, rule)
    return text if not more else text + ("," if ":" in text else ":") + ",".join(more)


# Real tiny models


@dataclasses.dataclass(frozen=True)
class Case:
    target: object
    drafter: object
    text: list[int]
    heads: dict[str, str]  # folders, by kind

    def generate(self, rule: str | None, **more):
        kind = HEAD_OF.get(rule.partition(":")[0]) if rule else None
        own = self.drafter.family == "dspark" and kind == "specdec++"
        head = None if kind is None or own else self.heads[kind]
        settings = {"max_new_tokens": LENGTH, "stop_token_ids": [], "stop_rule": rule, "gate_head": head}
        return dloop.generate(self.target, self.drafter, PROMPT, **settings | more)


@pytest.fixture(scope="module", params=FAMILIES)
def case(request, tmp_path_factory) -> Case:
    target = tiny_target("qwen3", seed=5)
    text = dloop.generate_autoregressive(target, PROMPT, max_new_tokens=LENGTH, stop_token_ids=[]).tokens
    drafter = taught_drafter(
        target, [PROMPT + text], family=request.param, stage_len=K, steps=STEPS.get(request.param, 20)
    )
    home, heads = tmp_path_factory.mktemp("heads"), {}
    for kind, made in HEADS.items():
        config = HeadConfig(
            kind=kind,
            family=drafter.family,
            hidden_size=drafter.config.hidden_size,
            longest=6,
            reads_token=drafter.family == "eagle3",
            block=2,
        )
        torch.manual_seed(3)
        head = made(config)
        if kind == "adaeagle":
            torch.nn.init.constant_(head.out.bias, 2.0)
        save_head(head, home / kind)
        heads[kind] = str(home / kind)
    return Case(target, drafter, text, heads)


def rules_of(case: Case) -> list[str]:
    return [name for name in RULES if name != "dspark" or case.drafter.family == "dspark"]


def shapes_of(case: Case) -> list[dict]:
    return [{"tree_budget": 0}, {"tree_budget": 9, "topk_k": 3}] if case.drafter.family == "eagle3" else [{}]


def test_greedy_text_is_the_target_s_own_under_each_rule(case):
    for rule, shape, gate in itertools.product(rules_of(case), shapes_of(case), (1.0, -2.0)):
        out = case.generate(spec(rule), loop_gate=gate, max_stages=3, **shape)
        assert out.tokens == case.text, (rule, shape, gate)


def test_matched_samples_are_plain_sampling_s_under_each_rule(case):
    law = {"temperature": 0.8, "top_k": 20, "seed": 11}
    plain = dloop.generate_autoregressive(case.target, PROMPT, LENGTH, stop_token_ids=[], **law).tokens
    for rule, shape in itertools.product(rules_of(case), shapes_of(case)):
        assert case.generate(spec(rule), loop_gate=-4.0, verify="match", **shape, **law).tokens == plain, rule


def test_drawn_drafts_stop_too_and_bring_their_laws(case):
    law = {"temperature": 0.8, "seed": 11, "verify": "reject", "tree_budget": 0}
    cuts = 0
    for rule in rules_of(case):
        out = case.generate(spec(rule), loop_gate=-4.0, **law)
        assert len(out.tokens) == LENGTH
        cuts += sum(r.stage_records[-1].reason == "rule" for r in out.rounds)
    assert cuts


def test_a_stage_that_a_rule_cut_ends_its_round(case):
    """And what is verified is what the rule left: the cut stage's nodes, in a chain all before it whole."""
    strict = {"bild": "bild:fallback=0.9", "svip": "svip:h=0.1"}
    for rule, shape in itertools.product(strict.values(), shapes_of(case)):
        rounds = case.generate(rule, loop_gate=float("-inf"), max_stages=3, **shape).rounds
        ends = [record.reason for r in rounds for record in r.stage_records]
        assert "rule" in ends
        for r in rounds:
            assert all(record.reason == "open" for record in r.stage_records[:-1])
            assert r.stages == len(r.draft.scores) and r.draft.stops[-1] == len(r.draft.tokens)


def test_a_rule_that_never_stops_changes_nothing(case):
    for shape in shapes_of(case):
        depth = {"draft_depth": 4} if case.drafter.family == "eagle3" else {}
        loose = case.generate("svip:h=99", loop_gate=-2.0, **shape, **depth).rounds
        none = case.generate(None, loop_gate=-2.0, **shape, **depth).rounds
        assert [(r.draft.tokens, r.draft.parents, r.path) for r in loose] == [
            (r.draft.tokens, r.draft.parents, r.path) for r in none
        ]


def test_rules_may_draft_beyond_the_trained_depth():
    target = tiny_target("qwen3", seed=5)
    drafter = tiny_drafter(target, family="eagle3", stage_len=2)
    for shape in ({"tree_budget": 0}, {"tree_budget": 40, "topk_k": 2}):
        out = dloop.generate(target, drafter, PROMPT, 12, stop_rule="svip:h=99,longest=6", **shape)
        assert {r.draft.depth for r in out.rounds} == {6}
    out = dloop.generate(target, drafter, PROMPT, 12, stop_rule="svip:h=99", tree_budget=0, draft_depth=3)
    assert {r.draft.depth for r in out.rounds} == {3}


def test_a_round_may_draft_nothing_at_all(case):
    for shape in shapes_of(case):
        out = case.generate("bild:fallback=1", loop_gate=-2.0, **shape)
        assert out.tokens == case.text
        records = [round_record(r) for r in out.rounds]
        assert rebuild(out.first, records).tokens == out.tokens
        empty = [r for r in out.rounds if not r.drafted]
        assert empty and all((r.accepted, r.full_stages, r.stages) == (0, 0, 1) for r in empty)
        assert full_acceptance_rate([round_record(r) for r in empty]) == {}  # no stage drafted a token


@pytest.mark.parametrize("kind", [*CHAIN_KINDS, *WINDOW_KINDS])
def test_built_in_heads_and_assistants_obey_too(kind):
    target = tiny_target(kind)
    text = dloop.generate_autoregressive(target, PROMPT, 12).tokens
    drafter = tiny_drafter(target, family=MTP_FAMILY if kind in CHAIN_KINDS else GEMMA_FAMILY)
    for rule, gate in itertools.product(("svip:h=0.5", "disco", "ddd:checks=2"), (1.0, -9.0)):
        out = dloop.generate(target, drafter, PROMPT, 12, stop_rule=rule, loop_gate=gate, stop_token_ids=[])
        assert out.tokens == text
        assert any(r.stage_records[-1].reason == "rule" for r in out.rounds)


@dataclasses.dataclass(frozen=True)
class Asked(FixedGate):
    """Notes the drafts that it is asked about."""

    drafts: list[Draft] = dataclasses.field(default_factory=list)

    def opens(self, draft: Draft) -> bool:
        self.drafts.append(draft)
        return super().opens(draft)


def test_no_gate_is_asked_behind_a_stage_that_a_rule_cut(case, monkeypatch):
    """Alone, and of many: each decision is one of a round that the rule did not end there."""
    gate = Asked(float("-inf"))
    monkeypatch.setattr("dloop.batch.gate_of", lambda *_: gate)
    settings = Settings(max_new_tokens=12, stop_rule="svip:h=0.35", loop_gate=-2.0, max_stages=3, stop_token_ids=[])
    for live in (1, 3):
        gate.drafts.clear()
        done = list(generate_many(case.target, case.drafter, [PROMPT, [4, 2], [8, 8, 1]], settings, live=live))
        records = [record for text in done for round in text.rounds for record in round.stage_records]
        cut = sum(record.reason == "rule" for record in records)
        assert cut and len(gate.drafts) == len(records) - cut


def test_many_sequences_have_a_rule_each(case):
    settings = Settings(max_new_tokens=12, stop_rule="adaedl", loop_gate=-2.0, stop_token_ids=[])
    prompts = [PROMPT, [4, 2], [8, 8, 1]]
    done = generate_many(case.target, case.drafter, prompts, settings, live=1)
    found = {each.index: each.tokens for each in done}
    for index, prompt in enumerate(prompts):
        alone = dloop.generate_autoregressive(case.target, prompt, 12, stop_token_ids=[]).tokens
        assert found[index] == alone


@dataclasses.dataclass
class Stops(AfterRule):
    """Behind a given row; keeps what it was shown."""

    last: int
    shown: list[Drawn] = dataclasses.field(default_factory=list)

    def goes_on(self, drawn: Drawn) -> bool:
        self.shown.append(drawn)
        return drawn.row.index < self.last


@dataclasses.dataclass
class Refuses(BeforeRule):
    """A given row."""

    first: int

    def admits(self, row: Row) -> bool:
        return row.index < self.first


def stage_under(case: Case, rule, index: int = 0) -> Stage:
    """A drawn stage after the prompt; T = 1, so that a row's law is the drafter's own."""
    features = case.target.features(torch.tensor([PROMPT]), case.drafter.taps)
    memory = case.drafter.open()
    memory.extend(0, 0, PROMPT, Features(taps=features.taps[0], last=features.last[0]))
    asked = {"slot": 0, "anchor": case.text[0], "sampling": Sampling(temperature=1.0, seed=4)}
    for at in range(index):
        (stage,) = memory.draft([StageRequest(**asked, index=at)])
        asked["anchor"] = stage.tokens[-1]
    request = StageRequest(**asked, index=index) if rule is None else RuledRequest(**asked, index=index, rule=rule)
    return memory.draft([request])[0]


@pytest.mark.parametrize("index", [0, 1])
def test_what_is_left_of_a_stage_is_the_beginning_of_the_whole_one(case, index):
    """Tokens, log-probabilities and laws; and rows tell what these laws tell, of drawn tokens and of their states."""
    whole = stage_under(case, None, index)
    for rule, count in [(Stops(1), 2), (Refuses(1), 1), (Refuses(0), 0), (note := Stops(K - 1), K)]:
        left = stage_under(case, rule, index)
        assert left.cut and (left.tokens, left.parents) == (whole.tokens[:count], whole.parents[:count])
        assert left.logp == pytest.approx(whole.logp[:count], abs=1e-5) and len(left.spine) == count
        assert count == 0 or torch.allclose(left.probs, whole.probs[:count])
    kept = whole.probs.sum(0) > 0
    for row, (drawn, probs) in enumerate(zip(note.shown, whole.probs, strict=True)):
        best, second = probs.topk(2).values.tolist()
        assert (drawn.row.index, drawn.row.depth) == (row, index * K + row)
        assert drawn.row.top_logp == pytest.approx(math.log(best), abs=1e-4)
        assert drawn.row.margin == pytest.approx(math.log(best / second), abs=1e-4)
        assert drawn.row.entropy == pytest.approx(
            torch.distributions.Categorical(probs[kept]).entropy().item(), abs=1e-4
        )
        assert drawn.logp == pytest.approx(whole.logp[row], abs=1e-5)
        assert (drawn.row.confidence is not None) == (case.drafter.family == "dspark")
    assert note.shown[-1].path_logp == pytest.approx(sum(each.row.top_logp for each in note.shown))
    assert not stage_under(case, Stops(K), index).cut


def tree_under(rule, depth: int, nodes: int = 12) -> Stage:
    """EAGLE-3's tree of so many levels after the prompt."""
    target = tiny_target("qwen3", seed=5)
    drafter = tiny_drafter(target, family="eagle3", stage_len=depth).with_trees(TreeShape(budget=nodes, topk=3))
    features = target.features(torch.tensor([PROMPT]), drafter.taps)
    memory = drafter.open()
    memory.extend(0, 0, PROMPT, Features(taps=features.taps[0], last=features.last[0]))
    asked = {"slot": 0, "anchor": 8, "index": 0}
    return memory.draft([StageRequest(**asked) if rule is None else RuledRequest(**asked, rule=rule)])[0]


def test_a_tree_that_a_rule_ended_is_the_tree_of_fewer_levels_and_as_many_nodes():
    for rule, depth in [(Stops(1), 2), (Refuses(2), 2), (Refuses(1), 1), (Stops(2), 3)]:
        assert tree_under(rule, 5) == replace(tree_under(None, depth), cut=True)
    assert tree_under(Refuses(0), 5).tokens == []
    whole, note = tree_under(None, 4), Stops(9)
    assert tree_under(note, 4) == whole
    paths = [each.path_logp for each in note.shown]
    assert paths[-1] == pytest.approx(whole.score, abs=1e-5)  # the best path of full depth
    assert all(each.mass_logp > each.path_logp for each in note.shown)  # three paths together
    assert [each.row.index for each in note.shown] == [0, 1, 2, 3]


# The law at T > 0: a double that draws, small vocabulary

V, STAGE, TEXT, RUNS = 3, 3, 3, 700
CRITICAL = 62.2  # chi-square of 26 degrees of freedom, p = 0.0001


@dataclasses.dataclass
class RuledDrafter(ScriptedDrafter):
    """Draws from a table of its own and shows each row to the rule, as an autoregressive drafter does."""

    table: TableTarget | None = None
    watches: type[Watch] = Watch
    known: dict[tuple[int, ...], list[float]] = dataclasses.field(default_factory=dict)  # figures, by text

    def _stage(self, request: StageRequest) -> Stage:
        assert self.table is not None and isinstance(request, RuledRequest)
        watch = self.watches(request.rule, request.index * STAGE, STAGE)
        tail = self.tails[request.slot] if request.index else [request.anchor]
        text = self.texts[request.slot] + tail
        logits, tokens, logp, probs, draw = [], [], [], [], Draw(request.sampling, len(text))
        for row in range(STAGE):
            logits.append(self.table.logits(text + tokens))
            drawn = draw(logits[-1], row)
            if (key := (*text, *tokens)) not in self.known:
                self.known[key] = figures(logits[-1][None])[0].tolist()
            top, margin, entropy = self.known[key]
            path = watch.path_logp + top
            about = Row(index=row, depth=watch.before + row, stage_len=STAGE, top_logp=top, margin=margin,
                        entropy=entropy, confidence=3 * top + 1, hidden=logits[-1])  # fmt: skip
            tokens.append(int(drawn.token))
            logp.append(float(logits[-1].log_softmax(-1)[tokens[-1]]))
            probs.append(drawn.probs)
            if watch.ends(Drawn(row=about, logp=logp[-1], path_logp=path, mass_logp=path)):
                break
        order = list(range(len(tokens)))
        laws = None if request.sampling is None else torch.stack(probs)
        stage = Stage(
            tokens=tokens, parents=[i - 1 for i in order], logp=logp, spine=order, score=sum(logp), probs=laws
        )
        stage = shortened(stage, watch, logp)
        self.tails[request.slot] = tail + stage.tokens
        return stage


class CutsBeforeByValue(Watch):
    """Planted: leaves a token out because of what it is."""

    def ends(self, drawn: Drawn) -> bool:
        self.is_cut = not self.rule.goes_on(drawn)
        self.kept += not self.is_cut
        self.path_logp = drawn.path_logp
        return self.is_cut


class Unlikely(AfterRule):
    def goes_on(self, drawn: Drawn) -> bool:
        return drawn.logp > -0.9


def head_of(kind: str):
    torch.manual_seed(7)
    config = HeadConfig(kind=kind, family="eagle3", hidden_size=V, longest=STAGE, reads_token=True, block=2)
    head = HEADS[kind](config)
    last = list(head.modules())[-1] if kind == "disco" else head.out
    with torch.no_grad():
        last.weight.mul_(4)
        last.bias.fill_({"adaeagle": 2.0, "specdec++": 1.5, "disco": -0.65, "pacer": -1.5}[kind])
    return head


def rule_for(name: str):
    """Thresholds at which rows of this double are cut now and then."""
    given = {"bild": {"fallback": 0.6}, "svip": {"h": 0.35}, "llmcad": {"start": 0.4}, "dspark": {"threshold": 0.35},
             "disco": {"threshold": 0.5},
             "ddd": {"checks": (1, 2), "floor": -0.6}, "specdec++": {"h": 0.3, "least": 1}}.get(name, {})  # fmt: skip
    if name in HEAD_OF:
        given = {**given, "head": head_of(HEAD_OF[name])}
    rule = RULES[name](**given)
    if name == "disco":  # what it learns here would soon end no stage, or every one
        rule.observe = lambda round: None
    return rule


def counted(make, judge, watches: type[Watch] = Watch, gate: float = -3.0) -> tuple[float, Counter]:
    """(chi-square of the first three tokens against the target's law, how often first stages were how long)."""
    target = TableTarget.random(V, seed=3, scale=1.0)
    noise = torch.randn(target.table.shape, generator=torch.Generator().manual_seed(1))
    noisy = TableTarget(target.table + noise)
    counts = dict.fromkeys(itertools.product(range(V), repeat=TEXT), 0)
    limits = Limits(max_new_tokens=TEXT, max_stages=3, context=1000)
    sampling, rule, lengths, known = Sampling(temperature=1.0), make(), Counter(), {}
    for seed in range(RUNS):
        drafter = RuledDrafter(stage_len=STAGE, script=lambda *_: chain([]), table=noisy, watches=watches, known=known)
        session = Session(target, drafter)
        task = decode(
            session, 0, [1, 2], gate=FixedGate(gate), judge=judge(replace(sampling, seed=seed)), limits=limits
        )
        tokens = []
        for event in run_one(under(task, rule), session):
            tokens += [event.token] if isinstance(event, First) else event.emitted
            if isinstance(event, Round):
                lengths[event.stage_records[0].stop - 1] += 1
        counts[tuple(tokens)] += 1
    found, expected = [], []
    for text in counts:
        chance = math.prod(
            law(target.logits([1, 2, *text[:i]])[None], sampling)[0, token].item() for i, token in enumerate(text)
        )
        found.append(counts[text])
        expected.append(RUNS * chance)
    cells = [(f, e) for f, e in zip(found, expected, strict=True) if e >= 5]
    small = [(f, e) for f, e in zip(found, expected, strict=True) if e < 5]
    cells.append((sum(f for f, _ in small), sum(e for _, e in small)))
    return sum((f - e) ** 2 / e for f, e in cells if e > 0), lengths


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("judge", [Reject, Match])
@pytest.mark.parametrize("name", RULES)
def test_the_text_follows_the_target_s_law_under_each_rule(name, judge):
    found, lengths = counted(lambda: rule_for(name), judge)
    assert found < CRITICAL
    assert sum(count > RUNS / 50 for count in lengths.values()) > 1, lengths  # the rule decides something


@pytest.mark.usefixtures("unchecked")
def test_a_rule_that_leaves_out_what_it_looked_at_is_caught():
    assert counted(Unlikely, Reject)[0] < CRITICAL
    assert counted(Unlikely, Reject, CutsBeforeByValue)[0] > 1.5 * CRITICAL


# Kinds


def test_every_rule_is_of_one_kind_and_rows_know_nothing_of_their_token():
    for name, rule in RULES.items():
        assert issubclass(rule, BeforeRule) != issubclass(rule, AfterRule), name
        longest = {each.name for each in parameters_of(rule)} & {"longest"}
        assert longest or name == "dspark"
    assert not {"token", "logp"} & {each.name for each in dataclasses.fields(Row)}


def test_what_each_kind_may_cut():
    drawn = [seen(top_logp=math.log(0.9)), seen(index=1, top_logp=math.log(0.5)), seen(index=2)]
    before, after = Watch(BiLD(), 0, 3), Watch(SVIP(), 0, 3)
    assert [before.ends(drawn[0]), before.ends(drawn[1]), before.kept] == [False, True, 1]
    assert [after.ends(seen(entropy=0.5)), after.ends(seen(index=1, entropy=0.7)), after.kept] == [False, True, 2]


def test_the_table_in_the_docs_names_each_rule_and_its_defaults():
    from pathlib import Path

    page = (Path(dloop.__file__).parents[1] / "docs" / "baselines.md").read_text()
    for name, rule in RULES.items():
        row = next(line for line in page.splitlines() if line.startswith(f"| `{name}`"))
        for each in parameters_of(rule):
            assert f"`{each.name}" in row, (name, each.name)
            if each.default not in (None, dataclasses.MISSING):
                told = "+".join(map(str, each.default)) if isinstance(each.default, tuple) else f"{each.default:g}"
                assert f"`{each.name}={told}`" in row, (name, each.name)
        assert ("before" if issubclass(rule, BeforeRule) else "behind") in row, name


# The published rules


def seen(
    index: int = 0, depth: int | None = None, logp: float = -0.1, path: float = -0.1, mass: float = -0.1, **row
) -> Drawn:
    facts = {
        "top_logp": -0.1,
        "margin": 1.0,
        "entropy": 0.3,
        "confidence": None,
        "stage_len": 8,
        "hidden": torch.zeros(4),
    }
    about = Row(index=index, depth=index if depth is None else depth, **facts | row)
    return Drawn(row=about, logp=logp, path_logp=path, mass_logp=mass)


def finished(accepted: int, drafted: int, reason: str = "gate") -> Round:
    draft = Draft.rooted(0, 5).graft(chain([1] * drafted) if drafted else replace(chain([]), cut=True))
    record = StageRecord(start=1, stop=drafted + 1, score=0.0, gate=None, reason=reason)
    path = list(range(1, accepted + 1))
    return Round(context_len=5, draft=draft, stage_records=[record], path=path, bonus=1, emitted=[1], draft_s=0.0,
                 verify_s=0.0, finish=None)  # fmt: skip


def test_bild_looks_at_the_best_probability():
    assert BiLD().admits(seen(top_logp=math.log(0.61)).row) and not BiLD().admits(seen(top_logp=math.log(0.59)).row)


def test_svip_stops_above_point_six_nat():
    assert SVIP().goes_on(seen(entropy=0.599)) and not SVIP().goes_on(seen(entropy=0.601))


def test_adaedl_bounds_the_acceptance_and_adapts():
    rule = AdaEDL(start=0.5)
    assert rule.goes_on(seen(entropy=1.24)) and not rule.goes_on(seen(entropy=1.26))
    rule.observe(finished(0, 4))
    assert (rule.rate, rule.threshold) == (0.0, pytest.approx(0.501))
    rule.rate = 1.0
    rule.observe(finished(4, 4))  # as long as could be: as strict as before
    assert rule.threshold == pytest.approx(0.501)
    rule.observe(finished(4, 4, "rule"))
    assert rule.threshold == pytest.approx(0.5)
    rule.observe(finished(0, 0))
    assert rule.threshold == pytest.approx(0.5)


def test_llmcad_multiplies_over_the_whole_draft_and_adapts():
    rule = LLMCad(start=0.25)
    rule.begin()
    assert rule.goes_on(seen(path=math.log(0.5))) and not rule.goes_on(seen(index=1, path=math.log(0.2)))
    rule.begin()
    assert rule.goes_on(seen(path=math.log(0.5)))
    assert not rule.goes_on(seen(index=0, depth=1, path=math.log(0.4)))  # the next stage
    rule.observe(finished(2, 2))
    assert math.exp(rule.threshold_logp) == pytest.approx(0.125)
    rule.observe(finished(1, 2))
    assert math.exp(rule.threshold_logp) == pytest.approx(0.125 / 0.2**0.5)


def test_disco_refits_its_threshold_on_what_it_saw():
    rule = DISCO()
    for _ in range(3):
        rule.begin()
        assert rule.goes_on(seen(logp=math.log(0.8))) and rule.goes_on(seen(index=1, logp=math.log(0.6)))
        assert not rule.goes_on(seen(index=2, logp=math.log(0.39)))
        rule.observe(finished(1, 3))
    assert len(rule.probs) == 6 and rule.threshold == pytest.approx(0.8)


@pytest.mark.parametrize("seed", range(5))
def test_the_threshold_is_the_best_of_all(seed):
    random = np.random.default_rng(seed)
    probs, matched = random.integers(0, 6, 30) / 6, random.random(30) < 0.6

    def cost(threshold: float) -> float:
        says = probs >= threshold
        return (says & ~matched).sum() / (~matched).sum() + 3 * (~says & matched).sum() / matched.sum()

    found = best_threshold(probs, matched)
    assert cost(found) == pytest.approx(min(cost(each) for each in [*set(probs), np.inf]))


def test_ddd_looks_at_the_whole_beam_at_three_depths():
    unlikely = [DDD().goes_on(seen(index=index, mass=-0.31)) for index in range(11)]
    assert [index + 1 for index, goes in enumerate(unlikely) if not goes] == [5, 7, 9]
    assert all(DDD().goes_on(seen(index=index, mass=-0.29)) for index in range(11))


def test_the_confidence_cut_and_specdecpp_read_dspark_s_head():
    cut = RULES["dspark"](threshold=0.5)
    assert cut.admits(seen(confidence=0.01).row) and not cut.admits(seen(confidence=-0.01).row)
    rule = RULES["specdec++"](h=0.3, least=1)
    rule.begin()
    sure, rather = math.log(0.9 / 0.1), math.log(0.8 / 0.2)
    assert rule.admits(seen(confidence=rather).row)  # 0.8: kept anyway
    assert not rule.admits(seen(index=1, confidence=rather).row)  # 0.64
    rule.begin()
    assert rule.admits(seen(confidence=sure).row) and rule.admits(seen(index=1, confidence=rather).row)  # 0.72


class Says(torch.nn.Module):
    """A head that says what it was told to."""

    def __init__(self, values, **config) -> None:
        super().__init__()
        self.values, self.calls = iter(values), []
        facts = {"kind": "specdec++", "family": "eagle3", "hidden_size": 4, "longest": 8, "reads_token": True}
        self.config = HeadConfig(**facts | config)

    def forward(self, *inputs):
        self.calls.append(inputs)
        return torch.tensor(next(self.values))


@pytest.mark.usefixtures("unchecked")
def test_rules_read_their_heads():
    sure, rather = math.log(0.9 / 0.1), math.log(0.8 / 0.2)
    rule = RULES["specdec++"](head=Says([sure, rather, rather]), h=0.3, least=0)
    rule.begin()
    assert [rule.admits(seen(index=i).row) for i in range(3)] == [True, True, True]  # the first row has read no draft
    assert not rule.admits(seen(index=3).row) and len(rule.head.calls) == 3
    lengths = RULES["adaeagle"](head=Says([2.4, -1.0]))
    assert [lengths.admits(seen(index=i).row) for i in range(3)] == [True, True, False]
    assert not lengths.admits(seen(index=0).row)
    ffn = RULES["disco-ffn"](head=Says([0.1, -0.1]))
    assert ffn.admits(seen().row) and not ffn.admits(seen(index=1).row)
    pacer = RULES["pacer"](head=Says([[[3.0, 3.0]], [[-3.0, -3.0]]], block=2))
    pacer.begin()
    assert [pacer.goes_on(seen(index=i)) for i in range(4)] == [True, True, True, False]


# Broken rows


def test_figures_of_a_broken_row_are_not_those_of_a_certain_one():
    broken, certain = [math.nan, 0.0, 1.0], [0.0, -math.inf, -math.inf]
    found = figures(torch.tensor([broken, [math.inf, 0.0, 1.0], certain]))
    assert found[:2].isnan().all()
    assert found[2].tolist() == [0.0, math.inf, 0.0]


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("name", RULES)
def test_a_broken_row_ends_the_stage_and_teaches_nothing(name):
    rule, broken = rule_for(name), dict.fromkeys(("top_logp", "margin", "entropy", "confidence"), math.nan)
    certain = {"top_logp": -1e-3, "margin": 7.0, "entropy": 1e-3, "confidence": 7.0, "stage_len": 2}
    for accepted in (2, 2, 2, 1):
        rule.begin()
        if name not in HEAD_OF:
            assert not Watch(rule, 0, 2).ends(seen(logp=-1e-3, **certain))
        nan = {"logp": math.nan, "path": math.nan, "mass": math.nan, "hidden": torch.full((V,), math.nan)}
        watch, first = Watch(rule, 0, 2), 0 if name in HEAD_OF else 1
        assert any(watch.ends(seen(index=index, **broken | nan, stage_len=2)) for index in range(first, 2))
        RULES[name].observe(rule, finished(accepted, 2))
    rule.begin()
    assert all(value == value for value in vars(rule).values() if isinstance(value, float))


# What is refused


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ("svp", "choose one of bild, svip"),
        ("svip:x=1", "has no parameter 'x=1'; it has c, h, longest"),
        ("svip:h", "has no parameter 'h'"),
        ("svip:h=1,h=2", "h is given twice"),
        ("svip:h=wide", "h='wide' must be a number from 0"),
        ("bild:fallback=1.5", "must be a number from 0 to 1"),
        ("bild:longest=0", "must be a whole number from 1 to 1024"),
        ("ddd:checks=a+b", "whole numbers joined by +"),
        ("ddd:floor=nan", "must be a number"),
        ("dspark", "needs threshold, which has no published default"),
        ("dspark:threshold=0.5,sts=/nowhere.json", "dloop trace sts"),
        ("adaeagle", "reads a trained head; give --gate-head"),
        ("svip:longest=4", "longest is for autoregressive drafters"),
        (7, "must be a text"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_what_is_refused(rule, message):
    target = tiny_target()
    with pytest.raises(UserError, match="^[^\n]*$") as error:
        dloop.generate(target, tiny_drafter(target), PROMPT, 8, stop_rule=rule)
    assert message in str(error.value)


@pytest.mark.usefixtures("unchecked")
def test_drafters_that_cannot_are_refused(tmp_path):
    target = tiny_target()
    dspark, dflash = tiny_drafter(target), tiny_drafter(target, family="dflash")
    config = HeadConfig(kind="disco", family="dflash", hidden_size=32, longest=4, reads_token=False)
    save_head(HEADS["disco"](config), tmp_path / "disco")
    (tmp_path / "empty").mkdir()
    for drafter, arguments, message in [
        (dflash, {"stop_rule": "dspark:threshold=0.5"}, "which tiny dflash (dflash) does not have"),
        (dflash, {"stop_rule": "specdec++"}, "reads a trained head"),
        (dspark, {"stop_rule": "svip", "tree_budget": 8}, "use tree_budget 0 with it"),
        (dspark, {"gate_head": tmp_path}, "no stop_rule that reads it"),
        (dspark, {"stop_rule": "svip", "gate_head": tmp_path}, "of no use to stop_rule svip"),
        (dspark, {"stop_rule": "disco-ffn", "gate_head": tmp_path / "disco"}, "was trained on dflash states of 32"),
        (dspark, {"stop_rule": "pacer", "gate_head": tmp_path / "disco"}, "is a head of disco"),
        (dspark, {"stop_rule": "pacer", "gate_head": tmp_path / "no"}, "is no folder"),
        (dspark, {"stop_rule": "pacer", "gate_head": ""}, "gate_head='' is no folder"),
        (dspark, {"stop_rule": "pacer", "gate_head": "x" * 5000}, "is no folder"),
        (dspark, {"stop_rule": "pacer", "gate_head": "x\0"}, "is no folder"),
        (dspark, {"stop_rule": "pacer", "gate_head": tmp_path / "empty"}, "config.json"),
        (dspark, {"stop_rule": "pacer", "gate_head": 3}, "must be the folder of a head"),
    ]:
        with pytest.raises(UserError, match="^[^\n]*$") as error:
            dloop.generate(target, drafter, PROMPT, 8, **arguments)
        assert message in str(error.value), arguments


def test_the_fast_engine_says_that_it_cannot():
    from dloop.load import drafter_like, on_engine

    twin = tiny_target("qwen3")
    fast = on_engine(twin, "fast")
    for family in ("dspark", "eagle3"):
        drafter = drafter_like(fast, tiny_drafter(twin, family=family))
        with pytest.raises(UserError, match="--engine twin"):
            dloop.generate(fast, drafter, PROMPT, 8, stop_rule="svip")


def test_plain_decoding_checks_the_rule_and_is_not_changed():
    target = tiny_target()
    plain = dloop.generate_autoregressive(target, PROMPT, 8)
    assert dloop.generate_autoregressive(target, PROMPT, 8, stop_rule="svip").tokens == plain.tokens
    with pytest.raises(UserError, match="choose one of"):
        dloop.generate_autoregressive(target, PROMPT, 8, stop_rule="x")


def test_adaeagle_goes_as_deep_as_its_head_was_trained(tmp_path):
    config = HeadConfig(kind="adaeagle", family="eagle3", hidden_size=32, longest=9, reads_token=True)
    save_head(HEADS["adaeagle"](config), tmp_path)
    assert longest_of("adaeagle", tmp_path) == 9 and longest_of("adaeagle:longest=4", tmp_path) == 4
    assert longest_of("bild", None) == 10 and longest_of("adaedl", None) is None and longest_of(None, None) is None


def test_heads_come_back_as_they_were(tmp_path):
    for kind, made in HEADS.items():
        head = made(HeadConfig(kind=kind, family="eagle3", hidden_size=8, longest=4, reads_token=True))
        save_head(head, tmp_path / kind)
        again = load_head(tmp_path / kind, torch.device("cpu"))
        assert again.config == head.config
        assert all(
            torch.equal(a, b) for a, b in zip(head.state_dict().values(), again.state_dict().values(), strict=True)
        )
    (tmp_path / "pacer" / "model.safetensors").write_bytes(b"no")
    with pytest.raises(UserError, match="cannot be read"):
        load_head(tmp_path / "pacer", torch.device("cpu"))
