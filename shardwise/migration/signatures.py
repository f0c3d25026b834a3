"""Whether a function may be called as it could be before: signatures beside each other, as TorchRec pins its own."""

from __future__ import annotations

import typing
from inspect import Parameter, Signature

__all__ = ["is_signature_compatible"]


def is_signature_compatible(previous_signature: Signature, current_signature: Signature) -> bool:
    """Whether calls that fit the previous signature fit the current one, as `torchrec.schema` decides it.

    Parameters that can be given by position keep place, name, annotation and default; those by keyword alone keep their
    name; `*args` keeps its place, and before `**kwargs` others may come. The type that is returned stays, generics
    compared part by part. Parameters that follow all of the previous ones are not looked at: one without a default
    breaks callers, and passes.
    """
    before, now = (list(each.parameters.values()) for each in (previous_signature, current_signature))
    if len(before) > len(now):
        return False
    names_before, names_now = _names_by_keyword(before), _names_by_keyword(now)
    # of the previous, those alone that have a counterpart at their place
    if not all(_stays(old, new) for old, new in zip(before, now, strict=False)) or not names_before <= names_now:
        return False
    return _same_type(previous_signature.return_annotation, current_signature.return_annotation)


def _names_by_keyword(parameters: list[Parameter]) -> set[str]:
    return {each.name for each in parameters if each.kind is Parameter.KEYWORD_ONLY}


def _stays(old: Parameter, new: Parameter) -> bool:
    if old.kind is not new.kind:
        return old.kind is Parameter.VAR_KEYWORD
    if old.kind is not Parameter.POSITIONAL_OR_KEYWORD:
        return True
    return bool(old.name == new.name and old.annotation == new.annotation and old.default == new.default)


def _same_type(old: object, new: object) -> bool:
    if old == new:
        return True
    origin = typing.get_origin(old)
    if origin is None or origin != typing.get_origin(new):
        return False
    old_parts, new_parts = typing.get_args(old), typing.get_args(new)
    return len(old_parts) == len(new_parts) and all(map(_same_type, old_parts, new_parts))
