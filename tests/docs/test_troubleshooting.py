"""Every message on the page of troubleshooting is one that shardwise says, of the class that stands below it."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable

import pytest
from checkout import ROOT
from lone_ranks import Said, start_lone_ranks
from provoked import ON_RANKS, PROVOKED

PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
# pattern -> the class that the page names first below it
LISTED = dict(re.findall(r"^### `(.*)`\n\n\*\*(\w+)\.\*\*", PAGE, re.MULTILINE))


def test_the_page_lists_what_is_provoked_and_nothing_else() -> None:
    assert list(LISTED) == [*PROVOKED, *ON_RANKS]
    assert len(re.findall("^### ", PAGE, re.MULTILINE)) == len(LISTED) >= 25


@pytest.mark.parametrize(("pattern", "provocation"), PROVOKED.items(), ids=[*PROVOKED])
def test_a_message_is_said_as_the_page_quotes_it(pattern: str, provocation: Callable[[], object]) -> None:
    assert matches(pattern, heard(provocation))


# rank failures have tests of their own; this one waits for a rank that sleeps
@pytest.mark.ranks
@pytest.mark.full
def test_messages_of_ranks_are_said_as_the_page_quotes_them() -> None:
    worlds = {pattern: start_lone_ranks(2, worker) for pattern, worker in ON_RANKS.items()}
    for pattern, world in worlds.items():
        said = world.said()
        assert matches(pattern, [([outcome.error, *parents(outcome)], outcome.text) for outcome in said]), said


@pytest.mark.parametrize(
    ("pattern", "message", "answer"),
    [
        ("id … is outside [0, …)", "sample 0: id 6 is outside [0, 6)", True),
        ("id … is outside [0, …)", "sample 0: id 6 is outside (0, 6)", False),
        ("got neither", "Must provide lengths", False),
    ],
)
def test_dots_stand_for_any_text_and_all_else_for_itself(pattern: str, message: str, answer: bool) -> None:
    assert quotes(pattern, message) == answer


def quotes(pattern: str, message: str) -> bool:
    """Whether the pattern, in which … is any text, is found in the message."""
    return re.search(".+".join(map(re.escape, pattern.strip("…").split("…"))), message, re.DOTALL) is not None


def matches(pattern: str, heard: list[tuple[list[str], str]]) -> bool:
    """Whether one of the messages is that of the pattern, and its class or one that it derives from the page's."""
    return any(LISTED[pattern] in classes and quotes(pattern, message) for classes, message in heard)


def heard(provocation: Callable[[], object]) -> list[tuple[list[str], str]]:
    """Names of the classes of what it raises and warns of, and the messages."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        error: BaseException | None = None
        try:
            provocation()
        except (Exception, SystemExit) as raised:
            error = raised
    said: list[BaseException] = [one.message for one in caught if isinstance(one.message, Warning)]
    # a KeyError's text is a repr of its message
    messages = [(one, str(one.args[0]) if one.args else "") for one in (*said, *([error] if error else []))]
    return [([kind.__name__ for kind in type(one).__mro__], message) for one, message in messages]


def parents(outcome: Said) -> list[str]:
    """The class that a user catches, of one of ours that says that a call was refused."""
    return [outcome.error.removeprefix("Refused")]
