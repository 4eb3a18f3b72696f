"""Which draft hidden states stand in for the target states that unverified positions do not have yet."""

from typing import NamedTuple

from dloop.types import GapRows

READINGS: tuple[GapRows, ...] = ("producing", "position", "anchor_included")


class GapRow(NamedTuple):
    """Row `row` of stage `stage`, placed at rotary position anchor + `offset`."""

    stage: int
    row: int
    offset: int


def gap_rows(reading: GapRows, stage_index: int, stage_len: int, label_shift: int) -> list[GapRow]:
    """The rows that stage `stage_index` (0 = the round's first) adds to the verified context, in order of offset.

    With o = stage_index * stage_len, the published README fills a+1..a+o-1 and the paper's equation (3) a..a+o-1:
    - producing: the state whose logits gave token a+i, i = 1..o-1;
    - position: the state of the row placed at a+i, i = 1..o-1, of the earliest stage that has one;
    - anchor_included: the states of the rows placed at a..a+o-1, stage after stage.
    The list for one stage is a prefix of the list for the next, so a cache only ever appends.
    """
    offset = stage_index * stage_len
    if reading == "anchor_included":
        return [GapRow(i // stage_len, i % stage_len, i) for i in range(offset)]
    if reading == "producing":
        return [GapRow((i - 1) // stage_len, (i - 1) % stage_len + label_shift, i) for i in range(1, offset)]
    rows: list[GapRow] = []
    for i in range(1, offset):
        stage = (i - label_shift) // stage_len  # same-position rows reach one position into the next stage
        rows.append(GapRow(stage, i - stage * stage_len, i))
    return rows


def new_gap_rows(reading: GapRows, stage_index: int, stage_len: int, label_shift: int) -> list[GapRow]:
    """What stage `stage_index` needs beyond the stage before it."""
    before = len(gap_rows(reading, stage_index - 1, stage_len, label_shift)) if stage_index else 0
    return gap_rows(reading, stage_index, stage_len, label_shift)[before:]
