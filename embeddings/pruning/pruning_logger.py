"""What a program is told when rows are pruned: `PruningLogger`, of which a subclass of yours keeps what it wants."""

from __future__ import annotations

import abc
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any


@dataclass
class PruningLogBase:
    """What a logger of yours may yield; attributes are set on it."""


class PruningLogger(abc.ABC):
    """A class whose `pruning_logger` is entered around each event, by "ITEP_MODULE_INIT" and "ITEP_EVICTION".

    What it yields gets the attributes `enable_pruning` and `pruning_interval` of the first, and of the second
    `table_to_pruned_ratio`: the part of its ids that lost their row, by table where some did.
    """

    @classmethod
    @abc.abstractmethod
    def pruning_logger(
        cls, event: str, trainer: str | None = None, publisher: str | None = None
    ) -> AbstractContextManager[Any]:
        """A context of one event, which yields what takes the attributes."""


class PruningLoggerDefault(PruningLogger):
    """Keeps nothing."""

    @classmethod
    @contextmanager
    def pruning_logger(
        cls, event: str, trainer: str | None = None, publisher: str | None = None
    ) -> Iterator[SimpleNamespace]:
        """A context of one event."""
        yield SimpleNamespace()
