"""Clients of the serving example that send half a request, too much of one, or take no answers: none holds it up."""

from __future__ import annotations

import asyncio
import gc
import gzip
import json
import signal
import socket
import zlib
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

pytest.importorskip("aiohttp")

import aiohttp
from http_serving import GOOD, example
from test_example_serve_http import Model, ask, on_server, served

connections, instances, server = map(example, ("connections", "instances", "server"))
Limits = example("batches").Limits

HEAD = b"POST /predict HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
# nothing that is waited for here takes so long
SECONDS = 60


def limits(**changed: Any) -> dict[str, Any]:
    """A server's options: all times are long but for those that are given."""
    times = {"header_seconds": 600.0, "body_seconds": 600.0, "idle_seconds": 600.0, **changed}
    return {"connection_limits": connections.ConnectionLimits(**times)}


def counted(counter: Any) -> dict[str, float]:
    """What a counter has by the value of its last label, of which nothing was counted left out."""
    by_label: dict[str, float] = {}
    for sample in next(iter(counter.collect())).samples:
        name = [*sample.labels.values()][-1]
        by_label[name] = by_label.get(name, 0) + sample.value
    return by_label


def closed(service: Any) -> dict[str, float]:
    """How many connections were closed, by reason."""
    return counted(service.numbers.closed)


async def opened(session: aiohttp.ClientSession) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection to the server of a session."""
    url = session._base_url
    assert url is not None
    return await asyncio.open_connection(url.host, url.port)


async def rest(reader: asyncio.StreamReader) -> bytes:
    """What the server sends until it closes the connection."""
    received = b""
    try:
        while block := await asyncio.wait_for(reader.read(2**16), SECONDS):
            received += block
    except ConnectionResetError:
        pass
    return received


async def until(true: Callable[[], bool]) -> None:
    async def wait() -> None:
        while not true():
            await asyncio.sleep(0.005)

    await asyncio.wait_for(wait(), SECONDS)


def error_of(answer: bytes) -> tuple[bytes, str]:
    """The status of an answer, and the code of its refusal."""
    head, _, body = answer.partition(b"\r\n\r\n")
    return head.split(b" ")[1], json.loads(body)["error"]["code"]


@on_server(options=limits(header_seconds=0.5))
async def test_half_a_head_is_not_waited_for(session: aiohttp.ClientSession, service: Any, model: Model) -> None:
    """600 connections with half of a request's headers stayed open. A byte now and then does not lengthen the time."""
    pairs = [await opened(session) for _ in range(40)]
    for number, (_, writer) in enumerate(pairs):
        writer.write(HEAD[: 1 + number])
    # one that sends its headers a byte at a time
    reader, writer = await opened(session)

    async def drip() -> None:
        for byte in b"GET /healthz HTTP/1.1\r\nX: " + b"y" * 8000:
            writer.write(bytes([byte]))
            await asyncio.sleep(0.02)

    dripping = asyncio.ensure_future(drip())
    answers = await asyncio.gather(*(rest(reader) for reader, _ in [*pairs, (reader, writer)]))
    dripping.cancel()
    assert {error_of(answer) for answer in answers} == {(b"408", "header_too_slow")}
    for _, gone in [*pairs, (reader, writer)]:
        gone.close()
    assert (await ask(session))[0] == 200
    async with session.get("/metrics") as response:
        assert 'serve_connections_closed_total{reason="header_too_slow"} 41.0\n' in await response.text()


