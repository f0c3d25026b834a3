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
import torch.distributed as dist
from torch import nn

from shardwise._version import __version__

from ...planner.layout import Shard, fingerprint
from .consensus import all_or_error
from .exchange import Exchange
from .failures import agreed

T = TypeVar("T")
Facts = Mapping[str, str]

# what facts begin with of which a difference is warned of
MAY_DIFFER = "processor "
# differences that an error lists, and characters of a value
_MOST, _LONG = 4, 160
# how many agreements this process has seen; ranks take the largest, so that each has a number of its own
_agreements = 0


def device_types(group: dist.ProcessGroup | None) -> list[str]:
    """The devices whose tensors a group exchanges; those of any where there is none."""
    if group is None:
        return []
    return [part.partition(":")[0] for part in str(dist.get_backend_config(group)).split(",")]


def exchange_device(group: dist.ProcessGroup | None, device: torch.device) -> torch.device:
    """A device on which the ranks can tell each other that `device` will not do."""
    served = device_types(group)
    return torch.device(served[0]) if served and device.type not in served else device


def agree(exchange: Exchange, device: torch.device, make: Callable[[], tuple[T, Facts]]) -> tuple[T, int]:
    """What `make` returns, something and its facts, once it did so on all ranks with the same facts.

    A fingerprint of the facts comes back with the number of this agreement in it: two equal collections differ, so that
    ranks which call them in different orders find out.

    Ranks that differ in MAY_DIFFER alone go on, with a warning.

    Raises:
        As `all_or_error`, and RuntimeError where facts differ; on all ranks: none of them goes on to a collective that
            the others never join.
    """

    def made() -> tuple[tuple[T, Facts], list[int]]:
        value, facts = make()
        return (value, facts), [fingerprint((), facts.items()), _agreements]

    global _agreements
    device = exchange_device(exchange.group, device)
    (value, facts), numbers = all_or_error(exchange, device, made, count=2)
    shared = numbers[exchange.rank][0]
    if any(other != shared for other, _ in numbers):
        of_ranks = facts_of_all(exchange, device, facts)
        if len({fingerprint((), _shared(of_rank).items()) for of_rank in of_ranks}) > 1:
            raise agreed(RuntimeError(differences([_shared(of_rank) for of_rank in of_ranks])))
        warnings.warn(differences(of_ranks, "replicas may drift apart by last digits, as ranks differ"), stacklevel=2)
        shared = fingerprint((), _shared(facts).items())
    number = max(agreements for _, agreements in numbers)
    _agreements = number + 1
    return value, (shared + number) % 2**63


def facts_of_all(exchange: Exchange, device: torch.device, facts: Facts) -> list[Facts]:
    """The facts of each rank, by rank."""
    data = json.dumps(dict(facts)).encode()
    sizes = [size for (size,) in exchange.gather([len(data)], device)]
    text = torch.tensor(list(data), dtype=torch.uint8, device="cpu").to(device).repeat(exchange.world_size)
    received = exchange.numbers(text, [len(data)] * exchange.world_size, sizes).wait()
    return [json.loads(bytes(part.tolist())) for part in torch.split(received, sizes)]


def _shared(facts: Facts) -> Facts:
    """Facts without those that may differ."""
    return {name: text for name, text in facts.items() if not name.startswith(MAY_DIFFER)}


def differences(facts: Sequence[Facts], begin: str = "ranks differ in what all must share") -> str:
    """In what ranks differ: each fact that they do not share, and which value who has."""
    names = list(dict.fromkeys(name for of_rank in facts for name in of_rank))
    differ = [name for name in names if len({of_rank.get(name) for of_rank in facts}) > 1]
    # a module or table that only some ranks have says so by itself
    listed = [name for name in differ if all(name in of_rank for of_rank in facts)] or differ
    lines = []
    for name in listed[:_MOST]:
        by_value: dict[str, list[int]] = {}
        for rank, of_rank in enumerate(facts):
            by_value.setdefault(of_rank.get(name, "nothing"), []).append(rank)
        has = []
        for value, ranks in by_value.items():
            short = value if len(value) <= _LONG else f"{value[:_LONG]}..."
            has.append(f"rank {ranks[0]} has {short}" if len(ranks) == 1 else f"ranks {ranks} have {short}")
        lines.append(f"{name}: {', '.join(has)}")
    more = f"; and {len(listed) - _MOST} more" if len(listed) > _MOST else ""
    return f"{begin}: {'; '.join(lines)}{more}"


def facts_of(value: object, of: str) -> dict[str, str]:
    """The fields of a dataclass as facts `of` something; those of fields that are dataclasses too, by their paths."""
    facts: dict[str, str] = {}
    for field in fields(value) if is_dataclass(value) else ():
        setting = getattr(value, field.name)
        if is_dataclass(setting):
            below = facts_of(setting, of)
            facts |= {name.replace(" of ", f" of {field.name} of ", 1): text for name, text in below.items()}
        elif not callable(setting):
            facts[f"{field.name} of {of}"] = setting.name if isinstance(setting, Enum) else repr(setting)
    return facts


def facts_of_versions(device: torch.device) -> dict[str, str]:
    """What runs on this rank, and where."""
    facts = {"version of shardwise": __version__, "version of torch": str(torch.__version__), "device": device.type}
    if device.type == "cuda":
        with suppress(PackageNotFoundError):
            facts["version of triton"] = version("triton")
    return facts


def facts_of_shards(shards: Iterable[Shard]) -> dict[str, str]:
    """Where each table is."""
    places: dict[str, list[str]] = {}
    for shard in sorted(shards, key=lambda shard: (shard.table, shard.rank, shard.rows, shard.cols)):
        (top, bottom), (left, right) = shard.rows, shard.cols
        where = "a replica" if shard.replica else f"rows [{top}, {bottom}) of columns [{left}, {right})"
        places.setdefault(shard.table, []).append(f"{where} on rank {shard.rank}")
    return {f"place of table {table!r}": " + ".join(cuts) for table, cuts in places.items()}


def facts_of_dense(params: Iterable[tuple[str, nn.Parameter]]) -> dict[str, str]:
    """Shapes of dense layers, as far as they have any yet."""
    facts = {}
    for name, param in params:
        shape: Any = None if isinstance(param, nn.parameter.UninitializedParameter) else list(param.shape)
        facts[f"dense parameter {name!r}"] = f"{shape} {param.dtype}"
    return facts
