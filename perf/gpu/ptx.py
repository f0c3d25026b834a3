"""PTX text of one kernel as Python objects: parameters, registers, shared variables, labels and instructions.

Only the syntax is known here; what opcodes mean is in `decode.py`. The PTX is that of Triton's compiler or of hand: one
`.entry`, no functions. Instructions keep the line of the text and the line of Python that `.loc` gives.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field

# bytes of a value of each type; predicates have no memory
REGISTER = re.compile(r"%\w+")
# member masks of all lanes
WHOLE_WARP = ("-1", "0xffffffff", "0xFFFFFFFF", "4294967295")
SIZES = {
    "pred": 0, "s8": 1, "u8": 1, "b8": 1, "s16": 2, "u16": 2, "b16": 2, "f16": 2, "bf16": 2, "s32": 4, "u32": 4,
    "b32": 4, "f32": 4, "tf32": 4, "f16x2": 4, "bf16x2": 4, "s16x2": 4, "u16x2": 4, "s64": 8, "u64": 8, "b64": 8,
    "f64": 8, "f32x2": 8, "e4m3x2": 2, "e5m2x2": 2, "b128": 16,
}  # fmt: skip


class ParseError(ValueError):
    """PTX that cannot be run: the line, its text and the reason."""

    def __init__(self, reason: str, line: int, text: str) -> None:
        super().__init__(f"PTX line {line}: {reason}: {text.strip()}")


@dataclass(frozen=True)
class Parameter:
    """An argument of the kernel: `size` bytes at `offset` of the parameters' memory. `type` is that of a scalar."""

    name: str
    type: str
    size: int
    offset: int


@dataclass(frozen=True)
class Instruction:
    """`@guard opcode operands;` on a `line` of the PTX, compiled from `source`, a file and line of Python or ""."""

    opcode: str
    operands: tuple[str, ...]
    guard: str | None
    negated: bool
    line: int
    source: str = ""
    parts: tuple[str, ...] = field(init=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "parts", tuple(self.opcode.replace("::", ":").split(".")))

    def __str__(self) -> str:
        guard = f"@{'!' * self.negated}{self.guard} " if self.guard else ""
        return f"{guard}{self.opcode} {', '.join(self.operands)}".rstrip()


@dataclass(frozen=True)
class Entry:
    """A parsed kernel.

    `registers` gives each register's type, `labels` the place in `code` that a label stands before, `shared` the
    offset of each variable in shared memory, of which `static_bytes` are declared with a size; an `extern` variable
    stands behind those.
    """

    name: str
    parameters: tuple[Parameter, ...]
    threads: tuple[int, int, int]
    registers: dict[str, str]
    shared: dict[str, int]
    static_bytes: int
    code: tuple[Instruction, ...]
    labels: dict[str, int]


_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.S)
_ENTRY = re.compile(r"\.entry\s+([\w$]+)\s*\(([^)]*)\)([^{;]*)\{", re.S)
_OF_LINES = re.compile(r"\.(?:loc|file)\s")
_LABEL = re.compile(r"([\w$%]+)\s*:(?!:)\s*")
_INSTRUCTION = re.compile(r"(?:@(!?)\s*([%\w$']+)\s+)?([A-Za-z][\w.:]*)\s*(.*)$", re.S)
_SHARED = re.compile(r"(\.extern\s+)?\.shared\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+([\w$]+)\s*(?:\[\s*(\d*)\s*\])?")


def parse(ptx: str) -> Entry:
    """The one kernel of a PTX text. Raises ParseError with the line of what is not understood."""
    # a comment may hold line ends and anything else
    text = _COMMENT.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), ptx)
    entries = list(_ENTRY.finditer(text))
    if len(entries) != 1:
        raise ValueError(f"the PTX must have one .entry with a body, it has {len(entries)}")
    head = entries[0]
    starts = [0, *(match.end() for match in re.finditer("\n", text))]
    files = {number: path.rsplit("/", 1)[-1] for number, path in re.findall(r'\.file\s+(\d+)\s+"([^"]+)"', text)}

    def line_of(place: int) -> int:
        return bisect_right(starts, place)

    body_end = _closing(text, head.end() - 1)
    registers: dict[str, str] = {}
    labels: dict[str, int] = {}
    code: list[Instruction] = []
    declared = text[: head.start()]
    scopes: list[dict[str, str]] = [{}]
    source = ""
    for place, statement in _statements(text, head.end(), body_end):
        line = line_of(place)
        if statement == "{":
            scopes.append({})
        elif statement == "}":
            scopes.pop()
        elif re.match(r"\.loc\s", statement):
            _, file, number, *_ = statement.split()
            source = f"{files.get(file, file)}:{number}"
        elif statement.startswith(".reg"):
            _declare(statement, line, registers, scopes)
        elif statement.startswith(".shared"):
            declared += f"\n{statement};"
        elif statement.startswith((".local", ".global", ".const", ".branchtargets", ".param")):
            raise ParseError("this declaration is not supported", line, statement)
        elif statement.endswith(":"):
            labels[_renamed(statement[:-1], scopes)] = len(code)
        elif not statement.startswith("."):
            code.append(_instruction(statement, line, source, scopes))
    shared, static_bytes = _shared(declared)
    entry = Entry(
        head[1], _parameters(head[2], line_of(head.start(2))), _threads(head[3], line_of(head.start())), registers,
        shared, static_bytes, tuple(code), labels,
    )  # fmt: skip
    for instruction in code:
        if instruction.opcode.startswith("bra") and instruction.operands[0] not in labels:
            raise ParseError("the label is not defined", instruction.line, str(instruction))
    return entry


