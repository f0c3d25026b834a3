"""Symbolic links in a folder that others wrote."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardwise.untrusted import read_regular, require_regular


@pytest.mark.parametrize("look", [require_regular, read_regular])
def test_a_link_to_a_good_file_is_refused_and_named_where_links_are(look, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """A look that followed links passed: what opens by itself was stopped later, what a library opens was not."""
    (tmp_path / "file").write_bytes(b"data")
    link = tmp_path / "link"
    link.symlink_to("file")
    with pytest.raises(OSError, match="no regular file but a symbolic link") as caught:
        look(link, follow=False)
    assert caught.value.filename == str(link)
    look(link, follow=True)
