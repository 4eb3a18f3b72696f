"""Text that grows token by token: nothing split, nothing lost, nothing said twice."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dloop.chat import UNFINISHED, Growing, load_tokenizer, read_messages
from dloop.errors import UserError


def decode_bytes(tokens) -> str:
    return bytes(tokens).decode(errors="replace")


@given(text=st.text(max_size=20), cuts=st.lists(st.integers(0, 80), max_size=8))
def test_any_partition_gives_the_same_text_and_never_half_a_character(text, cuts):
    raw = list(text.encode())
    edges = sorted({0, len(raw), *(cut for cut in cuts if cut < len(raw))})
    growing = Growing(decode_bytes)
    parts = [growing.push(raw[start:stop]) for start, stop in zip(edges, edges[1:], strict=False)]
    if UNFINISHED not in text:
        assert all(UNFINISHED not in part for part in parts)
        assert "".join(parts) == text
    assert "".join([*parts, growing.finish()]) == text


def test_bytes_that_never_become_a_character_are_said_at_the_end():
    growing = Growing(decode_bytes)
    assert growing.push([*b"a", 0xF0, 0x9F]) == "a"
    assert growing.push([]) == ""
    assert growing.finish() == UNFINISHED


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[", "not valid JSON"),
        ("[]", "must be a JSON list"),
        ("{}", "must be a JSON list"),
        ('["hi"]', "needs the strings"),
        ('[{"role": "user"}]', "needs the strings"),
        ('[{"role": "user", "content": 3}]', "needs the strings"),
    ],
)
def test_messages_must_be_a_conversation(text, message):
    with pytest.raises(UserError, match=message):
        read_messages(text)


def test_a_folder_without_a_tokenizer_has_none(tmp_path):
    assert load_tokenizer(tmp_path, "x") is None
    assert load_tokenizer(None, "x") is None


def test_a_broken_tokenizer_is_the_users_to_mend(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(UserError, match="cannot be read"):
        load_tokenizer(tmp_path, "x")
