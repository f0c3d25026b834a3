"""The serving example without HTTP: which requests it refuses, how it batches the others, what it counts; its pages."""

from __future__ import annotations

import pytest

pytest.importorskip("aiohttp")

import asyncio
import json
import re
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from http_serving import EXAMPLE, GOOD, example

from shardwise.inference import ModelFacts, load_program
from shardwise.inference.folder import FeatureFacts, OutputFacts

instances, batches, metrics, bad_requests, small_model = map(
    example, ("instances", "batches", "metrics", "bad_requests", "small_model")
)

FACTS = ModelFacts(
    format_version=1,
    versions={},
    dense=("age", "hour", "price"),
    features=tuple(FeatureFacts(name, (), ids) for name, ids in (("user", 1000), ("item", 5000), ("tag", 50))),
    weighted=False,
    outputs=(OutputFacts("logit", "float32", ("batch", 1)),),
    tables=(),
    planes=(),
    files=(),
)
KINDS = bad_requests.bad_requests(FACTS, GOOD, max_instances=4, max_bytes=2**16)
ABOUT_JSON = [name for name, bad in KINDS.items() if bad.status == 400]


def read(*given: object, facts: ModelFacts = FACTS, max_instances: int = 4) -> list[Any]:
    parsed: list[Any] = instances.read_instances({"instances": [*given]}, facts, max_instances=max_instances)
    return parsed


def test_ids_come_in_the_order_of_the_model_and_a_feature_left_out_has_none() -> None:
    first, second = read(GOOD, {"dense": [0, 0, 1], "features": {"tag": [49, 0, 49]}})
    assert (first.ids, first.dense) == ([[3], [7, 8], []], [0.5, -1, 2.25])
    assert (second.ids, second.dense) == ([[], [], [49, 0, 49]], [0, 0, 1])


def test_a_weighted_model_takes_a_weight_for_each_id() -> None:
    facts = replace(FACTS, weighted=True, dense=())
    instance = {"features": {"user": [3], "tag": [1, 2]}, "weights": {"user": [0.5], "tag": [1, 2.5]}}
    (parsed,) = read(instance, facts=facts)
    assert (parsed.ids, parsed.weights) == ([[3], [], [1, 2]], [[0.5], [], [1, 2.5]])
    for weights, code in [
        ({"user": [0.5]}, "wrong_length"),
        ({"user": [0.5], "tag": [1, True]}, "not_a_number"),
        ({"user": [0.5], "tag": [1, 2], "age": []}, "unknown_feature"),
    ]:
        with pytest.raises(instances.BadRequest) as caught:
            read({**instance, "weights": weights}, facts=facts)
        assert caught.value.code == code
    with pytest.raises(instances.BadRequest, match="'weights' is missing"):
        read({"features": {}}, facts=facts)


@pytest.mark.parametrize("kind", ABOUT_JSON)
def test_what_does_not_fit_the_model_is_refused_with_its_place(kind: str) -> None:
    bad = KINDS[kind]
    with pytest.raises(instances.BadRequest) as caught:
        instances.read_instances(instances.read_body(bad.body), FACTS, max_instances=4)
    error_data = json.loads(json.dumps(caught.value.as_json(), allow_nan=False))
    assert {name: error_data.get(name) for name in bad.error} == bad.error
    assert len(json.dumps(error_data)) < 500


def test_ids_of_a_feature_without_a_table_are_int64() -> None:
    facts = replace(FACTS, features=(FeatureFacts("user", (), None),), dense=())
    assert read({"features": {"user": [2**63 - 1]}}, facts=facts)[0].ids == [[2**63 - 1]]
    with pytest.raises(instances.BadRequest, match="is outside"):
        read({"features": {"user": [2**63]}}, facts=facts)


def test_outputs_that_no_sample_owns_are_refused() -> None:
    instances.check_outputs(FACTS)
    with pytest.raises(ValueError, match=r"output 'rows' has shape \['ids', 8\]"):
        instances.check_outputs(replace(FACTS, outputs=(OutputFacts("rows", "float32", ("ids", 8)),)))


