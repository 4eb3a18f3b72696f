"""Rounds made visible: every token with the drafting stage it came from, and what became of it.

Readable without colour: a token ends with its mark, a small stage number if it was drafted, a dot if the target itself
chose it; what the target rejected stands in brackets. Pure functions from rounds to rich text.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from dloop.types import Round

Show = Callable[[Sequence[int]], str]
Fate = Literal["accepted", "rejected", "cut"]  # cut: right, but past the end of the text

STAGE_STYLES = ("green", "cyan", "magenta", "yellow", "bright_blue", "bright_red")
TARGET_STYLE = "bold"
LOST_STYLE = "dim strike"
DIGITS = str.maketrans("0123456789", "₀₁₂₃₄₅₆₇₈₉")
TARGET_MARK, NEWLINE, BLANK, UNFINISHED = "•", "↵", "␣", "‥"
CONTEXT = 12  # tokens before a piece that may share a character with it


@dataclass(frozen=True, kw_only=True)
class Piece:
    """One token of a round as it is shown."""

    token: int
    text: str  # printable; a token that only begins a character is UNFINISHED
    stage: int  # 1, 2 ...; 0: the target's own token
    fate: Fate


def pieces(round: Round, before: Sequence[int], show: Show) -> list[Piece]:
    """All tokens of a round: the accepted path, then what was rejected, then the target's own token.

    Of a tree what was rejected is the rest of the spine: the other branches are only counted, under "kept".
    `before` is the text up to the anchor, included; `show` turns ids into text.
    """
    draft, room = round.draft, len(round.emitted)
    lead = list(before[-CONTEXT:])

    def piece(node: int, fate: Fate) -> Piece:
        stage = 1 + sum(node >= record.stop for record in round.stage_records)
        above = lead + [draft.tokens[n] for n in ancestors(draft.parents, node)]
        return Piece(token=draft.tokens[node], text=added(above, draft.tokens[node], show), stage=stage, fate=fate)

    kept = [piece(node, "accepted" if place < room else "cut") for place, node in enumerate(round.path)]
    lost = [piece(node, "rejected") for node in draft.spine[1:] if node not in round.path]
    if round.bonus is None:
        return kept + lost
    text = added(lead + [draft.tokens[node] for node in round.path], round.bonus, show)
    return [
        *kept,
        *lost,
        Piece(token=round.bonus, text=text, stage=0, fate="accepted" if len(round.path) < room else "cut"),
    ]


def ancestors(parents: Sequence[int], node: int) -> list[int]:
    """Nodes between the anchor and this one, outwards, without either."""
    above: list[int] = []
    while (node := parents[node]) > 0:
        above.append(node)
    return above[::-1]


def added(above: list[int], token: int, show: Show) -> str:
    """What a token adds to the text above it, printable."""
    hidden = "\N{REPLACEMENT CHARACTER}"
    text = show([*above, token]).rstrip(hidden)[len(show(above).rstrip(hidden)) :]
    return printable(text) or UNFINISHED


def printable(text: str) -> str:
    """Newlines and control characters as signs; blanks that stand alone become visible."""
    if text.isspace():
        text = text.replace(" ", BLANK)
    signs = {"\n": NEWLINE, "\t": "⇥", "\r": "␍"}
    return "".join(signs.get(letter, letter if letter.isprintable() else f"\\u{ord(letter):04x}") for letter in text)


def styled(piece: Piece) -> Text:
    """A piece of text in the style of its stage."""
    mark = str(piece.stage).translate(DIGITS) if piece.stage else TARGET_MARK
    style = stage_style(piece.stage)
    return Text.assemble((piece.text, style if piece.fate == "accepted" else LOST_STYLE), (mark, f"dim {style}"))


def stage_style(stage: int) -> str:
    """Stages differ in colour; the palette repeats."""
    return STAGE_STYLES[(stage - 1) % len(STAGE_STYLES)] if stage else TARGET_STYLE


def line(shown: Sequence[Piece]) -> Text:
    """A round's tokens in one line; rejected ones in brackets, those past the end in braces."""
    brackets: dict[Fate, tuple[str, str]] = {"accepted": ("", ""), "rejected": ("[", "]"), "cut": ("{", "}")}
    text, fate = Text(), "accepted"
    for piece in shown:
        if piece.fate != fate:
            text.append(brackets[fate][1], "dim").append(brackets[piece.fate][0], "dim")
            fate = piece.fate
        text.append_text(styled(piece))
    return text.append(brackets[fate][1], "dim")


def trace(first: int, rounds: Sequence[Round], show: Show, *, scores: bool = False) -> RenderableType:
    """A whole text, a row a round: what was kept of what was drafted, every token, on demand what the gate read."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column("round", justify="right", header_style="dim", no_wrap=True)
    table.add_column("kept", justify="right", header_style="dim", no_wrap=True)
    if scores:
        table.add_column("gate reads", header_style="dim", max_width=12)
    table.add_column("tokens", header_style="dim", overflow="fold")
    shown = [Piece(token=first, text=added([], first, show), stage=0, fate="accepted")]
    table.add_row("prompt", "", *([""] if scores else []), line(shown))
    before = [first]
    for number, round in enumerate(rounds, 1):
        row = pieces(round, before, show)
        gate = [gate_line(round)] if scores else []
        table.add_row(str(number), f"{round.accepted}/{len(round.drafted)}", *gate, line(row))
        before += round.emitted
        shown += row
    return Group(table, Text(), legend(shown))


def gate_line(round: Round) -> Text:
    """Each stage's score, in the stage's colour."""
    scores = [Text(f"{record.score:.2f}", stage_style(stage)) for stage, record in enumerate(round.stage_records, 1)]
    return Text(" ").join(scores)


def legend(shown: Sequence[Piece]) -> Text:
    """What the signs mean, as far as these pieces need them."""

    def sample(stage: int, fate: Fate) -> Text:
        """How a token of this kind looks, for the legend."""
        return line([Piece(token=0, text="word", stage=stage, fate=fate)])

    deepest = max(piece.stage for piece in shown)
    fates = {piece.fate for piece in shown}
    signs = "".join(piece.text for piece in shown)
    drafted = Text(" ").join(sample(stage, "accepted") for stage in range(1, deepest + 1))
    entries = (
        [Text.assemble(drafted, " drafted in stage 1" + (f" to {deepest}" if deepest > 1 else ""))] if deepest else []
    )
    entries += [Text.assemble(sample(1, "rejected"), " rejected")] if "rejected" in fates else []
    entries += [Text.assemble(sample(0, "accepted"), " the target's own")]
    entries += [Text.assemble(sample(1, "cut"), " past the end of the text")] if "cut" in fates else []
    meanings = {NEWLINE: "newline", BLANK: "blank", UNFINISHED: "part of a character"}
    entries += [Text(f"{sign} {meaning}") for sign, meaning in meanings.items() if sign in signs]
    return Text("; ").join(entries)