@on_server(options=limits(idle_seconds=0.3))
async def test_a_connection_that_does_nothing_is_closed(
    session: aiohttp.ClientSession, service: Any, model: Model
) -> None:
    silent, _ = await opened(session)
    asked, writer = await opened(session)
    writer.write(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
    nothing, answer = await asyncio.gather(rest(silent), rest(asked))
    # kept alive after its answer, and then closed
    assert nothing == b"" and answer.startswith(b"HTTP/1.1 200") and b"ready" in answer
    assert closed(service)["idle"] == 2 and len(service.connections) == 0


@on_server(options=limits(body_seconds=0.3, header_seconds=1.0))
async def test_half_a_body_is_not_waited_for(session: aiohttp.ClientSession, service: Any, model: Model) -> None:
    bodies = {
        "a length that never comes": b"Content-Length: 100\r\n\r\n{",
        "no byte": b"Content-Length: 100\r\n\r\n",
        "a chunk that does not end": b"Transfer-Encoding: chunked\r\n\r\n5\r\n{",
        "no last chunk": b'Transfer-Encoding: chunked\r\n\r\n5\r\n{"a":\r\n',
    }
    pairs = [await opened(session) for _ in bodies]
    for (_, writer), body in zip(pairs, bodies.values(), strict=True):
        writer.write(HEAD + body)
    answers = await asyncio.gather(*(rest(reader) for reader, _ in pairs))
    assert [error_of(answer) for answer in answers] == [(b"408", "body_too_slow")] * len(bodies)
    await until(lambda: len(service.connections) == 0)
    assert (await ask(session))[0] == 200


@on_server(options=limits(header_seconds=1.0))
async def test_a_body_without_an_end_is_refused_by_its_size(
    session: aiohttp.ClientSession, service: Any, model: Model
) -> None:
    reader, writer = await opened(session)
    writer.write(HEAD + b"Transfer-Encoding: chunked\r\n\r\n")

    async def pour() -> None:
        while True:
            writer.write(b"1000\r\n" + b" " * 0x1000 + b"\r\n")
            await writer.drain()

    pouring = asyncio.ensure_future(pour())
    answer = await rest(reader)
    assert error_of(answer) == (b"413", "body_too_large")
    with pytest.raises(ConnectionError):
        await asyncio.wait_for(pouring, SECONDS)
    assert (await ask(session))[0] == 200


@pytest.mark.parametrize(("encoding", "pack"), [("gzip", gzip.compress), ("deflate", zlib.compress), ("br", bytes)])
def test_a_packed_body_is_refused_and_not_unpacked(
    encoding: str, pack: Callable[[bytes], bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def steps(session: aiohttp.ClientSession, service: Any, model: Model) -> None:
        headers = {"Content-Type": "application/json", "Content-Encoding": encoding}
        async with session.post("/predict", data=pack(b" " * 2**20)[: 2**18], headers=headers) as response:
            error = (await response.json())["error"]
            assert (response.status, error["code"], error["permitted"]) == (
                415, "wrong_content_encoding", "no Content-Encoding",
            )  # fmt: skip
        headers["Content-Encoding"] = "identity"
        body = json.dumps({"instances": [GOOD]})
        async with session.post("/predict", data=body, headers=headers) as response:
            assert response.status == 200

    served(monkeypatch, steps)


@on_server(options=limits(max_connections=3))
async def test_more_connections_than_there_may_be_are_told_so(
    session: aiohttp.ClientSession, service: Any, model: Model
) -> None:
    pairs = [await opened(session) for _ in range(3)]
    await until(lambda: len(service.connections) == 3)
    for _ in range(5):
        reader, _ = await opened(session)
        answer = await rest(reader)
        assert error_of(answer) == (b"503", "too_many_connections") and b"Retry-After: 1\r\n" in answer
    assert len(service.connections) == 3 and closed(service)["too_many_connections"] == 5
    pairs[0][1].close()
    await until(lambda: len(service.connections) == 2)
    assert (await ask(session))[0] == 200


@on_server(options=limits(idle_seconds=0.5))
async def test_a_client_that_takes_no_answers_is_let_go(
    session: aiohttp.ClientSession, service: Any, model: Model
) -> None:
    """Requests one after the other whose answers nobody reads: what waits to be sent is bounded, and then dropped."""
    url = session._base_url
    assert url is not None and url.host is not None and url.port is not None
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.setblocking(False)
        await asyncio.get_running_loop().sock_connect(client, (url.host, url.port))

        async def ask_on() -> None:
            while True:
                await asyncio.get_running_loop().sock_sendall(client, b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n" * 50)

        asking = asyncio.ensure_future(ask_on())
        await until(lambda: len(service.connections) == 1)
        await until(lambda: len(service.connections) == 0)
        asking.cancel()
        # before its socket is closed, whose number the next one gets
        await asyncio.wait([asking])
    assert closed(service)["idle"] == 1
    assert (await ask(session))[0] == 200


@on_server(options=limits(header_seconds=1.0, idle_seconds=1.0, body_seconds=1.0))
async def test_a_request_that_waits_for_the_model_is_not_timed(
    session: aiohttp.ClientSession, service: Any, model: Model
) -> None:
    # a request on a connection of its own, so that no kept one is just being closed
    headers = {"Connection": "close"}
    model.go.clear()
    asked = asyncio.ensure_future(session.post("/predict", json={"instances": [GOOD]}, headers=headers))
    await until(lambda: model.calls == 3)
    # longer than anything else may take
    await asyncio.sleep(1.2)
    model.go.set()
    async with await asked as response:
        assert response.status == 200
    assert not closed(service)


@on_server(options=limits(header_seconds=2.0, idle_seconds=2.0))
async def test_requests_on_one_connection_begin_its_times_anew(
    session: aiohttp.ClientSession, service: Any, model: Model
) -> None:
    reader, writer = await opened(session)
    whole = b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"
    # longer than a limit altogether, each in two parts and one more with it
    for _ in range(5):
        writer.write(whole[:9])
        await asyncio.sleep(0.45)
        writer.write(whole[9:] + whole)
        for _ in range(2):
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), SECONDS)
            assert head.startswith(b"HTTP/1.1 200")
            await reader.readexactly(int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0]))
    writer.close()
    assert not closed(service)


