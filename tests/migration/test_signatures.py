"""Which signatures can stand in for which: TorchRec's own answers, for every pair of eighteen."""

from __future__ import annotations

from importlib import import_module
from inspect import Signature, signature
from typing import Any

from shardwise.migration.signatures import is_signature_compatible

# each with its answers: beside which of the signatures, in this order, it may be put
ANSWERS = {
    "a: int, b: float, *, c: int, d: float = 1.0, **kwargs: Dict[str, Any]) -> int": "100010000000000000",
    "a: int, b: float, c: bool = True, d: float = 1.0) -> bool": "010001100000000000",
    "a: int, *, c: int, d: float = 1.0, **kwargs) -> int": "001000000000000000",
    "a: int, b: float, z: float, *, c: int, d: float = 1.0, **kwargs) -> int": "000100000000000000",
    "a: int, b: float, *, d: float = 1.0, c: int, e=2, **kwargs) -> int": "000010000000000000",
    "a: int, b: float, c: bool = True, d: float = 1.0, *args) -> bool": "000001000000000000",
    "a: int, b: float, c: bool = True, d: float = 1.0, e=1, **kw) -> bool": "000000100000000000",
    "a: int, b: float, d: float = 1.0, c: bool = True) -> bool": "000000010000000000",
    "a: int, b: float, c: bool = True, d: float = 2.0) -> bool": "000000001000000000",
    "a: int, b: bool, c: bool = True, d: float = 1.0) -> bool": "000000000100000000",
    "a: int, b: float, c: bool = True, d: float = 1.0) -> List[Dict[str, int]]": "000000000010000000",
    "a: int, b: float, c: bool = True, d: float = 1.0) -> List[Dict[str, float]]": "000000000001000000",
    "a, /, *args, x, **kw) -> Optional[int]": "000000000000110000",
    "b, /, *args, y, x=3, **kw) -> Union[int, None]": "000000000000010000",
    "*args, **kw)": "000000000000001000",
    ")": "000000000000001100",
    "a: int, b: float, c: bool = True, d: float = 1.0, e: int = EMPTY, **kw) -> Tuple[int, ...]": "000000000000000010",
    "a: int, b: float, c: bool = True, d: float = 1.0) -> Tuple[int]": "000000000000000001",
}


def signature_of(text: str) -> Signature:
    names: dict[str, Any] = {"EMPTY": Signature.empty}
    # without this file's future import, by which annotations would be text
    code = compile(f"from typing import *\ndef function({text}: ...", "<function>", "exec", dont_inherit=True)
    exec(code, names)
    return signature(names["function"])


def test_every_pair_has_torchrecs_answer() -> None:
    signatures = list(map(signature_of, ANSWERS))
    for old, (text, answers) in zip(signatures, ANSWERS.items(), strict=True):
        ours = "".join("01"[is_signature_compatible(old, new)] for new in signatures)
        assert ours == answers, text


def test_a_returned_generic_is_compared_part_by_part() -> None:
    """`typing.List[int]` and `list[int]` are not equal, and are one type."""
    old, new, other = (signature_of(f") -> {each}") for each in (
        "List[Dict[str, int]]", "list[dict[str, int]]", "list[dict[str, str]]"
    ))  # fmt: skip
    assert old.return_annotation != new.return_annotation
    assert is_signature_compatible(old, new) and is_signature_compatible(new, old)
    assert not is_signature_compatible(old, other)


def test_torchrecs_module_has_it() -> None:
    assert import_module("shardwise.torchrec.schema.utils").is_signature_compatible is is_signature_compatible
