"""Numbers that stand for what a planner was given: equal in all processes, whatever PYTHONHASHSEED is.

What is hashed is text, so that of an object must not have its address: `text_of` spells objects by their fields.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence, Set as AbstractSet
from dataclasses import fields, is_dataclass
from typing import Any


def hash_sha256_str(hashable_list: Sequence[Any]) -> str:
    """SHA-256 of a list as it prints, in hexadecimal digits."""
    return hashlib.sha256(str(list(hashable_list)).encode()).hexdigest()


def hash_sha256_to_int(hashable_list: Sequence[Any]) -> int:
    """SHA-256 of a list as it prints."""
    return int(hash_sha256_str(hashable_list), 16)


class Text(str):
    """A text that prints without quotes, as the object does that it stands for."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def text_of(value: object) -> Text:
    """The `repr` of a value; of sets in order, and of objects that print their address their class and fields."""
    if is_dataclass(value) and not isinstance(value, type):
        return _call(value, {field.name: getattr(value, field.name) for field in fields(value) if field.repr})
    if isinstance(value, AbstractSet):
        return Text(f"{{{', '.join(sorted(map(text_of, value)))}}}")
    if isinstance(value, Mapping):
        return Text(f"{{{', '.join(f'{text_of(key)}: {text_of(of_key)}' for key, of_key in value.items())}}}")
    if isinstance(value, list | tuple):
        inside = ", ".join(map(text_of, value))
        return Text(f"[{inside}]" if isinstance(value, list) else f"({inside}{',' * (len(value) == 1)})")
    if type(value).__repr__ is object.__repr__:
        return _call(value, dict(sorted(getattr(value, "__dict__", {}).items())))
    return Text(repr(value))


def _call(value: object, settings: Mapping[str, object]) -> Text:
    return Text(f"{type(value).__qualname__}({', '.join(f'{name}={text_of(of)}' for name, of in settings.items())})")