def address(operand: str) -> tuple[str, int]:
    """Base, "" where there is none, and offset of an operand in brackets."""
    match = re.fullmatch(r"\[\s*([%A-Za-z_$][\w$.']*)?\s*(?:(?:\+|(?=-)|(?<=\[)\s*)\s*(-?\w+))?\s*\]", operand)
    if not match or not (match[1] or match[2]):
        raise ValueError(f"not an address: {operand}")
    return match[1] or "", int(match[2] or "0", 0)


def elements(operand: str) -> list[str]:
    """The members of an operand in braces; the operand itself where it has none."""
    return [part.strip() for part in operand.strip("{} \t\n").split(",")]


def _closing(text: str, opening: int) -> int:
    depth = 0
    for match in re.compile("[{}]").finditer(text, opening):
        depth += 1 if match[0] == "{" else -1
        if depth == 0:
            return match.start()
    raise ValueError("the kernel's body does not end")


def _statements(text: str, begin: int, end: int) -> Iterator[tuple[int, str]]:
    """Place and text of statements, labels and the braces of scopes between two places."""
    place = begin
    while True:
        while place < end and text[place] in " \t\r\n;":
            place += 1
        if place >= end:
            return
        if text[place] in "{}":
            yield place, text[place]
            place += 1
        elif _OF_LINES.match(text, place):
            # these end with their line
            stop = min(text.find("\n", place) % (len(text) + 1), end)
            yield place, text[place:stop].strip()
            place = stop
        elif label := _LABEL.match(text, place, end):
            yield place, f"{label[1]}:"
            place = label.end()
        else:
            stop = text.find(";", place, end)
            if stop < 0:
                raise ParseError("no semicolon ends this", text.count("\n", 0, place) + 1, text[place:end])
            yield place, text[place:stop].strip()
            place = stop + 1


def _declare(statement: str, line: int, registers: dict[str, str], scopes: list[dict[str, str]]) -> None:
    match = re.match(r"\.reg\s+\.(\w+)\s+(.*)$", statement, re.S)
    if not match or match[1] not in SIZES:
        raise ParseError("registers of this type are not supported", line, statement)
    for name in match[2].split(","):
        many = re.fullmatch(r"\s*([%\w$]+)\s*<\s*(\d+)\s*>\s*", name)
        for own in [f"{many[1]}{i}" for i in range(int(many[2]))] if many else [name.strip()]:
            # a name of an inner scope may be declared again in the next
            unique = own if len(scopes) == 1 else f"{own}'{line}"
            scopes[-1][own] = unique
            registers[unique] = match[1]


def _renamed(name: str, scopes: list[dict[str, str]]) -> str:
    return next((scope[name] for scope in reversed(scopes) if name in scope), name)


def _instruction(statement: str, line: int, source: str, scopes: list[dict[str, str]]) -> Instruction:
    match = _INSTRUCTION.match(statement)
    if not match:
        raise ParseError("not an instruction", line, statement)
    negated, guard, opcode, rest = match.groups()
    if len(scopes) > 1:
        rest = re.sub(r"[%\w$]+", lambda name: _renamed(name[0], scopes), rest)
    guard = _renamed(guard, scopes) if guard else None
    operands, depth, begin = [], 0, 0
    for i, letter in enumerate(rest):
        depth += (letter in "{[(") - (letter in "}])")
        if letter == "," and depth == 0:
            operands.append(rest[begin:i])
            begin = i + 1
    operands.append(rest[begin:])
    return Instruction(
        opcode, tuple(operand.strip() for operand in operands if operand.strip()), guard, bool(negated), line, source
    )


def _parameters(text: str, line: int) -> tuple[Parameter, ...]:
    parameters: list[Parameter] = []
    offset = 0
    for declaration in filter(None, (part.strip() for part in text.split(","))):
        match = re.match(
            r"\.param\s+((?:\.align\s+\d+\s+)?)\.(\w+)(.*?)([\w$]+)\s*(?:\[\s*(\d+)\s*\])?$", declaration, re.S
        )
        if not match or match[2] not in SIZES:
            raise ParseError("not a parameter", line, declaration)
        align = int(match[1].split()[1]) if match[1] else SIZES[match[2]]
        size = SIZES[match[2]] * int(match[5] or 1)
        offset = -(-offset // align) * align
        parameters.append(Parameter(match[4], match[2], size, offset))
        offset += size
    return tuple(parameters)


def _threads(directives: str, line: int) -> tuple[int, int, int]:
    match = re.search(r"\.(?:reqntid|maxntid)\s+(\d+)(?:\s*,\s*(\d+))?(?:\s*,\s*(\d+))?", directives)
    if not match:
        raise ParseError("the kernel needs .reqntid or .maxntid", line, directives)
    x, y, z = (int(number or 1) for number in match.groups())
    if x * y * z % 32:
        raise ParseError("a CTA must be whole warps", line, directives)
    return x, y, z


def _shared(text: str) -> tuple[dict[str, int], int]:
    places: dict[str, int] = {}
    static, dynamic = 0, []
    for extern, align, kind, name, count in _SHARED.findall(text):
        # the size of an extern array is the launch's to choose
        if extern:
            dynamic.append(name)
            continue
        step = int(align or SIZES[kind])
        places[name] = -(-static // step) * step
        static = places[name] + SIZES[kind] * int(count or 1)
    static = -(-static // 1024) * 1024
    return {**places, **dict.fromkeys(dynamic, static)}, static
