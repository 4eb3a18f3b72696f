"""Which draft hidden states fill the gap: against a twin written from the definitions, for every reading."""

import itertools

import pytest

from dloop.drafters.gap import READINGS, GapRow, gap_rows, new_gap_rows

CASES = list(itertools.product((0, 1), range(1, 9), range(5)))  # label shift, stage_len, stage index


def places(stage: int, k: int, shift: int) -> list[tuple[int, int | None, int]]:
    """(position, token it gives or None, row) of every row of a block, as offsets from the round's anchor.

    Row j stands at a_s + j. With shift 1 it carries the token at its own position (row 0 is the anchor: none),
    with shift 0 it gives the token after it. A block has k + shift rows.
    """
    start = stage * k
    rows = range(k + shift)
    return [(start + j, None if shift and j == 0 else start + j + (1 - shift), j) for j in rows]


def twin(reading: str, index: int, k: int, shift: int) -> list[GapRow]:
    """Look every offset up in the list of all rows drafted so far."""
    offset = index * k
    found: list[GapRow] = []
    blocks = [(stage, *place) for stage in range(index) for place in places(stage, k, shift)]
    if reading == "producing":
        for i in range(1, offset):
            givers = [(stage, row) for stage, _, token, row in blocks if token == i]
            assert len(givers) == 1
            found.append(GapRow(*givers[0], i))
    elif reading == "position":
        for p in range(1, offset):
            standing = [(stage, row) for stage, position, _, row in blocks if position == p]
            found.append(GapRow(*min(standing), p))  # the earliest stage that has one
    else:
        for stage in range(index):
            found += [
                GapRow(stage, position - stage * k, position) for position, _, row in places(stage, k, shift) if row < k
            ]
    return found


@pytest.mark.parametrize("reading", READINGS)
def test_gap_rows_equal_the_twin(reading):
    for shift, k, index in CASES:
        assert gap_rows(reading, index, k, shift) == twin(reading, index, k, shift), (shift, k, index)


@pytest.mark.parametrize("reading", READINGS)
def test_a_stage_s_list_is_a_prefix_of_the_next_one_s(reading):
    for shift, k, index in CASES:
        now, after = gap_rows(reading, index, k, shift), gap_rows(reading, index + 1, k, shift)
        assert after[: len(now)] == now
        assert now + new_gap_rows(reading, index + 1, k, shift) == after
    assert new_gap_rows(reading, 0, 3, 0) == []


@pytest.mark.parametrize("reading", READINGS)
def test_counts_offsets_and_rows_are_in_range(reading):
    for shift, k, index in CASES:
        rows = gap_rows(reading, index, k, shift)
        first = 0 if reading == "anchor_included" else 1
        assert [row.offset for row in rows] == list(range(first, index * k))
        assert all(0 <= row.stage < index and 0 <= row.row < k + shift for row in rows)


def test_with_same_position_labels_the_first_two_readings_coincide():
    for _, k, index in CASES:
        assert gap_rows("producing", index, k, 1) == gap_rows("position", index, k, 1)


def test_the_readings_differ_for_next_token_rows():
    lists = [tuple(gap_rows(reading, 2, 4, 0)) for reading in READINGS]
    assert len(set(lists)) == 3


def one_row_late(reading: str, index: int, k: int, shift: int) -> list[GapRow]:
    return [row._replace(row=row.row + 1) for row in gap_rows(reading, index, k, shift)]


def one_position_late(reading: str, index: int, k: int, shift: int) -> list[GapRow]:
    return [row._replace(offset=row.offset + 1) for row in gap_rows(reading, index, k, shift)]


def last_row_too(reading: str, index: int, k: int, shift: int) -> list[GapRow]:
    return gap_rows(reading, index + 1, k, shift)[: max(0, index * k)]


@pytest.mark.parametrize("planted", [one_row_late, one_position_late, last_row_too])
def test_off_by_one_rows_are_caught(planted):
    for reading in ("producing", "position"):
        wrong = [
            case
            for case in CASES
            if planted(reading, case[2], case[1], case[0]) != twin(reading, case[2], case[1], case[0])
        ]
        assert wrong
