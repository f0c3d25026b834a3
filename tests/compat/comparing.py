"""What differs between two lists of promises, in words: what is new, what is gone, what changed.

Added is what no program that follows the older list can notice: a name, an optional argument at the end, an option, a
key of printed JSON. Retyped is another annotation of what a function returns: whether it holds what the older one
promised is for the reviewer to say. All else is removed or changed, and breaks somebody's program.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

ADDED, REMOVED, CHANGED, RETYPED = "added", "removed", "changed", "retyped"
# what a part of promises is called in a message
PARTS = ("names", "ops", "commands", "states", "outputs", "files")
# name -> what stands there
Facts = Mapping[str, Any]


@dataclass(frozen=True, order=True)
class Difference:
    """One thing that differs: `kind` and `what` name it for a list of breaks, `words` tell it to people."""

    kind: str
    what: str
    words: str = ""

    @property
    def breaks(self) -> bool:
        """Whether a program that kept to the older list may fail or give something else."""
        return self.kind not in (ADDED, RETYPED)

    @property
    def key(self) -> str:
        """Its name in a list of breaks."""
        return f"{self.kind} {self.what}"

    def __str__(self) -> str:
        return f"{self.kind:<8} {self.what}{': ' if self.words else ''}{self.words}"


def differences(before: Mapping[str, Facts], now: Mapping[str, Facts]) -> list[Difference]:
    """All of them, of all parts, sorted."""
    found: list[Difference] = []
    for part in sorted({*before, *now}):
        old, new = before.get(part, {}), now.get(part, {})
        found += [Difference(REMOVED, f"{part} {name}") for name in old.keys() - new.keys()]
        found += [Difference(ADDED, f"{part} {name}") for name in new.keys() - old.keys()]
        for name in old.keys() & new.keys():
            if isinstance(old[name], str) and isinstance(new[name], str):
                # another name of the same thing: its facts stand there, and may have moved
                was, is_now = old[name], new[name]
                if _is_another(was, is_now, old, new):
                    found.append(Difference(CHANGED, f"{part} {name}", f"{was} -> {is_now}, which is something else"))
                continue
            entries = _resolved(old, name), _resolved(new, name)
            found += _of_entries(f"{part} {name}", *entries)
    return sorted(found)


def _is_another(was: str, is_now: str, old: Facts, new: Facts) -> bool:
    """Whether "= a" and "= b" are two things: neither was or is another name of the other."""
    before, after = was.removeprefix("= "), is_now.removeprefix("= ")
    return was != is_now and new.get(before) != is_now and old.get(after) != was


def _resolved(part: Facts, name: str) -> Facts:
    """The facts of a name, where they stand."""
    facts = part[name]
    resolved: Facts = part[facts.removeprefix("= ")] if isinstance(facts, str) else facts
    return resolved


def _of_entries(what: str, old: Facts, new: Facts) -> Iterator[Difference]:
    if old["kind"] != new["kind"]:
        yield Difference(CHANGED, what, f"a {old['kind']} is a {new['kind']} now")
        return
    for fact in sorted({*old, *new} - {"kind"}):
        given = old.get(fact), new.get(fact)
        if given[0] != given[1]:
            yield from _OF_FACTS.get(fact, _of_texts)(what, *given)


def _of_texts(what: str, old: Any, new: Any) -> Iterator[Difference]:
    yield Difference(CHANGED, what, f"{old} -> {new}")


def _of_each(
    what: Callable[[str, str], str], compare: Callable[[str, str, str], Iterator[Difference]], *, extends: bool = True
) -> Callable[[str, Any, Any], Iterator[Difference]]:
    """How {name: text} are compared; without `extends` a new name is a break too."""

    def compared(owner: str, old: Facts | None, new: Facts | None) -> Iterator[Difference]:
        old, new = old or {}, new or {}
        for name in sorted({*old, *new}):
            if name not in new:
                yield Difference(REMOVED, what(owner, name), old[name])
            elif name not in old:
                more = "" if extends else ", which what was written before lacks"
                yield Difference(ADDED if extends else CHANGED, what(owner, name), f"new: {new[name]}{more}")
            elif old[name] != new[name]:
                yield from compare(what(owner, name), old[name], new[name])

    return compared


def _of_members(what: str, old: str, new: str) -> Iterator[Difference]:
    # "settable property -> int"
    (old_words, _, old_type), (new_words, _, new_type) = old.partition(" -> "), new.partition(" -> ")
    if old_words.endswith("property") and new_words.endswith("property"):
        if old_words != new_words:
            yield Difference(ADDED if old_words == "property" else REMOVED, f"{what}=", "assignment")
        if old_type != new_type:
            yield _retyped(what, old_type, new_type)
        return
    # "classmethod (a, b)"
    (old_kind, _, old_call), (new_kind, _, new_call) = old.partition("("), new.partition("(")
    if old_kind != new_kind:
        yield Difference(CHANGED, what, f"{old} -> {new}")
    elif old_call:
        yield from of_signatures(what, f"({old_call}", f"({new_call}")


def _retyped(what: str, old: str, new: str) -> Difference:
    return Difference(RETYPED, what, f"gives {new or 'what it does not say'}, gave {old or 'what it did not say'}")


def of_signatures(what: str, old: str | None, new: str | None) -> Iterator[Difference]:
    """What a caller notices of another signature, by parameter."""
    if old is None or new is None:
        yield Difference(CHANGED, f"{what}()", f"{old} -> {new}")
        return
    before, now = _parameters(old), _parameters(new)
    # in their order, so that a parameter in the place of another is seen
    order_before, order_now = [*before], [*now]
    by_position = [name for name in order_before if before[name].positional]
    for name, was in before.items():
        here = f"{what}({name})"
        if name not in now:
            place = order_before.index(name)
            instead = order_now[place] if place < len(order_now) and order_now[place] not in before else None
            yield Difference(REMOVED, here, f"parameter {name!r} is {instead!r} now" if instead else "a parameter")
            continue
        is_now = now[name]
        if was.kind != is_now.kind and not (is_now.kind == _EITHER and was.kind in (_KEYWORD, _POSITION)):
            yield Difference(CHANGED, here, f"given {was.kind}, now {is_now.kind}")
        elif was.positional and order_now.index(name) != order_before.index(name):
            yield Difference(CHANGED, here, f"number {by_position.index(name) + 1} is {order_now.index(name) + 1} now")
        if was.default != is_now.default and was.default is not None:
            yield Difference(CHANGED, here, f"default {was.default} -> {is_now.default or 'none, it must be given'}")
        elif was.default != is_now.default:
            yield Difference(ADDED, here, f"optional now, default {is_now.default}")
    for name in order_now:
        if name not in before:
            optional = now[name].default is not None or name.startswith("*")
            words = f"new, default {now[name].default}" if optional else "new, and must be given"
            yield Difference(ADDED if optional else CHANGED, f"{what}({name})", words)
    old_type, new_type = (text.rpartition(") -> ")[2] if ") -> " in text else "" for text in (old, new))
    if old_type != new_type:
        yield _retyped(f"{what}()", old_type, new_type)


_POSITION, _EITHER, _KEYWORD = "by position", "by position or keyword", "by keyword"


@dataclass(frozen=True)
class _Parameter:
    kind: str
    default: str | None

    @property
    def positional(self) -> bool:
        return self.kind in (_POSITION, _EITHER)


def _parameters(text: str) -> dict[str, _Parameter]:
    """The parameters of "(a, b=1, *, c)", in order, those with stars by "*name"."""
    # with "-> type" or without
    function = ast.parse(f"def f{text}: pass").body[0]
    assert isinstance(function, ast.FunctionDef)
    given = function.args
    positional = [*given.posonlyargs, *given.args]
    required: list[ast.expr | None] = [None] * (len(positional) - len(given.defaults))
    found = {
        each.arg: _Parameter(_POSITION if each in given.posonlyargs else _EITHER, default and ast.unparse(default))
        for each, default in zip(positional, [*required, *given.defaults], strict=True)
    }
    if given.vararg:
        found[f"*{given.vararg.arg}"] = _Parameter("*", None)
    found |= {
        each.arg: _Parameter(_KEYWORD, default and ast.unparse(default))
        for each, default in zip(given.kwonlyargs, given.kw_defaults, strict=True)
    }
    if given.kwarg:
        found[f"**{given.kwarg.arg}"] = _Parameter("**", None)
    return found


def _of_schemas(what: str, old: str, new: str) -> Iterator[Difference]:
    """Arguments of an op: exported programs name them, and may lack only those at the end that have defaults."""
    (before, old_result), (now, new_result) = _schema(old), _schema(new)
    if old_result != new_result:
        yield Difference(CHANGED, f"{what}()", f"gives {new_result}, gave {old_result}")
    order_before, order_now = [*before], [*now]
    for name, words in before.items():
        if name not in now:
            yield Difference(REMOVED, f"{what}({name})", "an argument of the op")
        elif now[name] != words:
            yield Difference(CHANGED, f"{what}({name})", f"{words} -> {now[name]}")
        elif order_now.index(name) != order_before.index(name):
            yield Difference(CHANGED, f"{what}({name})", f"number {order_before.index(name) + 1} is another now")
    for name, words in now.items():
        if name not in before:
            optional = "=" in words
            ending = "" if optional else ": without a default, programs that were exported lack it"
            yield Difference(ADDED if optional else CHANGED, f"{what}({name})", f"new, {words}{ending}")


def _schema(text: str) -> tuple[dict[str, str], str]:
    """Arguments by name, and what it gives, of "ns::op(Tensor a, int b=1, *, str c) -> Tensor"."""
    inner, _, result = text.partition("(")[2].rpartition(") -> ")
    pieces, depth = [""], 0
    for sign in inner:
        depth += (sign in "([") - (sign in ")]")
        if sign == "," and not depth:
            pieces.append("")
        else:
            pieces[-1] += sign
    arguments = [piece.strip() for piece in pieces if piece.strip()]
    return {piece.partition("=")[0].split(" ")[-1]: piece for piece in arguments}, result


def _of_words(gone: str, come: str) -> Callable[[str, str | None, str | None], Iterator[Difference]]:
    """How words are compared that are promised each by itself: parents, special methods."""

    def compared(what: str, old: str | None, new: str | None) -> Iterator[Difference]:
        before, now = {*(old or "").split()}, {*(new or "").split()}
        yield from (Difference(REMOVED, f"{what} {word}", gone) for word in sorted(before - now))
        yield from (Difference(ADDED, f"{what} {word}", come) for word in sorted(now - before))

    return compared


def _of_raises(what: str, old: Facts | None, new: Facts | None) -> Iterator[Difference]:
    """Errors by method: one in the place of another breaks who catches it, unless the other's name catches it too."""
    names: set[str] = {*(old or {}), *(new or {})}
    for name in sorted(names):
        before, now = ({*(each or {}).get(name, "").split()} for each in (old, new))
        caught = {word for error in now for word in error.replace("(", ",").rstrip(")").split(",")}
        gone = sorted(error for error in before if error.partition("(")[0] not in caught)
        come = sorted(now - before)
        here = f"{what}{'.' * bool(name)}{name} raises"
        if gone and come:
            yield Difference(CHANGED, here, f"{', '.join(come)}, and raised {', '.join(gone)}")
        elif gone or come:
            yield Difference(ADDED, here, f"no longer {', '.join(gone)}" if gone else ", ".join(come))


