"""Draws the pictures of docs/concepts/jagged.md from real batches: `python docs/pictures/jagged_pictures.py [folder]`.

Each picture is a file of SVG with its own background, so that it reads the same on light and dark pages. A row of bags
is drawn value by value; a bag without values is a narrow slot. All measures are pixels.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from shardwise.jagged import JaggedTensor, KeyedJaggedTensor, KeyedTensor

CELL, SLOT, GAP, HEIGHT = 34, 14, 6, 28
LEFT, MARGIN = 150, 16
COLOURS = ("#cfe2ff", "#ffe0b3", "#d3f0d0", "#eed7f5", "#ffd6d6")
STYLE = (
    "text{font:13px ui-monospace,Menlo,Consolas,monospace;fill:#1f2328;text-anchor:middle}"
    ".l{text-anchor:start}.s{fill:#59636e}.b{font-weight:bold}"
    "rect{stroke:#59636e}.d{fill:none;stroke-dasharray:3 2}line,path{stroke:#59636e;fill:none}"
)


class Picture:
    """Shapes in the order in which they are drawn, and how far they reach."""

    def __init__(self) -> None:
        self.shapes: list[str] = []
        self.width = self.height = 0

    def _add(self, shape: str, right: float, bottom: float) -> None:
        self.shapes.append(shape)
        self.width, self.height = max(self.width, round(right)), max(self.height, round(bottom))

    def text(self, x: float, y: float, words: object, kind: str = "") -> None:
        """Words centred on x, or beginning there for kind "l"; y is their base line."""
        escaped = str(words).replace("&", "&amp;").replace("<", "&lt;")
        length = 8 * len(str(words))
        right = x + (length if "l" in kind.split() else length / 2)
        self._add(f'<text x="{x:g}" y="{y:g}"{_class(kind)}>{escaped}</text>', right, y + 4)

    def box(self, x: float, y: float, width: float, colour: str, words: object = "") -> None:
        self._add(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{HEIGHT}" fill="{colour}"/>', x + width, y + HEIGHT
        )
        if words != "":
            self.text(x + width / 2, y + 19, words)

    def slot(self, x: float, y: float) -> None:
        """A bag without values."""
        self._add(f'<rect x="{x:g}" y="{y:g}" width="{SLOT}" height="{HEIGHT}" class="d"/>', x + SLOT, y + HEIGHT)

    def bracket(self, x: float, end: float, y: float, words: str) -> None:
        """A brace over x ... end that opens downwards, with words above it."""
        self._add(f'<path d="M{x:g} {y + 6:g}v-6H{end:g}v6"/>', end, y + 6)
        self.text((x + end) / 2, y - 5, words, "b")

    def tick(self, x: float, y: float, words: object) -> None:
        """A number at the edge of a bag."""
        self._add(f'<line x1="{x:g}" y1="{y:g}" x2="{x:g}" y2="{y + 7:g}"/>', x, y + 7)
        self.text(x, y + 20, words)

    def svg(self, title: str) -> str:
        width, height = self.width + MARGIN, self.height + MARGIN
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" role="img">',
                f"<title>{title}</title><style>{STYLE}</style>",
                f'<rect width="{width}" height="{height}" rx="8" style="fill:#fff;stroke:#d1d9e0"/>',
                *self.shapes,
                "</svg>\n",
            ]
        )


def _class(kind: str) -> str:
    return f' class="{kind}"' if kind else ""


def spans(lengths: Sequence[int], x: float) -> list[tuple[float, float]]:
    """Where each bag begins and ends when the first begins at x."""
    found = []
    for length in lengths:
        end = x + (length * CELL or SLOT)
        found.append((x, end))
        x = end + GAP
    return found


def draw_bags(
    picture: Picture, x: float, y: float, values: Sequence[object], lengths: Sequence[int], colours: Sequence[str]
) -> list[tuple[float, float]]:
    """A row of bags, each in its colour; returns their spans."""
    found, rest = spans(lengths, x), list(values)
    for (begin, _), length, colour in zip(found, lengths, colours, strict=True):
        if not length:
            picture.slot(begin, y)
        for i in range(length):
            picture.box(begin + i * CELL, y, CELL, colour, rest.pop(0))
    return found


def draw_sizes(
    picture: Picture, y: float, found: Sequence[tuple[float, float]], jt: JaggedTensor | KeyedJaggedTensor
) -> None:
    """Lengths under the middle of each bag, offsets under its edges."""
    picture.text(MARGIN, y + 19, "lengths", "l")
    for (begin, end), length in zip(found, jt.lengths().tolist(), strict=True):
        picture.text((begin + end) / 2, y + 19, length)
    picture.text(MARGIN, y + 50, "offsets", "l")
    edges = [found[0][0] - GAP / 2, *(end + GAP / 2 for _, end in found)]
    for x, offset in zip(edges, jt.offsets().tolist(), strict=True):
        picture.tick(x, y + 30, offset)


def jagged_tensor() -> str:
    """Bags of a JaggedTensor, a colour each."""
    jt = JaggedTensor(torch.tensor([11, 12, 13, 14, 15, 16]), lengths=torch.tensor([2, 0, 1, 3]))
    picture = Picture()
    picture.text(MARGIN, 32, "bag", "l s")
    picture.text(MARGIN, 63, "values", "l")
    found = draw_bags(picture, LEFT, 44, jt.values().tolist(), jt.lengths().tolist(), COLOURS[:4])
    for i, (begin, end) in enumerate(found):
        picture.text((begin + end) / 2, 32, i, "s")
    draw_sizes(picture, 74, found, jt)
    return picture.svg("A JaggedTensor: values in bags, with lengths under the bags and offsets under their edges")


def keyed_jagged_tensor() -> str:
    """A KeyedJaggedTensor as a table of keys and samples, and as it lies in memory; a colour for each sample."""
    kjt = KeyedJaggedTensor.from_lists({"clicked": [[11, 12], [], [13]], "tag": [[5], [6, 7, 8], [6]]})
    picture, stride = Picture(), kjt.stride()
    column = 3 * CELL + 24
    for sample in range(stride):
        picture.text(LEFT + sample * column, 32, f"sample {sample}", "l s")
    for row, (key, jt) in enumerate(kjt.to_dict().items()):
        y = 44 + row * (HEIGHT + 10)
        picture.text(MARGIN, y + 19, key, "l b")
        for sample, bag in enumerate(jt.to_dense()):
            draw_bags(picture, LEFT + sample * column, y, bag.tolist(), [len(bag)], [COLOURS[sample]])
    y = 168
    picture.text(MARGIN, y + 19, "values", "l")
    colours = [*COLOURS[:stride]] * len(kjt.keys())
    found = draw_bags(picture, LEFT, y, kjt.values().tolist(), kjt.lengths().tolist(), colours)
    draw_sizes(picture, y + 30, found, kjt)
    picture.text(MARGIN, y + 112, "length_per_key", "l")
    picture.text(MARGIN, y + 138, "offset_per_key", "l")
    starts = kjt.lengths_offset_per_key()
    for i, key in enumerate(kjt.keys()):
        begin, end = found[starts[i]][0], found[starts[i + 1] - 1][1]
        picture.bracket(begin, end, y - 12, key)
        picture.text((begin + end) / 2, y + 112, kjt.length_per_key()[i])
        picture.text(begin - GAP / 2, y + 138, kjt.offset_per_key()[i])
    picture.text(found[-1][1] + GAP / 2, y + 138, kjt.offset_per_key()[-1])
    return picture.svg("A KeyedJaggedTensor: all bags of the first key, then all bags of the second")


def draw_keyed(picture: Picture, x: float, y: float, kjt: KeyedJaggedTensor, colours: Mapping[str, str]) -> float:
    """A row of bags under the names of their keys, a colour for each key; returns where it ends."""
    strides = zip(kjt.keys(), kjt.stride_per_key(), strict=True)
    per_bag = [colours[key] for key, stride in strides for _ in range(stride)]
    found = draw_bags(picture, x, y, kjt.values().tolist(), kjt.lengths().tolist(), per_bag)
    starts = kjt.lengths_offset_per_key()
    for i, key in enumerate(kjt.keys()):
        picture.bracket(found[starts[i]][0], found[starts[i + 1] - 1][1], y - 12, key)
    return found[-1][1]


def split_and_permute() -> str:
    """Three keys, cut in two and put in another order; a colour for each key."""
    kjt = KeyedJaggedTensor.from_lists({"a": [[1, 2], [3]], "b": [[4], []], "c": [[5], [6, 7]]})
    colours = dict(zip(kjt.keys(), COLOURS, strict=False))
    picture = Picture()
    picture.text(MARGIN, 63, "kjt", "l")
    draw_keyed(picture, LEFT, 44, kjt, colours)
    picture.text(MARGIN, 137, "split([1, 2])", "l")
    x: float = LEFT
    for piece in kjt.split([1, 2]):
        x = draw_keyed(picture, x, 118, piece, colours) + 40
    picture.text(MARGIN, 211, "permute([2, 0])", "l")
    draw_keyed(picture, LEFT, 192, kjt.permute([2, 0]), colours)
    return picture.svg("split cuts a batch between keys, permute copies keys in another order")


def regroup() -> str:
    """Columns of two KeyedTensors, put together anew; a colour for each key."""
    user_item = KeyedTensor(["user", "item"], [2, 3], torch.arange(10).view(2, 5))
    ad = KeyedTensor(["ad"], [2], torch.arange(10, 14).view(2, 2))
    groups = [["item", "ad"], ["user", "ad"]]
    widths = {"user": 2, "item": 3, "ad": 2}
    colours = dict(zip(widths, COLOURS, strict=False))
    picture = Picture()

    def table(x: float, y: float, keys: Sequence[str], values: torch.Tensor) -> float:
        row: list[int]
        for r, row in enumerate(values.tolist()):
            at, rest = x, list(row)
            for key in keys:
                for _ in range(widths[key]):
                    picture.box(at, y + r * HEIGHT, CELL, colours[key], rest.pop(0))
                    at += CELL
        at = x
        for key in keys:
            picture.bracket(at + 2, at + widths[key] * CELL - 2, y - 12, key)
            at += widths[key] * CELL
        return at

    picture.text(MARGIN, 76, "inputs", "l")
    end = table(LEFT, 44, user_item.keys(), user_item.values())
    table(end + 40, 44, ad.keys(), ad.values())
    picture.text(MARGIN, 178, "regroup", "l")
    x: float = LEFT
    for group, values in zip(groups, KeyedTensor.regroup([user_item, ad], groups), strict=True):
        x = table(x, 146, group, values) + 40
    return picture.svg("regroup puts the columns of keys side by side, one tensor for each group")


PICTURES: dict[str, Callable[[], str]] = {
    "jagged_tensor.svg": jagged_tensor,
    "keyed_jagged_tensor.svg": keyed_jagged_tensor,
    "split_and_permute.svg": split_and_permute,
    "regroup.svg": regroup,
}


def write(folder: Path) -> None:
    """Every picture, as a file in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, draw in PICTURES.items():
        (folder / name).write_text(draw(), encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