class Model:
    """Answers its instances, once `go` is set; remembers the batches."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.go = threading.Event()

    def __call__(self, given: list[int]) -> list[int]:
        self.batches.append(given)
        assert self.go.wait(30)
        if -1 in given:
            raise ZeroDivisionError("minus one")
        return [10 * number for number in given]


def batched(
    *, max_batch: int = 4, max_wait_ms: float = 1.0, max_queue: int = 8
) -> Callable[[Callable[[Any, Model], Any]], Callable[[], None]]:
    """Makes a test of what is written as steps with a batcher and its model, on a loop of its own."""

    def made(steps: Callable[[Any, Model], Any]) -> Callable[[], None]:
        async def run() -> None:
            model = Model()
            with ThreadPoolExecutor(1) as worker:
                batcher = batches.Batcher(model, worker, batches.Limits(max_batch, max_wait_ms, max_queue))
                batcher.start()
                try:
                    await asyncio.wait_for(steps(batcher, model), 30)
                finally:
                    model.go.set()
                    await batcher.drain()

        return lambda: asyncio.run(run())

    return made


async def submitted(batcher: Any, *requests: Sequence[int]) -> list[asyncio.Task[list[int]]]:
    """A task for each request, in the queue."""
    tasks = [asyncio.ensure_future(batcher.submit(request)) for request in requests]
    await asyncio.sleep(0)
    return tasks


async def begun(model: Model, count: int) -> None:
    """Wait until so many batches have begun."""
    while len(model.batches) < count:
        await asyncio.sleep(0.001)


@batched()
async def test_requests_that_wait_together_are_one_batch_and_stay_whole(batcher: Any, model: Model) -> None:
    tasks = await submitted(batcher, [1])
    await begun(model, 1)
    tasks += await submitted(batcher, [2, 3], [4], [5, 6], [7])
    model.go.set()
    assert await asyncio.gather(*tasks) == [[10], [20, 30], [40], [50, 60], [70]]
    # two more would not fit
    assert model.batches == [[1], [2, 3, 4], [5, 6, 7]]


@batched(max_wait_ms=3_600_000)
async def test_a_full_batch_does_not_wait(batcher: Any, model: Model) -> None:
    model.go.set()
    assert await asyncio.gather(*await submitted(batcher, [1, 2], [3, 4])) == [[10, 20], [30, 40]]
    assert model.batches == [[1, 2, 3, 4]]


@batched()
async def test_a_request_alone_runs_after_its_wait(batcher: Any, model: Model) -> None:
    model.go.set()
    assert await batcher.submit([1]) == [10]


@batched()
async def test_a_full_queue_refuses_and_takes_again_when_it_has_room(batcher: Any, model: Model) -> None:
    tasks = await submitted(batcher, [0])
    await begun(model, 1)
    tasks += await submitted(batcher, [1, 2, 3], [4, 5, 6], [7])
    with pytest.raises(batches.QueueFull, match="7 instances wait, of at most 8"):
        await batcher.submit([8, 9])
    tasks += await submitted(batcher, [8])
    model.go.set()
    await asyncio.gather(*tasks)
    assert batcher.waiting == 0 and batcher.most_waiting == 8
    assert await batcher.submit([9, 10]) == [90, 100]


@batched()
async def test_a_failing_batch_fails_alone(batcher: Any, model: Model) -> None:
    tasks = await submitted(batcher, [1], [-1])
    model.go.set()
    for failed in await asyncio.gather(*tasks, return_exceptions=True):
        assert isinstance(failed, batches.ModelFailed) and str(failed) == "ZeroDivisionError: minus one"
    assert await batcher.submit([2]) == [20]


@batched()
async def test_a_request_that_is_given_up_leaves_the_queue(batcher: Any, model: Model) -> None:
    first = await submitted(batcher, [0])
    await begun(model, 1)
    given_up, kept = await submitted(batcher, [1, 2], [3])
    given_up.cancel()
    first[0].cancel()
    await asyncio.sleep(0)
    assert batcher.waiting == 1
    model.go.set()
    assert await kept == [30] and model.batches == [[0], [3]]


@batched(max_wait_ms=3_600_000)
async def test_draining_answers_what_waits_and_takes_no_more(batcher: Any, model: Model) -> None:
    tasks = await submitted(batcher, [1], [2])
    drained = asyncio.ensure_future(batcher.drain())
    await begun(model, 1)
    with pytest.raises(batches.Closed):
        await batcher.submit([3])
    model.go.set()
    await drained
    assert [task.result() for task in tasks] == [[10], [20]] and model.batches == [[1, 2]]


@pytest.mark.parametrize("limits", [(0, 1, 1), (1, -1, 1), (1, float("nan"), 1), (1, 1, 0)])
def test_limits_that_make_no_sense_are_refused(limits: tuple[int, float, int]) -> None:
    with pytest.raises(ValueError, match="must"):
        batches.Limits(*limits)


def test_numbers_are_written_as_prometheus_reads_them() -> None:
    counts = metrics.Counts("requests", "All.", ("path", "status"))
    counts.add("/b", "200")
    counts.add('/a"', "400")
    counts.add("/b", "200")
    histogram = metrics.Histogram("seconds", "Each.", (0.5, 1.0))
    for number in (0.5, 0.75, 3):
        histogram.add(number)
    assert metrics.text([counts, histogram, metrics.Gauge("ready", "Is it?", lambda: 1, {"of": "x"})]) == (
        "# HELP requests All.\n# TYPE requests counter\n"
        'requests{path="/a\\"",status="400"} 1\nrequests{path="/b",status="200"} 2\n'
        "# HELP seconds Each.\n# TYPE seconds histogram\n"
        'seconds_bucket{le="0.5"} 1\nseconds_bucket{le="1.0"} 2\nseconds_bucket{le="+Inf"} 3\n'
        "seconds_sum 4.25\nseconds_count 3\n"
        "# HELP ready Is it?\n# TYPE ready gauge\n"
        'ready{of="x"} 1\n'
    )


def bodies(page: Path) -> list[str]:
    """What the `curl`s of a page send."""
    return re.findall(r"^curl localhost:8000/predict .*\\\n +-d '(.*)'$", page.read_text(), re.MULTILINE)


def asked(folder: Path, body: str) -> list[dict[str, Any]]:
    """The server's answer to a body, of the model in a folder."""
    program = load_program(folder)
    requested = instances.read_instances(instances.read_body(body.encode()), program.facts, max_instances=8)
    answers: list[dict[str, Any]] = instances.answer(program, requested)
    return answers


def test_the_request_of_the_example_fits_its_model_and_has_the_answer_that_is_printed(tmp_path: Path) -> None:
    small_model.export(str(tmp_path / "served"))
    (body,) = bodies(EXAMPLE / "README.md")
    answers = asked(tmp_path / "served", body)
    (printed,) = re.findall(r'^\{"predictions": .*$', (EXAMPLE / "README.md").read_text(), re.MULTILINE)
    wanted = json.loads(printed)["predictions"]
    assert [[*answer] for answer in answers] == [[*answer] for answer in wanted]
    for answer, other in zip(answers, wanted, strict=True):
        assert answer == pytest.approx(other, rel=1e-4)
