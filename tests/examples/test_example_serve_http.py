"""The serving example over HTTP: in this process with a model that blocks or fails, and a real server under load."""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import threading
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from checkout import ROOT
from torch import Tensor

pytest.importorskip("aiohttp")

import aiohttp
from http_serving import EXAMPLE, GOOD, example
from test_example_serve import FACTS

from shardwise.inference import load_program

batches, load_test, server, small_model = map(example, ("batches", "load_test", "server", "small_model"))

FAILS, NOT_FINITE = 13, 14


class Model:
    """In the place of a program: adds the users of a sample up, once `go` is set."""

    facts = FACTS

    def __init__(self) -> None:
        self.go, self.calls = threading.Event(), 0
        self.go.set()

    def __call__(self, values: Tensor, lengths: Tensor, **_: Tensor) -> dict[str, Tensor]:
        self.calls += 1
        assert self.go.wait(30)
        users = values[: int(lengths[0].sum())]
        if FAILS in users:
            raise RuntimeError("the model is broken")
        sums = torch.stack([bag.sum() for bag in users.split(lengths[0].tolist())]).float()
        return {"logit": torch.where(sums == NOT_FINITE, torch.inf, sums)[:, None]}


Steps = Callable[[aiohttp.ClientSession, Any, Model], Awaitable[Any]]


def served(
    monkeypatch: pytest.MonkeyPatch,
    steps: Steps,
    *,
    ready: bool = True,
    options: Mapping[str, Any] = MappingProxyType({}),
    **limits: Any,
) -> Any:
    """What `steps(session, server, model)` returns, with a server on a free port of this process."""
    model = Model()
    monkeypatch.setattr(server, "load_program", lambda folder: model)

    async def run() -> Any:
        service = server.Server("", batches.Limits(**limits), max_instances=1, max_bytes=2**20, threads=1, **options)
        runner, listening = await server.listen(service, "127.0.0.1", 0)
        address = listening.sockets[0].getsockname()
        try:
            if ready:
                await service.run()
            async with aiohttp.ClientSession(f"http://127.0.0.1:{address[1]}") as session:
                return await asyncio.wait_for(steps(session, service, model), 60)
        finally:
            model.go.set()
            listening.close()
            await runner.cleanup()
            await service.drain()

    return asyncio.run(run())


def on_server(**given: Any) -> Callable[[Steps], Callable[[pytest.MonkeyPatch], None]]:
    """Makes a test of the steps of a client; `given` as in `served`."""

    def made(steps: Steps) -> Callable[[pytest.MonkeyPatch], None]:
        return lambda monkeypatch: served(monkeypatch, steps, **given)

    return made


async def ask(session: aiohttp.ClientSession, user: int = 3) -> tuple[int, Any]:
    """Status and JSON of a request about a user."""
    body = {"instances": [{**GOOD, "features": {"user": [user]}}]}
    async with session.post("/predict", json=body) as response:
        assert response.status != 503 or response.headers["Retry-After"] == "1"
        return response.status, await response.json()


async def waiting(service: Any, count: int) -> None:
    while service.batcher.waiting != count:
        await asyncio.sleep(0.001)


@on_server(ready=False)
async def test_before_the_model_is_loaded_nothing_is_answered_but_health(
    session: aiohttp.ClientSession, service: Any, model: Model
) -> None:
    async with session.get("/healthz") as response:
        assert (response.status, await response.json()) == (503, {"status": "loading"})
    status, answer = await ask(session)
    assert (status, answer["error"]["code"]) == (503, "loading")
    await service.run()
    async with session.get("/healthz") as response:
        assert (response.status, await response.json()) == (200, {"status": "ready"})
    # the warm-up came first
    assert model.calls == 2
    assert await ask(session) == (200, {"predictions": [{"logit": 3.0}]})


@on_server()
async def test_a_failing_model_is_a_500_and_the_server_stays_up(
    session: aiohttp.ClientSession, service: Any, model: Model
) -> None:
    for user, message in ((FAILS, "RuntimeError: the model is broken"), (NOT_FINITE, "an output is not finite")):
        assert await ask(session, user) == (500, {"error": {"code": "model_failed", "message": message}})
    assert await ask(session, 5) == (200, {"predictions": [{"logit": 5.0}]})


@on_server(max_batch=1, max_queue=2)
async def test_a_full_queue_is_a_503_until_it_has_room(
    session: aiohttp.ClientSession, service: Any, model: Model
) -> None:
    model.go.clear()
    first = asyncio.ensure_future(ask(session, 1))
    while model.calls < 3:
        await asyncio.sleep(0.001)
    taken = [asyncio.ensure_future(ask(session, user)) for user in (2, 3)]
    await waiting(service, 2)
    status, answer = await ask(session, 4)
    assert (status, answer["error"]["code"]) == (503, "queue_full")
    model.go.set()
    assert [await task for task in (first, *taken)] == [
        (200, {"predictions": [{"logit": float(user)}]}) for user in (1, 2, 3)
    ]
    assert (await ask(session, 4))[0] == 200