@on_server()
async def test_a_request_of_a_mebibyte_of_repeated_keys_is_a_400_like_any_other(
    session: aiohttp.ClientSession, service: Any, model: Model
) -> None:
    """It stopped the server for 93 s: 69 thousand keys, the last of them once more, each counted in a list of all."""
    pairs = ",".join(f'"key {n}":0' for n in range(70_000))
    body = f'{{{pairs},"key 69999":0}}'[: 2**20]
    headers = {"Content-Type": "application/json"}
    async with session.post("/predict", data=body, headers=headers) as response:
        assert (response.status, (await response.json())["error"]["code"]) == (400, "repeated_key")
    async with session.get("/healthz") as response:
        assert response.status == 200


@on_server()
async def test_a_body_of_any_depth_is_a_400(session: aiohttp.ClientSession, service: Any, model: Model) -> None:
    """973 to 976 deep it was a 500: RecursionError."""
    codes = set()
    for depth in [*range(900, 1000), 20_000]:
        body = b'{"instances": ' + b"[" * depth + b"]" * depth + b"}"
        async with session.post("/predict", data=body, headers={"Content-Type": "application/json"}) as response:
            codes.add((response.status, (await response.json())["error"]["code"]))
    assert codes == {(400, "not_an_object"), (400, "invalid_json")}


def test_what_is_no_http_is_refused_and_not_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """aiohttp logs a traceback for each: whoever can connect could fill the disk."""
    garbage = [
        b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\n",
        b"GET /" + b"x" * 9000 + b" HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 200 + b"\r\n",
        HEAD + b"Content-Length: -1\r\n\r\n",
        HEAD + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + b"F" * 40 + b"\r\n",
    ]

    async def steps(session: aiohttp.ClientSession, service: Any, model: Model) -> None:
        for sent in garbage:
            reader, writer = await opened(session)
            writer.write(sent)
            # the beginning of an HTTP/2 connection is one of a head that never ends
            assert (await rest(reader))[9:12] in (b"400", b"408"), sent[:80]
            writer.close()
        assert (await ask(session))[0] == 200

    served(monkeypatch, steps, options=limits(header_seconds=1.0, body_seconds=1.0))
    assert not [record for record in caplog.records if record.name == "serve" or record.exc_info]


