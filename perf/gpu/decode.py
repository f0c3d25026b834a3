"""Instructions as Python closures: operands are looked up once a kernel, not once a step."""

from __future__ import annotations

import re
import struct
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from . import matrix, warp
from .arithmetic import operation
from .cta import SPECIAL, Cta, NoValue
from .faults import Fault
from .ptx import REGISTER, SIZES, Entry, Instruction, ParseError, address, elements
from .rounding import Array
from .shared import BASE
from .types import DTYPES, UNSIGNED

Read = Callable[[Cta], Array]
Write = Callable[[Cta, Array, Array | None], None]
# executes an instruction by the threads of a mask, None for all
Step = Callable[[Cta, Array | None], None]

# what changes nothing that is followed here
_NOTHING = (
    "membar", "nanosleep", "griddepcontrol", "setmaxnreg", "discard", "applypriority", "pmevent",
)  # fmt: skip
_SPACES = ("global", "shared", "param", "local", "const")
_INTEGER = re.compile(r"-?(?:0[xX][0-9a-fA-F]+|0[bB][01]+|[0-9]+)U?$")


class Decoder:
    """Makes steps of the instructions of one kernel."""

    def __init__(self, entry: Entry) -> None:
        self.entry = entry
        self.count = entry.threads[0] * entry.threads[1] * entry.threads[2]
        self.slots = {name: slot for slot, name in enumerate(entry.registers)}
        self.parameters = {parameter.name: parameter for parameter in entry.parameters}
        self.undefined = _undefined(entry)

    def step(self, instruction: Instruction) -> Step:
        """Raises ParseError with the line of what is not supported."""
        try:
            made = self._step(instruction)
        except (ValueError, KeyError, IndexError) as error:
            raise ParseError(f"not supported ({error})", instruction.line, str(instruction)) from error
        if made is None:
            raise ParseError("the opcode is not supported", instruction.line, str(instruction))
        return made

    def _step(self, instruction: Instruction) -> Step | None:
        parts, operands = instruction.parts, instruction.operands
        name = parts[0]
        if name == "mov" and (parts[-1] != "pred" or "{" in instruction.operands[0]):
            return self._move(parts, operands)
        if name == "mov":
            return self._elementwise(lambda a: a, ("pred",), ("pred",), operands)
        if name == "prmt":
            operands = _permuted(operands, self.undefined)
            if not operands:
                return _nothing
        if arithmetic := operation(instruction.opcode, len(operands)):
            return self._elementwise(arithmetic.function, arithmetic.inputs, arithmetic.outputs, operands)
        if name in _MEMORY:
            return _MEMORY[name](self, parts, operands)
        if name == "cvta":
            return self._elementwise(lambda a: a, (parts[-1],), (parts[-1],), operands)
        if name == "prefetch":
            read = self.address(operands[0])
            return lambda cta, live: cta.prefetch(cta.running(live), read(cta)[cta.running(live)])
        if name == "createpolicy":
            return self._elementwise(lambda: np.zeros(self.count, np.uint64), (), ("b64",), operands[:1])
        if name == "fence":
            if "proxy" in parts and "async" in "".join(parts):
                return lambda cta, live: cta.shared.fence(cta.running(live))
            return _nothing
        if name in _NOTHING:
            return _nothing
        if name == "trap":
            return _trap
        return warp.step(self, instruction) or matrix.step(self, instruction)

    # --- operands
    def read(self, operand: str, kind: str) -> Read:
        """Values of an operand as its type's, from registers of at least that width."""
        dtype = DTYPES[kind]
        if operand.startswith("!"):
            positive = self.read(operand[1:], kind)
            return lambda cta: ~positive(cta)
        if operand in self.slots:
            slot, own = self.slots[operand], self.entry.registers[operand]
            if (own == "pred") != (kind == "pred"):
                raise ValueError(f"{operand} is a register of {own}")
            if kind == "pred":
                return lambda cta: cta.registers[slot].view(np.bool_)
            if SIZES[own] == SIZES[kind]:
                return lambda cta: cta.registers[slot].view(dtype)
            if SIZES[own] < SIZES[kind]:
                raise ValueError(f"{operand} is narrower than .{kind}")
            narrow = UNSIGNED[SIZES[kind]]
            return lambda cta: cta.registers[slot].astype(narrow).view(dtype)
        if operand in SPECIAL:
            narrow = UNSIGNED[SIZES[kind]]
            return lambda cta: cta.special[operand].astype(narrow).view(dtype)
        constant = np.full(self.count, self._literal(operand, kind))
        return lambda cta: constant

    def _literal(self, operand: str, kind: str) -> Any:
        dtype = DTYPES[kind]
        if kind == "pred":
            return np.bool_(int(operand, 0) != 0)
        if match := re.fullmatch(r"0([fFdD])([0-9a-fA-F]+)", operand):
            single = match[1] in "fF"
            bits = int(match[2], 16)
            if SIZES[kind] == (4 if single else 8):
                return UNSIGNED[SIZES[kind]](bits).view(dtype)
            (value,) = struct.unpack("<f" if single else "<d", bits.to_bytes(4 if single else 8, "little"))
            return dtype(value)
        if _INTEGER.match(operand):
            bits = int(operand.rstrip("U"), 0) & ((1 << SIZES[kind] * 8) - 1)
            return UNSIGNED[SIZES[kind]](bits).view(dtype)
        if operand in self.entry.shared:
            return UNSIGNED[SIZES[kind]](BASE + self.entry.shared[operand]).view(dtype)
        if operand in self.parameters:
            return UNSIGNED[SIZES[kind]](self.parameters[operand].offset).view(dtype)
        raise ValueError(f"operand {operand}")

    def write(self, operand: str, kind: str) -> Write:
        """Puts values of a type into a register of at least that width, extended by sign or zeros."""
        if operand == "_":
            return lambda cta, value, live: None
        slot, own = self.slots[operand], self.entry.registers[operand]
        if kind == "pred" or own == "pred":
            if kind != own:
                raise ValueError(f"{operand} is a register of {own}")
            return _writer(slot, np.bool_)
        dtype = UNSIGNED[SIZES[own]]
        if SIZES[own] == SIZES[kind]:
            return _writer(slot, dtype)
        if SIZES[own] < SIZES[kind]:
            raise ValueError(f"{operand} is narrower than .{kind}")
        wide: type[Any] = np.dtype(f"i{SIZES[own]}").type if kind[0] == "s" else dtype
        narrow, put = DTYPES[kind] if kind[0] == "s" else UNSIGNED[SIZES[kind]], _writer(slot, dtype)
        return lambda cta, value, live: put(cta, np.ascontiguousarray(value).view(narrow).astype(wide), live)

    def address(self, operand: str) -> Read:
        """Addresses of an operand in brackets: int64 of each thread."""
        base, offset = address(operand)
        if not base:
            constant = np.full(self.count, offset, np.int64)
            return lambda cta: constant
        if base in self.slots:
            read = self.read(base, "u32" if SIZES[self.entry.registers[base]] == 4 else "s64")
            if offset == 0:
                return lambda cta: read(cta).astype(np.int64)
            return lambda cta: read(cta).astype(np.int64) + offset
        constant = np.full(self.count, int(self._literal(base, "u64")) + offset, np.int64)
        return lambda cta: constant

    # --- families
    def _elementwise(
        self, function: Callable[..., Any], inputs: tuple[str, ...], outputs: tuple[str, ...], operands: tuple[str, ...]
    ) -> Step:
        targets = operands[0].split("|")
        if len(operands) - 1 != len(inputs):
            raise ValueError(f"{len(inputs)} operands are read, not {len(operands) - 1}")
        reads = [self.read(operand, kind) for operand, kind in zip(operands[1:], inputs, strict=True)]
        writes = [self.write(target.strip(), kind) for target, kind in zip(targets, outputs, strict=False)]
        if len(outputs) > 1:

            def several(cta: Cta, live: Array | None) -> None:
                values = function(*(read(cta) for read in reads))
                for write, value in zip(writes, values, strict=False):
                    write(cta, value, live)

            return several
        (write,) = writes
        if len(reads) == 1:
            (only,) = reads
            return lambda cta, live: write(cta, function(only(cta)), live)
        if len(reads) == 2:
            first, second = reads
            return lambda cta, live: write(cta, function(first(cta), second(cta)), live)
        return lambda cta, live: write(cta, function(*(read(cta) for read in reads)), live)

    def _move(self, parts: tuple[str, ...], operands: tuple[str, ...]) -> Step:
        kind, (target, source) = parts[-1], operands
        if target.startswith("{"):
            names = elements(target)
            part = f"b{SIZES[kind] * 8 // len(names)}"
            unpacked = UNSIGNED[SIZES[part]]
            read, writes = self.read(source, kind), [self.write(name, part) for name in names]

            def unpack(cta: Cta, live: Array | None) -> None:
                values = np.ascontiguousarray(read(cta)).view(unpacked).reshape(-1, len(names))
                for i, write in enumerate(writes):
                    write(cta, np.ascontiguousarray(values[:, i]), live)

            return unpack
        if source.startswith("{"):
            names = elements(source)
            part = f"b{SIZES[kind] * 8 // len(names)}"
            whole = UNSIGNED[SIZES[kind]]
            reads, put = [self.read(name, part) for name in names], self.write(target, kind)
            return lambda cta, live: put(cta, np.stack([r(cta) for r in reads], axis=1).view(whole).reshape(-1), live)
        return self._elementwise(lambda a: a, (kind,), (kind,), operands)

    def _space(self, parts: tuple[str, ...]) -> str:
        return next((part.split(":")[0] for part in parts if part.split(":")[0] in _SPACES), "global")

    def _width(self, parts: tuple[str, ...]) -> int:
        return next((int(part[1:]) for part in parts if part in ("v2", "v4", "v8")), 1)

    def _load(self, parts: tuple[str, ...], operands: tuple[str, ...]) -> Step:
        space, kind, count = self._space(parts), parts[-1], self._width(parts)
        size, names = SIZES[kind], elements(operands[0])
        if len(names) != count or space in ("local", "const"):
            raise ValueError(f"a load of {len(names)} from {space} memory")
        read, writes = self.address(operands[1]), [self.write(name, kind) for name in names]
        atomic = bool({"volatile", "relaxed", "acquire", "mmio"} & set(parts))

        def load(cta: Cta, live: Array | None) -> None:
            addresses = read(cta)
            if space == "param":
                values = cta.load_parameter(addresses, size, count)
            else:
                threads = cta.running(live)
                if live is not None:
                    addresses = addresses[threads]
                if space == "shared":
                    values = cta.load_shared(threads, addresses, size, count)
                else:
                    values = cta.load_global(threads, addresses, size, count, atomic)
                if live is not None:
                    some, values = values, np.zeros((cta.size, count), values.dtype)
                    values[threads] = some
            for i, write in enumerate(writes):
                write(cta, values[:, i] if count == 1 else np.ascontiguousarray(values[:, i]), live)

        return load

    def _store(self, parts: tuple[str, ...], operands: tuple[str, ...]) -> Step:
        space, kind, count = self._space(parts), parts[-1], self._width(parts)
        size, names = SIZES[kind], elements(operands[1])
        if len(names) != count or space not in ("global", "shared"):
            raise ValueError(f"a store of {len(names)} to {space} memory")
        bits = f"b{size * 8}"
        where, reads = self.address(operands[0]), [self.read(name, bits) for name in names]
        atomic = bool({"volatile", "relaxed", "release", "mmio"} & set(parts))

        def store(cta: Cta, live: Array | None) -> None:
            addresses, threads = where(cta), cta.running(live)
            values = reads[0](cta)[:, None] if count == 1 else np.stack([read(cta) for read in reads], axis=1)
            if live is not None:
                addresses, values = addresses[threads], values[threads]
            if space == "shared":
                cta.store_shared(threads, addresses, size, values)
            else:
                cta.store_global(threads, addresses, size, values, atomic)

        return store

    def _atomic(self, parts: tuple[str, ...], operands: tuple[str, ...]) -> Step:
        space, kind = self._space(parts), parts[-1]
        name = next(part for part in parts if part in _ATOMICS)
        if parts[0] == "atom":
            put: Write | None = self.write(operands[0], kind)
            operands = operands[1:]
        else:
            put = None
        where, reads = self.address(operands[0]), [self.read(x, kind) for x in operands[1 : 3 if name == "cas" else 2]]
        size, dtype, function = SIZES[kind], DTYPES[kind], _ATOMICS[name]
        add = operation(f"add.{'rn.' if kind in ('f16', 'bf16') else ''}{kind}") if name == "add" else None
        if add is not None:
            function = add.function

        def atomic(cta: Cta, live: Array | None) -> None:
            threads, values = cta.running(live), [read(cta) for read in reads]
            addresses = where(cta)[threads]
            before = np.zeros(cta.size, dtype)
            if space == "shared":
                offsets = cta.shared_offsets(threads, addresses, size)
                view = cta.shared.atomic(threads, offsets, size, cta.shared_report(threads, offsets))
                cells = [(np.arange(len(threads)), view, offsets // size)]
            else:
                cells = cta.atomic_cells(threads, addresses, size)
            for part, view, places in cells:
                memory = view.view(dtype)
                left = np.arange(len(part))
                # of lanes with one address the lowest goes first
                while len(left):
                    _, first = np.unique(places[left], return_index=True)
                    chosen = left[first]
                    own, at = threads[part[chosen]], places[chosen]
                    before[own] = memory[at]
                    memory[at] = function(memory[at], *(value[own] for value in values))
                    left = np.delete(left, first)
            if put is not None:
                put(cta, before, live)

        return atomic

    def _copy(self, parts: tuple[str, ...], operands: tuple[str, ...]) -> Step | None:
        """cp.async and its groups."""
        if "commit_group" in parts:
            return lambda cta, live: cta.shared.commit(cta.running(live))
        if "wait_group" in parts or "wait_all" in parts:
            newest = int(operands[0], 0) if operands else -1
            return lambda cta, live: cta.shared.wait(cta.running(live), newest)
        if parts[1] != "async" or "bulk" in parts or "mbarrier" in parts:
            return None
        where, source, size = self.address(operands[0]), self.address(operands[1]), int(operands[2].rstrip("U"), 0)
        given = self.read(operands[3], "u32") if len(operands) > 3 and operands[3] in self.slots else None
        unit = min(size, 8)

        def copy(cta: Cta, live: Array | None) -> None:
            threads = cta.running(live)
            wanted = np.full(len(threads), size) if given is None else given(cta)[threads]
            if ((wanted != 0) & (wanted != size)).any():
                raise Fault(cta.report("outside", "a copy of a part of its size is not supported"))
            offsets = cta.shared_offsets(threads, where(cta)[threads], size)
            data = np.zeros((len(threads), size), np.uint8)
            full = np.flatnonzero(wanted)
            sources = source(cta)[threads]
            values = cta.load_global(threads[full], sources[full], unit, size // unit)
            data[full] = values.view(np.uint8).reshape(-1, size)
            sources = np.where(wanted, sources, 0)
            cta.shared.begin_copy(threads, offsets, data, sources, cta.shared_report(threads, offsets))

        return copy


def _writer(slot: int, dtype: type[Any]) -> Write:
    def put(cta: Cta, value: Array, live: Array | None) -> None:
        value = value.view(dtype)
        if live is not None:
            old = cta.registers[slot]
            # threads that have no value yet would read zero
            value = np.where(live, value, dtype(0) if isinstance(old, NoValue) else old)
        cta.registers[slot] = value

    return put


def _undefined(entry: Entry) -> dict[str, int]:
    """Which bytes, a bit each, have no value in registers that a compiler packs with others: it takes them off again.

    Those of registers that no instruction writes, and what prmt.b32 makes of them.
    """
    named = Counter(name for instruction in entry.code for name in REGISTER.findall("".join(instruction.operands[:1])))
    undefined = {name: 0b1111 for name, kind in entry.registers.items() if SIZES[kind] == 4 and not named[name]}
    for instruction in entry.code if undefined else ():
        if instruction.opcode == "prmt.b32" and named[instruction.operands[0]] == 1:
            bits = 0
            for i, byte in enumerate(_selected(instruction.operands[3])):
                bits |= (undefined.get(instruction.operands[1 + byte // 4], 0) >> byte % 4 & 1) << i
            if bits:
                undefined[instruction.operands[0]] = bits
    return undefined


def _selected(selector: str) -> list[int]:
    """Which of the 8 bytes of its words prmt.b32 takes, if the code says so."""
    if selector.startswith("%"):
        return []
    return [int(selector.rstrip("U"), 0) >> shift & 7 for shift in (0, 4, 8, 12)]


def _permuted(operands: tuple[str, ...], undefined: Mapping[str, int]) -> tuple[str, ...]:
    """The operands of prmt.b32 without a word of which no byte with a value is taken; nothing if there is no other."""
    target, *words, selector = operands
    taken = _selected(selector)
    if not taken:
        return operands
    used = [words[byte // 4] for byte in sorted(taken) if not undefined.get(words[byte // 4], 0) >> byte % 4 & 1]
    return (target, used[0], used[-1], selector) if used else ()


def _nothing(cta: Cta, live: Array | None) -> None:
    pass


def _trap(cta: Cta, live: Array | None) -> None:
    raise Fault(cta.report("trap", "the kernel ends itself"))


# what reads and writes memory
_MEMORY: dict[str, Callable[[Decoder, tuple[str, ...], tuple[str, ...]], Step | None]] = {
    "ld": Decoder._load, "ldu": Decoder._load, "st": Decoder._store, "atom": Decoder._atomic, "red": Decoder._atomic,
    "cp": Decoder._copy,
}  # fmt: skip
_ATOMICS: dict[str, Callable[..., Any]] = {
    "add": np.add, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and, "or": np.bitwise_or,
    "xor": np.bitwise_xor, "exch": lambda old, new: new, "cas": lambda old, want, new: np.where(old == want, new, old),
    "inc": lambda old, top: np.where(old >= top, 0, old + 1).astype(old.dtype),
    "dec": lambda old, top: np.where((old == 0) | (old > top), top, old - 1).astype(old.dtype),
}  # fmt: skip