@on_server()
async def test_a_client_that_goes_away_takes_its_request_along(
    session: aiohttp.ClientSession, service: Any, model: Model
) -> None:
    model.go.clear()
    first = asyncio.ensure_future(ask(session, 1))
    while model.calls < 3:
        await asyncio.sleep(0.001)
    gone = asyncio.ensure_future(ask(session, 2))
    await waiting(service, 1)
    gone.cancel()
    await waiting(service, 0)
    model.go.set()
    assert (await first)[0] == 200
    # two of the warm-up and that of the first
    assert model.calls == 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small DLRM of random weights, exported."""
    place = tmp_path_factory.mktemp("serve") / "served"
    small_model.export(str(place))
    return place


@pytest.fixture(autouse=True)
def of_this_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.mark.full
def test_hundreds_of_requests_at_once_with_bad_ones_are_all_answered_right(folder: Path) -> None:
    args = argparse.Namespace(requests=300, bad=0.3, instances=3, max_instances=8, max_bytes=2**16, seed=1)
    made = load_test.requests(load_program(folder), args)
    bad = [request for request in made if isinstance(request, load_test.Bad)]
    assert {request.status for request in bad} == {400, 404, 405, 413, 415}
    with load_test.running(folder, "--max-instances=8", "--max-bytes=65536", "--max-batch=32") as (url, _):
        seen, _, metrics = asyncio.run(load_test.storm(url, made, len(made)))
        about = asyncio.run(_about(url))
    assert seen.wrong == [] and len(seen.seconds) == seen.most_open == 300
    assert seen.statuses[200] == 300 - len(bad)
    numbers = dict(line.rsplit(" ", 1) for line in metrics.splitlines() if line[0] != "#")
    assert float(numbers["serve_batch_instances_sum"]) == sum(
        len(request.predictions) for request in made if isinstance(request, load_test.Good)
    )
    # more requests than batches: they were answered together
    assert float(numbers["serve_batch_instances_count"]) < seen.statuses[200] / 2
    assert numbers['serve_requests_total{path="/predict",status="200"}'] == str(float(seen.statuses[200]))
    assert (numbers["serve_queue_instances"], numbers["serve_ready"]) == ("0.0", "1.0")
    assert about["dense"] == [*small_model.DENSE] and about["limits"]["max_batch"] == 32
    assert {feature["name"]: feature["ids"] for feature in about["features"]} == {
        name: [0, rows] for name, rows in small_model.ROWS.items()
    }


async def _about(url: str) -> Any:
    async with aiohttp.ClientSession(url) as session, session.get("/v1/model") as response:
        return await response.json()


@pytest.mark.full
def test_a_signal_lets_it_answer_what_it_has_taken(folder: Path) -> None:
    with load_test.running(folder, "--max-wait-ms=1500") as (url, process):

        async def steps() -> list[tuple[int, Any]]:
            async with aiohttp.ClientSession(url) as session:
                tasks = [asyncio.ensure_future(ask(session, user)) for user in range(5)]
                while True:
                    async with session.get("/metrics") as response:
                        if "serve_queue_instances 5.0\n" in await response.text():
                            break
                process.send_signal(signal.SIGTERM)
                return await asyncio.gather(*tasks)

        answers = asyncio.run(steps())
        assert [status for status, _ in answers] == [200] * 5
        assert process.wait(60) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--folder", "no such"], "server: "),
        (["--folder", ".", "--max-instances", "9", "--max-batch", "8"], "max_instances must be in [1, max_batch = 8]"),
    ],
)
def test_a_server_that_cannot_start_says_why(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert server.main([*arguments, "--port", "0"]) == 1
    assert message in capsys.readouterr().err


def test_a_model_is_asked_for_over_http_as_in_the_readme(folder: Path) -> None:
    lines = (EXAMPLE / "README.md").read_text().splitlines()
    body = next(line.partition("'")[2].rstrip("' \\") for line in lines if line.lstrip().startswith("-d '"))
    wanted = json.loads(next(line for line in lines if line.startswith('{"predictions"')))
    program = load_program(folder)
    read = example("instances")
    asked = read.read_instances(json.loads(body), program.facts, max_instances=4)
    assert len(read.answer(program, asked)) == len(wanted["predictions"])
    assert all(set(prediction) == {"logit"} for prediction in wanted["predictions"])
