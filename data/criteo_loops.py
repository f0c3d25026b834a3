"""The loop over Criteo's lines that numba compiles where it is first called; criteo_text.py has what it means.

Letters: n lines, F = 40 fields of a line, of which 13 are integers and 26 categories.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from shardwise.kernels import numba_loops

# what a byte is as a digit of base 16; from 16 on it is none
_DIGITS = np.full(256, 16, np.uint8)
for _byte in b"0123456789abcdefABCDEF":
    _DIGITS[_byte] = int(chr(_byte), 16)
_TAB, _MINUS, _ZERO, _MAX_DIGITS = 9, 45, 48, 18
# to type checkers these are functions, not types
_uint8: Any = np.uint8
_uint32: Any = np.uint32


def parse_rows(*arrays: Any) -> int:
    """`_parse_rows` with the digits of bytes."""
    return int(_parse_rows(_DIGITS, *arrays))


@numba_loops.compiled_by_types
def _parse_rows(  # type: ignore[no-untyped-def] # noqa: ANN202, PLR0912
    digits,
    text,
    starts,
    ends,
    logarithms,
    divisors,
    labels,
    dense,
    ids,
    plain,
    large,
    large_values,
):
    """Fill labels [n], dense [n, 13] and ids [26, n], -1 where missing, from the lines at starts [n] to ends [n].

    A line that the loop does not read has `plain` [n] false and anything in its columns. Integers that `logarithms`
    has no entry for are left to the caller: their places in `dense` and their values stand in `large` and
    `large_values`; returns how many. Nothing past the end of a line is read: fields but the last have to end in a tab.
    """
    waiting = 0
    for row in range(starts.shape[0]):
        at, end = starts[row], ends[row]
        label = _uint8(text[at] - _uint8(_ZERO))
        good = label <= 1 and at < end and text[at + 1] == _TAB
        labels[row] = label
        at += 2
        for column in range(13):
            if not good:
                break
            negative = text[at] == _MINUS
            first = at + negative
            at = first
            value = np.int64(0)
            while True:
                digit = _uint8(text[at] - _uint8(_ZERO))
                if digit > 9:
                    break
                value = value * 10 + digit
                at += 1
            # -0 is not what 0 is, and a minus alone is nothing
            good = text[at] == _TAB and at - first <= _MAX_DIGITS and (value != 0 or not negative)
            at += 1
            if value >= 0 and value < logarithms.shape[0]:
                dense[row, column] = -logarithms[value] if negative else logarithms[value]
            else:
                large[waiting] = row * 13 + column
                large_values[waiting] = -value if negative else value
                waiting += 1
        for column in range(26):
            if not good:
                break
            first = at
            category = _uint32(0)
            while True:
                digit = digits[text[at]]
                if digit > 15:
                    break
                category = _uint32((category << _uint32(4)) | digit)
                at += 1
            good = at - first <= 8 and (text[at] == _TAB if column < 25 else at == end)
            if at == first:
                ids[column, row] = -1
            elif divisors[column]:
                ids[column, row] = category % divisors[column]
            else:
                ids[column, row] = category
            at += 1
        plain[row] = good
    return waiting
