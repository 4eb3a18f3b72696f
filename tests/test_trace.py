"""The trace shows every token once, tells its origin without colour, and fits a narrow terminal."""

import io
import re

import pytest
from rich.console import Console

from dloop.gate import ALWAYS_OPEN, FixedGate
from dloop.judge import Match
from dloop.loop import Limits, Session, decode
from dloop.sampling import Sampling
from dloop.testing import Decoded, ScriptedDrafter, TableTarget, gather, knowing
from dloop.trace import NEWLINE, TARGET_MARK, UNFINISHED, added, line, pieces, printable, trace
from dloop.types import Stage

PROMPT = [3, 1, 4]
VOCAB = 16
WORDS = [f" w{index:x}" for index in range(VOCAB)]
ESCAPE = "\x1b"


def show(tokens) -> str:
    return "".join(WORDS[token] for token in tokens)


def truth(num_tokens: int = 80) -> list[int]:
    target, text = TableTarget.random(VOCAB), list(PROMPT)
    for _ in range(num_tokens):
        text.append(int(target.logits(text).argmax()))
    return text


def bushy(before: list[int], index: int) -> Stage:
    good = truth()[len(before) :][:2]
    wrong = [(good[0] + 1) % VOCAB, 0]
    return Stage(tokens=[*wrong, *good], parents=[-1, 0, -1, 2], logp=[-0.1] * 4, spine=[0, 1], score=-0.2)


def decoded(script, *, threshold: float = ALWAYS_OPEN, stop_ids=(), num_tokens: int = 30) -> Decoded:
    session = Session(TableTarget.random(VOCAB), ScriptedDrafter(3, script))
    limits = Limits(max_new_tokens=num_tokens, stop_ids=frozenset(stop_ids), max_stages=3, context=200)
    task = decode(session, 0, PROMPT, gate=FixedGate(threshold), judge=Match(Sampling()), limits=limits)
    return gather([task], session)[0]


def rendered(done: Decoded, *, width: int = 80, color: bool = False, scores: bool = False) -> str:
    out = io.StringIO()
    console = Console(file=out, width=width, force_terminal=color, color_system="standard" if color else None)
    console.print(trace(done.tokens[0], done.rounds, show, scores=scores))
    return out.getvalue()


SCRIPTS = {
    "right": knowing(truth(), 3, 99),
    "half": knowing(truth(), 3, 5),
    "wrong": knowing(truth(), 3, 0),
    "tree": bushy,
}
ALL = pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS)


@ALL
@pytest.mark.parametrize("stop_ids", [(), (5,)], ids=["length", "stop"])
def test_pieces_are_all_tokens_of_the_round_in_reading_order(script, stop_ids):
    done = decoded(script, stop_ids=stop_ids)
    before = done.tokens[:1]
    for round in done.rounds:
        shown = pieces(round, before, show)
        kept = [piece.token for piece in shown if piece.fate == "accepted"]
        drafted = [piece.token for piece in shown if piece.stage > 0]
        assert kept == round.emitted
        lost = [node for node in round.draft.spine[1:] if node not in round.path]
        assert sorted(drafted) == sorted(round.draft.tokens[node] for node in (*round.path, *lost))
        assert len(drafted) == len(round.drafted) or not round.draft.is_chain, "of a tree's branches the spine is shown"
        assert [p.token for p in shown if p.fate == "rejected"] == [round.draft.tokens[node] for node in lost]
        assert sum(piece.stage == 0 for piece in shown) == (round.bonus is not None)
        before += round.emitted


@ALL
def test_the_trace_without_colour_holds_every_token_with_its_mark(script):
    done = decoded(script)
    text = rendered(done)
    assert ESCAPE not in text
    body = text.split("\n\n")[0]
    marks = re.findall(r"w([0-9a-f])([₁₂₃•])", body)
    total = 1 + sum(len({*r.path, *r.draft.spine[1:]}) + (r.bonus is not None) for r in done.rounds)
    assert len(marks) == total
    outside = re.sub(r"\[[^\]]*\]|\{[^}]*\}", "", body)
    assert [int(word, 16) for word in re.findall(r"w([0-9a-f])", outside)] == done.tokens


def test_the_stage_number_is_the_stage():
    (first, *_) = decoded(SCRIPTS["right"]).rounds
    stages = [piece.stage for piece in pieces(first, [0], show)]
    assert stages == [1, 1, 1, 2, 2, 2, 3, 3, 3, 0]
    assert line(pieces(first, [0], show)).plain.endswith(TARGET_MARK)


def test_stages_have_colours_and_rejected_tokens_are_struck():
    text = rendered(decoded(SCRIPTS["half"]), color=True)
    assert "\x1b[32m" in text and "\x1b[36m" in text and "\x1b[2;9m" in text


@pytest.mark.parametrize("width", [40, 80, 120])
@pytest.mark.parametrize("scores", [False, True])
def test_it_fits_the_terminal(width, scores):
    text = rendered(decoded(SCRIPTS["half"]), width=width, scores=scores)
    assert max(map(len, text.splitlines())) <= width


def test_scores_are_shown_on_demand():
    assert "gate reads" in rendered(decoded(SCRIPTS["half"]), width=120, scores=True)
    assert "-0.10" in rendered(decoded(SCRIPTS["half"]), width=120, scores=True)
    assert "gate reads" not in rendered(decoded(SCRIPTS["half"]))


@pytest.mark.parametrize("script", ["right", "half"])
def test_the_legend_explains_what_is_there_and_no_more(script):
    text = " ".join(rendered(decoded(SCRIPTS[script])).split("\n\n")[1].split())
    assert "drafted in stage 1 to 3" in text and "the target's own" in text
    assert ("rejected" in text) == (script == "half")
    assert NEWLINE not in text


def test_tokens_past_the_end_stand_in_braces():
    done = decoded(SCRIPTS["right"], num_tokens=6)  # nine are accepted, five fit
    assert "{" in rendered(done) and "past the end" in " ".join(rendered(done).split())


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\nb", "a↵b"),
        ("\n\n", "↵↵"),
        ("   ", "␣␣␣"),
        (" a", " a"),
        ("\t", "⇥"),
        ("\x1b[31m", "\\u001b[31m"),
        ("é", "é"),
    ],
)
def test_no_character_can_spoil_the_terminal(text, shown):
    assert printable(text) == shown


def test_a_character_of_several_tokens_belongs_to_its_last():
    raw = "a漢🙂!".encode()

    def decode_bytes(tokens) -> str:
        return bytes(tokens).decode(errors="replace")

    shown = [added(list(raw[:index]), token, decode_bytes) for index, token in enumerate(raw)]
    assert shown == ["a", UNFINISHED, UNFINISHED, "漢", UNFINISHED, UNFINISHED, UNFINISHED, "🙂", "!"]
