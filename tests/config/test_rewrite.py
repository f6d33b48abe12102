"""Values change in a file, and nothing else does."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from skylark.config import properties
from skylark.config.rewrite import rewrite, rewritten

FILE = "# brokerName=comment\r\nbrokerName : a\n\n!x\ndeleteWhen=04;\\\n  05\nlast=1"


def test_comments_order_and_other_entries_stay() -> None:
    changed = rewritten(FILE, {"deleteWhen": "06", "added": "yes"})
    assert changed == "# brokerName=comment\r\nbrokerName : a\n\n!x\ndeleteWhen=06\nlast=1\nadded=yes\n"


def test_a_blank_line_ends_an_entry_that_went_on() -> None:
    assert properties.parse(rewritten("a=1\\\n\nb=2\n", {"a": "3"})) == {"a": "3", "b": "2"}


def test_no_change_changes_nothing() -> None:
    assert rewritten(FILE, {}) == FILE


def test_both_lines_of_a_repeated_key_change() -> None:
    assert properties.parse(rewritten("a=1\na=2\n", {"a": "3"})) == {"a": "3"}


@given(
    st.text(alphabet="ab=: #!\\\n\r\t1", max_size=60),
    st.dictionaries(
        st.text("abc", min_size=1, max_size=2), st.text(" \t=:\\#\nxé", min_size=1, max_size=6), max_size=3
    ),
)
def test_what_is_read_back_is_the_old_file_with_the_changes(text: str, changes: dict[str, str]) -> None:
    before, after = properties.parse(text), properties.parse(rewritten(text, changes))
    # A backslash alone on the last line reads as an entry without a name, and as nothing when a line follows.
    assert {k: v for k, v in after.items() if k} == {k: v for k, v in before.items() if k} | changes


def test_the_file_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "broker.conf"
    path.write_bytes("a=1\n# caf\xe9\n".encode("latin-1"))
    path.chmod(0o640)
    rewrite(path, {"a": "2"})
    assert path.read_bytes() == "a=2\n# caf\xe9\n".encode("latin-1")
    assert path.stat().st_mode & 0o777 == 0o640
    assert list(tmp_path.iterdir()) == [path]
