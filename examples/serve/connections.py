"""Limits of connections: how many, and how long one may take; a client that sends half a request is not waited for.

aiohttp limits headers and bodies by their size, and has no time limit for them. A `Connection` stands before its
protocol: it passes everything on, and keeps the time. A connection is idle, or in the head of a request from its first
byte on, or has a request that a handler works on. Only the last is not timed here: the handler times the body itself.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ConnectionLimits:
    """Connections at a time, and seconds for a request's line and headers, for its body, and for doing nothing.

    A client that takes no answers does nothing.
    """

    max_connections: int = 1000
    header_seconds: float = 10.0
    body_seconds: float = 30.0
    idle_seconds: float = 75.0

    def __post_init__(self) -> None:
        if self.max_connections < 1:
            raise ValueError(f"max_connections must be positive, got {self.max_connections}")
        for name in ("header_seconds", "body_seconds", "idle_seconds"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ValueError(f"{name} must be a positive number of seconds, got {getattr(self, name)}")


class Connections:
    """Those that are open; `closed(reason)` is called for each that is closed here."""

    def __init__(self, limits: ConnectionLimits, closed: Callable[[str], None]) -> None:
        self.limits, self.closed = limits, closed
        # by the protocol of aiohttp that each stands before
        self._open: dict[asyncio.Protocol, Connection] = {}

    def __len__(self) -> int:
        return len(self._open)

    def new(self, protocol: asyncio.Protocol) -> Connection:
        """The protocol of a new connection, before that of aiohttp."""
        return Connection(protocol, self)

    def add(self, connection: Connection, protocol: asyncio.Protocol) -> bool:
        """Whether there is room for it."""
        if len(self._open) >= self.limits.max_connections:
            return False
        self._open[protocol] = connection
        return True

    def remove(self, protocol: asyncio.Protocol) -> None:
        self._open.pop(protocol, None)

    @contextmanager
    def working(self, protocol: Any) -> Iterator[None]:
        """While a handler works on a request of the connection, which may be gone."""
        connection = self._open.get(protocol)
        if connection is not None:
            connection.work()
        try:
            yield
        finally:
            if connection is not None:
                connection.rest()


class Connection(asyncio.Protocol):
    """One connection."""

    def __init__(self, protocol: asyncio.Protocol, connections: Connections) -> None:
        self._protocol, self._connections = protocol, connections
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        # "idle", "header" or "work"; "refused" where there was no room
        self._state = "idle"

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        if not self._connections.add(self, self._protocol):
            self._state = "refused"
            self._give_up("too_many_connections")
            return
        self._protocol.connection_made(transport)
        self.rest()

    def data_received(self, data: bytes) -> None:
        if self._state == "refused":
            return
        if self._state == "idle":
            # the bytes after the first do not lengthen its time
            self._enter("header", self._connections.limits.header_seconds)
        self._protocol.data_received(data)

    def eof_received(self) -> bool | None:
        return None if self._state == "refused" else self._protocol.eof_received()

    def pause_writing(self) -> None:
        self._protocol.pause_writing()

    def resume_writing(self) -> None:
        self._protocol.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop()
        if self._state != "refused":
            self._connections.remove(self._protocol)
            self._protocol.connection_lost(exc)

    def work(self) -> None:
        """A request is whole but for its body."""
        self._state = "work"
        self._stop()

    def rest(self) -> None:
        """Nothing is asked for, or an answer is being sent."""
        self._enter("idle", self._connections.limits.idle_seconds)

    def _enter(self, state: str, seconds: float) -> None:
        self._stop()
        self._state = state
        if self._transport is not None and not self._is_lost():
            self._timer = asyncio.get_running_loop().call_later(seconds, self._late)

    def _is_lost(self) -> bool:
        return self._protocol not in self._connections._open

    def _late(self) -> None:
        self._give_up("header_too_slow" if self._state == "header" else "idle")

    def _give_up(self, reason: str) -> None:
        assert self._transport is not None
        self._connections.closed(reason)
        if reason in _ANSWERS and not self._transport.get_write_buffer_size():
            self._transport.write(_ANSWERS[reason])
        if self._transport.get_write_buffer_size():
            # it takes no answers: nothing more is sent
            self._transport.abort()
        else:
            self._transport.close()

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _answer(status: str, code: str, message: str, more: str = "") -> bytes:
    body = json.dumps({"error": {"code": code, "message": message}})
    head = f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n{more}"
    return f"{head}Connection: close\r\n\r\n{body}".encode()


_ANSWERS = {
    "too_many_connections": _answer(
        "503 Service Unavailable", "too_many_connections", "the server has all the connections that it takes",
        "Retry-After: 1\r\n",
    ),
    "header_too_slow": _answer(
        "408 Request Timeout", "header_too_slow", "the request's line and headers did not come in time"
    ),
}  # fmt: skip
