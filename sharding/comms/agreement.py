"""What ranks must agree on before they share tables: facts by name, and in which of them ranks differ.

A fact is a name and a value, both text: "embedding_dim of table 'user'" is "16". Ranks compare fingerprints of all
facts; only where these differ do the facts themselves travel, so that the error can say which one, and its values.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, is_dataclass
from enum import Enum
from importlib.metadata import PackageNotFoundError, version
from typing import Any, TypeVar

import torch
from torch import nn

from shardwise._version import __version__

from ...planner.layout import Shard, fingerprint
from .exchange import Exchange
from .failures import agreed
from .header import Sizes, Wants, tell

T = TypeVar("T")
Facts = Mapping[str, str]

# what facts begin with of which a difference is warned of
MAY_DIFFER = "processor "
# differences that an error lists, and characters of a value
_MOST, _LONG = 4, 160
# how many agreements this process has seen; ranks take the largest, so that each has a number of its own
_agreements = 0


def agree(exchange: Exchange, device: torch.device, make: Callable[[], tuple[T, Facts]]) -> tuple[T, int]:
    """What `make` returns, something and its facts, once it did so on all ranks with the same facts.

    A fingerprint of the facts comes back with the number of this agreement in it: two equal collections differ, so that
    ranks which call them in different orders find out.

    Ranks that differ in MAY_DIFFER alone go on, with a warning.

    Raises:
        As `header.raise_failures`, and RuntimeError where facts differ; on all ranks: none of them goes on to a
            collective that the others never join.
    """
    made: tuple[T, Facts] | None = None
    failure: Exception | None = None
    try:
        made = make()
    except Exception as error:
        failure = error
    global _agreements
    mine = 0 if made is None else fingerprint((), made[1].items())
    told = [Sizes(_agreements, mine, 0, ())] * exchange.world_size
    heads = tell(exchange, device, failure or told, wants=Wants(), fingerprint=0, groups=0).hear()
    assert made is not None
    if any(head.sizes.ids != mine for head in heads):
        facts = facts_of_all(exchange, device, made[1])
        if len({fingerprint((), _shared(one).items()) for one in facts}) > 1:
            raise agreed(RuntimeError(differences([_shared(one) for one in facts])))
        warnings.warn(differences(facts, "replicas may drift apart by last digits, as ranks differ"), stacklevel=2)
        mine = fingerprint((), _shared(made[1]).items())
    number = max(head.sizes.batch for head in heads)
    _agreements = number + 1
    return made[0], (mine + number) % 2**63


def facts_of_all(exchange: Exchange, device: torch.device, mine: Facts) -> list[Facts]:
    """The facts of each rank, by rank."""
    data = json.dumps(dict(mine)).encode()
    sizes = [size for (size,) in exchange.gather([len(data)], device)]
    text = torch.tensor(list(data), dtype=torch.uint8, device="cpu").to(device).repeat(exchange.world_size)
    came = exchange.numbers(text, [len(data)] * exchange.world_size, sizes).wait()
    return [json.loads(bytes(part.tolist())) for part in torch.split(came, sizes)]


def _shared(facts: Facts) -> Facts:
    """Facts without those that may differ."""
    return {name: text for name, text in facts.items() if not name.startswith(MAY_DIFFER)}


def differences(facts: Sequence[Facts], begin: str = "ranks differ in what all must share") -> str:
    """In what ranks differ: each fact that they do not share, and which value who has."""
    names = list(dict.fromkeys(name for one in facts for name in one))
    differ = [name for name in names if len({one.get(name) for one in facts}) > 1]
    # a module or table that only some ranks have says so by itself
    told = [name for name in differ if all(name in one for one in facts)] or differ
    found = []
    for name in told[:_MOST]:
        by_value: dict[str, list[int]] = {}
        for rank, one in enumerate(facts):
            by_value.setdefault(one.get(name, "nothing"), []).append(rank)
        found.append(f"{name}: {', '.join(_has(ranks, value) for value, ranks in by_value.items())}")
    more = f"; and {len(told) - _MOST} more" if len(told) > _MOST else ""
    return f"{begin}: {'; '.join(found)}{more}"


def _has(ranks: Sequence[int], value: str) -> str:
    short = value if len(value) <= _LONG else f"{value[:_LONG]}..."
    return f"rank {ranks[0]} has {short}" if len(ranks) == 1 else f"ranks {list(ranks)} have {short}"


def facts_of(value: object, of: str) -> dict[str, str]:
    """The fields of a dataclass as facts `of` something; those of fields that are dataclasses too, by their paths."""
    found: dict[str, str] = {}
    for field in fields(value) if is_dataclass(value) else ():
        one = getattr(value, field.name)
        if is_dataclass(one):
            found |= {
                name.replace(" of ", f" of {field.name} of ", 1): text for name, text in facts_of(one, of).items()
            }
        elif not callable(one):
            found[f"{field.name} of {of}"] = one.name if isinstance(one, Enum) else repr(one)
    return found


def facts_of_versions(device: torch.device) -> dict[str, str]:
    """What runs on this rank, and where."""
    found = {"version of shardwise": __version__, "version of torch": str(torch.__version__), "device": device.type}
    if device.type == "cuda":
        with suppress(PackageNotFoundError):
            found["version of triton"] = version("triton")
    return found


def facts_of_shards(shards: Iterable[Shard]) -> dict[str, str]:
    """Where each table is."""
    found: dict[str, list[str]] = {}
    for one in sorted(shards, key=lambda shard: (shard.table, shard.rank, shard.rows, shard.cols)):
        (top, bottom), (left, right) = one.rows, one.cols
        where = "a replica" if one.replica else f"rows [{top}, {bottom}) of columns [{left}, {right})"
        found.setdefault(one.table, []).append(f"{where} on rank {one.rank}")
    return {f"place of table {table!r}": " + ".join(cuts) for table, cuts in found.items()}


def facts_of_dense(params: Iterable[tuple[str, nn.Parameter]]) -> dict[str, str]:
    """Shapes of dense layers, as far as they have any yet."""
    found = {}
    for name, param in params:
        shape: Any = None if isinstance(param, nn.parameter.UninitializedParameter) else list(param.shape)
        found[f"dense parameter {name!r}"] = f"{shape} {param.dtype}"
    return found
