"""What a program prints, without what gloo prints into it."""

from __future__ import annotations

import re


def without_gloo(printed: str) -> str:
    """Lines of a program and its ranks without gloo's (torch 2.9), which it writes in pieces that mix."""
    own = [line for line in printed.splitlines(keepends=True) if "connected peer ranks is" not in line]
    return re.sub(r"^(\[Gloo\] Rank )+", "", "".join(own), flags=re.MULTILINE)