def _of_values(what: str, old: Any, new: Any) -> Iterator[Difference]:
    """A collection may grow."""
    try:
        was, is_now = ast.literal_eval(str(old)), ast.literal_eval(str(new))
        grown = type(was) is type(is_now) and (
            (isinstance(was, dict) and was.items() <= is_now.items())
            or (isinstance(was, set) and was <= is_now)
            or (isinstance(was, (list, tuple)) and was == is_now[: len(was)])
        )
    except (ValueError, SyntaxError):
        grown = False
    yield Difference(ADDED if grown else CHANGED, what, f"{old} -> {new}")


def _of_options(what: str, old: Facts | None, new: Facts | None) -> Iterator[Difference]:
    old, new = old or {}, new or {}
    for name in sorted({*old, *new}):
        here = f"{what} {name}"
        if name not in new:
            yield Difference(REMOVED, here, old[name])
        elif name not in old:
            required = " required" in new[name]
            words = f"new: {new[name]}{', and must be given' if required else ''}"
            yield Difference(CHANGED if required else ADDED, here, words)
        elif old[name] != new[name]:
            yield from _of_option(here, old[name], new[name])


def _of_option(what: str, old: str, new: str) -> Iterator[Difference]:
    # what may be chosen, and the words around it
    (old_rest, old_choices), (new_rest, new_choices) = _choices(old), _choices(new)
    if old_rest != new_rest:
        yield Difference(CHANGED, what, f"{old_rest} -> {new_rest}")
    yield from (Difference(REMOVED, f"{what}={choice}") for choice in sorted(old_choices - new_choices))
    yield from (Difference(ADDED, f"{what}={choice}") for choice in sorted(new_choices - old_choices))


def _choices(text: str) -> tuple[str, set[str]]:
    before, found, after = text.partition(" one of ")
    choices, _, rest = after.partition(" ")
    return f"{before}{' one of a list ' if found else ''}{rest}".strip(), set(choices.split("|")) if found else set()


_OF_FACTS: dict[str, Callable[[str, Any, Any], Iterator[Difference]]] = {
    "call": of_signatures,
    "members": _of_each(lambda owner, name: f"{owner}.{name}", _of_members),
    "values": _of_each(lambda owner, name: f"{owner}.{name}", _of_texts),
    "bases": _of_words("isinstance and except no longer say so", "isinstance and except say so now"),
    "special": _of_words("no longer", "now too"),
    "raises": _of_raises,
    "value": _of_values,
    "status": lambda what, old, new: _of_texts(f"{what} exit status", old, new),
    "options": _of_options,
    "schema": _of_schemas,
    "keys": _of_each(lambda owner, name: f"{owner} [{name}]", _of_texts),
    # a state dict that lacks a key does not load
    "states": _of_each(lambda owner, name: f"{owner} [{name}]", _of_texts, extends=False),
}