def test_a_client_that_goes_away_in_its_body_is_no_fault_of_ours(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each was counted as a 500, and named in the log as ours to mend."""
    bodies = [
        b"Content-Length: 100\r\n\r\n{",
        b"Content-Length: 100\r\n\r\n",
        b"Transfer-Encoding: chunked\r\n\r\n5\r\n{",
        b"Transfer-Encoding: chunked\r\n\r\n",
    ]

    def answered(service: Any, count: int) -> bool:
        return sum(counted(service.numbers.requests).values()) == count

    async def steps(session: aiohttp.ClientSession, service: Any, model: Model) -> None:
        reading = 0
        read = server.web.Request.read

        async def reads_counted(self: Any) -> bytes:
            nonlocal reading
            reading += 1
            return bytes(await read(self))

        def reads(count: int) -> bool:
            return reading == count

        monkeypatch.setattr(server.web.Request, "read", reads_counted)
        for number, body in enumerate(bodies):
            _, writer = await opened(session)
            writer.write(HEAD + body)
            await until(partial(reads, number + 1))
            writer.close()
            await until(lambda: len(service.connections) == 0)
            await until(partial(answered, service, number + 1))
        assert {*counted(service.numbers.requests)} <= {"400", "disconnected"}
        assert (await ask(session))[0] == 200

    served(monkeypatch, steps)
    assert "server:" not in capsys.readouterr().err


def test_bodies_of_many_lists_do_not_have_the_whole_process_looked_through() -> None:
    """1 MB of empty lists made the garbage collector pass over all modules, each time, on the event loop."""
    passed: list[int] = []

    def looked(phase: str, info: dict[str, int]) -> None:
        if phase == "start" and info["generation"] == 2:
            # what a pass over the oldest looks through
            passed.append(len(gc.get_objects(generation=2)))

    before = len(gc.get_objects())
    server.settle()
    gc.callbacks.append(looked)
    try:
        assert gc.get_freeze_count() > 0.9 * before > 50_000
        parsed = instances.read_body(b'{"instances": [' + b",".join([b"[]"] * 300_000) + b"]}")
    finally:
        gc.callbacks.remove(looked)
        gc.unfreeze()
    assert isinstance(parsed, dict) and len(parsed["instances"]) == 300_000
    # the lists themselves, and nothing that was there before
    assert all(count < 310_000 for count in passed)


def test_a_server_settles_once_its_model_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    monkeypatch.setattr(server, "settle", lambda: done.append(service.state))
    monkeypatch.setattr(server, "load_program", lambda folder: Model())
    service: Any = server.Server("", Limits(), max_instances=1, max_bytes=2**20, threads=1)

    async def run() -> None:
        serving = asyncio.ensure_future(server.serve(service, "127.0.0.1", 0))
        await until(lambda: bool(done))
        signal.raise_signal(signal.SIGTERM)
        await serving

    asyncio.run(run())
    assert done == ["ready"]


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--max-connections=0", "max_connections must be positive"),
        ("--header-seconds=0", "header_seconds must be a positive number of seconds"),
        ("--body-seconds=nan", "body_seconds must be"),
        ("--idle-seconds=inf", "idle_seconds must be"),
        ("--max-ids=0", "max_ids must be positive"),
        ("--max-bytes=0", "max_bytes must be positive"),
    ],
)
def test_limits_that_make_no_sense_are_refused(argument: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert server.main(["--folder", ".", "--port", "0", argument]) == 1
    assert message in capsys.readouterr().err


@on_server(options={**limits(max_connections=7), "max_ids": 5})
async def test_a_server_says_its_limits(session: aiohttp.ClientSession, service: Any, model: Model) -> None:
    async with session.get("/v1/model") as response:
        reported = (await response.json())["limits"]
    assert (reported["max_connections"], reported["header_seconds"], reported["max_ids"]) == (7, 600.0, 5)
