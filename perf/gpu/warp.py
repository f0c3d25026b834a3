"""Instructions that lanes of a warp execute together: shuffles, votes, reductions, and barriers of a warp."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from .cta import Cta
from .ptx import WHOLE_WARP, Instruction
from .rounding import Array
from .types import DTYPES

if TYPE_CHECKING:
    from .decode import Decoder, Read, Step


def step(decoder: Decoder, instruction: Instruction) -> Step | None:
    """The step of such an instruction, or None where it is another."""
    make = _FAMILIES.get("bar.warp" if instruction.parts[:2] == ("bar", "warp") else instruction.parts[0])
    return make(decoder, instruction.parts, instruction.operands) if make else None


def _lanes(cta: Cta, live: Array | None) -> Array:
    """[warps, 32]: who executes."""
    return np.ones((cta.size // 32, 32), np.bool_) if live is None else live.reshape(-1, 32)


def _bits(lanes: Array) -> Array:
    """[warps] masks of lanes."""
    return np.packbits(lanes, axis=1, bitorder="little").view(np.uint32).reshape(-1)


def _spread(values: Array) -> Array:
    return np.repeat(values, 32)


def require_whole(cta: Cta, live: Array | None) -> None:
    """Report warps of which only a part executes an instruction that is `.aligned`; those who left do not count."""
    if live is None:
        return
    lanes = _lanes(cta, live)
    here = lanes if cta.exited is None else lanes | cta.exited.reshape(-1, 32)
    partly = lanes.any(axis=1) & ~here.all(axis=1)
    if partly.any():
        warp = int(partly.argmax())
        missing = int((~here[warp]).argmax()) + 32 * warp
        count = int(np.count_nonzero(lanes[warp]))
        cta.report(
            "missing", f"{count} lanes of a warp come to an instruction of the whole warp, another does not", missing
        )


def _require_members(cta: Cta, live: Array | None, mask: Array | None) -> None:
    """Report lanes that a member mask names and that do not come, and lanes that come without being named.

    A mask of None names all.
    """
    if mask is None and live is None:
        return
    lanes = _lanes(cta, live)
    named = np.ones_like(lanes)
    if mask is not None:
        # the mask of the first lane that executes counts for its warp
        first = lanes.argmax(axis=1)
        words = mask.reshape(-1, 32)[np.arange(len(lanes)), first]
        named = (words[:, None] >> np.arange(32, dtype=np.uint32)) & np.uint32(1) != 0
    here = lanes if cta.exited is None else lanes | cta.exited.reshape(-1, 32)
    some = lanes.any(axis=1, keepdims=True)
    for wrong, text in (
        (named & ~here & some, "a lane of the member mask does not come"),
        (lanes & ~named, "a lane comes that the member mask does not name"),
    ):
        if wrong.any():
            cta.report("missing", text, int(wrong.reshape(-1).argmax()))


def _mask(decoder: Decoder, operand: str) -> Read | None:
    return None if operand in WHOLE_WARP else decoder.read(operand, "b32")


def _barrier(decoder: Decoder, parts: tuple[str, ...], operands: tuple[str, ...]) -> Step:
    mask = _mask(decoder, operands[0])

    def barrier(cta: Cta, live: Array | None) -> None:
        members = mask(cta) if mask else None
        _require_members(cta, live, members)
        lanes = _lanes(cta, live)
        # a barrier of a part of the warp orders nothing for the rest; it is taken for none
        whole = lanes if cta.exited is None else lanes | cta.exited.reshape(-1, 32)
        cta.clock.warp_barrier(np.flatnonzero(whole.all(axis=1) & lanes.any(axis=1)))

    return barrier


def _shuffle(decoder: Decoder, parts: tuple[str, ...], operands: tuple[str, ...]) -> Step:
    mode = next(part for part in parts if part in ("up", "down", "bfly", "idx"))
    targets = [target.strip() for target in operands[0].split("|")]
    put = decoder.write(targets[0], "b32")
    put_valid = decoder.write(targets[1], "pred") if len(targets) > 1 else None
    values, by, clamp = (decoder.read(operand, "b32") for operand in operands[1:4])
    mask = _mask(decoder, operands[4])
    lane = np.tile(np.arange(32), decoder.count // 32)
    start = np.arange(decoder.count) - lane

    def shuffle(cta: Cta, live: Array | None) -> None:
        _require_members(cta, live, mask(cta) if mask else None)
        distance, limit = (by(cta) & np.uint32(31)).astype(np.int64), clamp(cta).astype(np.int64)
        segment = (limit >> 8) & 31
        highest = (lane & segment) | (limit & 31 & ~segment)
        if mode == "up":
            source = lane - distance
            valid = source >= highest
        else:
            source = {
                "down": lane + distance,
                "bfly": lane ^ distance,
                "idx": (lane & segment) | (distance & ~segment),
            }[mode]
            valid = source <= highest
        source = start + np.where(valid, source, lane)
        if live is not None and not live[source[live]].all():
            thread = np.flatnonzero(live)[int((~live[source[live]]).argmax())]
            cta.report("missing", "a lane reads from one that does not execute the shuffle", int(thread))
        put(cta, values(cta)[source], live)
        if put_valid is not None:
            put_valid(cta, valid, live)

    return shuffle


def _reduce(decoder: Decoder, parts: tuple[str, ...], operands: tuple[str, ...]) -> Step:
    kind = parts[-1]
    function = {
        "add": np.add, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and, "or": np.bitwise_or,
        "xor": np.bitwise_xor,
    }[next(part for part in parts[1:] if part in ("add", "min", "max", "and", "or", "xor"))]  # fmt: skip
    if kind not in ("s32", "u32", "b32"):
        raise ValueError(f"redux of .{kind}")
    put, read, mask = decoder.write(operands[0], kind), decoder.read(operands[1], kind), _mask(decoder, operands[2])

    def reduce(cta: Cta, live: Array | None) -> None:
        _require_members(cta, live, mask(cta) if mask else None)
        values, lanes = read(cta).reshape(-1, 32), _lanes(cta, live)
        result = np.zeros(len(values), DTYPES[kind])
        if live is None:
            result = function.reduce(values, axis=1, dtype=values.dtype)
        else:
            for w in np.flatnonzero(lanes.any(axis=1)):
                result[w] = function.reduce(values[w][lanes[w]], dtype=values.dtype)
        put(cta, _spread(result), live)

    return reduce


def _vote(decoder: Decoder, parts: tuple[str, ...], operands: tuple[str, ...]) -> Step:
    mode = next(part for part in parts if part in ("all", "any", "uni", "ballot"))
    put = decoder.write(operands[0], "b32" if mode == "ballot" else "pred")
    read, mask = decoder.read(operands[1], "pred"), _mask(decoder, operands[2])

    def vote(cta: Cta, live: Array | None) -> None:
        _require_members(cta, live, mask(cta) if mask else None)
        lanes = _lanes(cta, live)
        votes = read(cta).reshape(-1, 32)
        yes, every = (votes & lanes).any(axis=1), (votes | ~lanes).all(axis=1)
        results: dict[str, Any] = {"any": yes, "all": every, "uni": every | ~yes, "ballot": _bits(votes & lanes)}
        put(cta, _spread(results[mode]), live)

    return vote


def _match(decoder: Decoder, parts: tuple[str, ...], operands: tuple[str, ...]) -> Step:
    if "any" not in parts:
        raise ValueError("match.all")
    put, read, mask = (
        decoder.write(operands[0], "b32"),
        decoder.read(operands[1], parts[-1]),
        _mask(decoder, operands[2]),
    )

    def match(cta: Cta, live: Array | None) -> None:
        _require_members(cta, live, mask(cta) if mask else None)
        values, lanes = read(cta).reshape(-1, 32), _lanes(cta, live)
        same = (values[:, :, None] == values[:, None, :]) & lanes[:, None, :]
        put(cta, np.packbits(same, axis=2, bitorder="little").view(np.uint32).reshape(-1), live)

    return match


def _active(decoder: Decoder, parts: tuple[str, ...], operands: tuple[str, ...]) -> Step:
    put = decoder.write(operands[0], "b32")
    return lambda cta, live: put(cta, _spread(_bits(_lanes(cta, live))), live)


def _elect(decoder: Decoder, parts: tuple[str, ...], operands: tuple[str, ...]) -> Step:
    target, chosen = (name.strip() for name in operands[0].split("|"))
    put, put_chosen, mask = decoder.write(target, "b32"), decoder.write(chosen, "pred"), _mask(decoder, operands[1])

    def elect(cta: Cta, live: Array | None) -> None:
        _require_members(cta, live, mask(cta) if mask else None)
        lanes = _lanes(cta, live)
        leader = _spread(lanes.argmax(axis=1).astype(np.uint32))
        put(cta, leader, live)
        put_chosen(cta, leader == np.tile(np.arange(32), len(lanes)), live)

    return elect


_FAMILIES = {
    "bar.warp": _barrier, "shfl": _shuffle, "redux": _reduce, "vote": _vote, "match": _match, "activemask": _active,
    "elect": _elect,
}  # fmt: skip
