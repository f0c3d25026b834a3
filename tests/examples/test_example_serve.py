"""The serving example without HTTP: which requests it refuses, how it batches the others, what it counts; its pages."""

from __future__ import annotations

import pytest

pytest.importorskip("aiohttp")
pytest.importorskip("msgspec")
pytest.importorskip("prometheus_client")

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
from checkout import ROOT
from http_serving import EXAMPLE, GOOD, example
from hypothesis import given, settings, strategies
from prometheus_client.parser import text_string_to_metric_families

from shardwise.inference import ModelFacts, load_program
from shardwise.inference.folder import FeatureFacts, OutputFacts

instances, batches, metrics, bad_requests, small_model, reader, server_module = map(
    example, ("instances", "batches", "metrics", "bad_requests", "small_model", "reader", "server")
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


def outcome(read: Callable[[], list[Any]]) -> Any:
    """The instances, or what a client is told."""
    try:
        # an integer beyond 2**53 is the nearest double by way of msgspec, and becomes it in a tensor in any case
        return [([*map(float, each.dense)], each.ids, each.weights) for each in read()]
    except instances.BadRequest as error:
        return error.as_json()


def both(body: bytes, facts: ModelFacts, max_ids: int = 9) -> tuple[Any, Any]:
    """What is made of a body by way of msgspec, and without it."""
    quick = reader.Reader(facts, max_instances=4, max_ids=max_ids)
    limits = {"max_instances": 4, "max_ids": max_ids}
    return outcome(lambda: quick.read(body)), outcome(
        lambda: instances.read_instances(instances.read_body(body), facts, **limits)
    )


SCRAPS = [
    *(b'"', b"'", b"{", b"}", b"[", b"]", b",", b":", b"0", b"-", b".", b"e2", b"1e400", b"1e39", b"NaN", b"null"),
    *(b"true", b" ", b"\\", b"\\u0075", b"\xff", b"\x00", b'"user":[1],', b'"features":{},', b"999", b"1.0", b"[3,3],"),
]


@pytest.mark.parametrize("weighted", [False, True])
@settings(max_examples=300, deadline=None)
@given(data=strategies.data())
def test_msgspec_takes_and_refuses_what_the_checks_in_python_do(weighted: bool, data: Any) -> None:
    """Right bodies, and bodies with scraps of JSON put in, cut out or doubled: same instances, same refusals."""
    facts = replace(FACTS, weighted=weighted, dense=FACTS.dense[: data.draw(strategies.integers(0, 3))])
    draw: Callable[..., Any] = data.draw
    given_instances = []
    for _ in range(draw(strategies.integers(1, 4))):
        named = draw(strategies.lists(strategies.sampled_from(facts.features), unique=True))
        features = {each.name: draw(strategies.lists(strategies.integers(0, 49), max_size=3)) for each in named}
        one: dict[str, Any] = {"dense": [0.5, -1, 2**60][: len(facts.dense)]} if facts.dense else {}
        one["features"] = features
        if weighted:
            one["weights"] = {name: [0.25] * len(ids) for name, ids in features.items()}
        given_instances.append(one)
    body = json.dumps({"instances": given_instances}).encode()
    for _ in range(draw(strategies.integers(0, 3))):
        begin = draw(strategies.integers(0, len(body)))
        end = min(len(body), begin + draw(strategies.sampled_from((0, 0, 1, 4, 20))))
        body = body[:begin] + draw(strategies.sampled_from([*SCRAPS, body[begin:end] * 2])) + body[end:]
    quick, plain = both(body, facts)
    assert quick == plain


@pytest.mark.parametrize("kind", ABOUT_JSON)
def test_every_bad_request_is_refused_in_the_same_words_by_way_of_msgspec(kind: str) -> None:
    quick, plain = both(KINDS[kind].body, FACTS)
    assert quick == plain and "code" in plain


def test_right_bodies_are_read_by_msgspec_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "read_instances", None)
    quick = reader.Reader(FACTS, max_instances=4, max_ids=9)
    body = json.dumps({"instances": [GOOD, {"features": {}, "dense": [1, 2, 3]}]}).encode()
    assert [each.ids for each in quick.read(body)] == [[[3], [7, 8], []], [[], [], []]]


def test_names_that_msgspec_has_no_keys_of_are_read_too() -> None:
    """A quote, a backslash or a control character in the name of a feature: the server did not start."""
    features = tuple(FeatureFacts(name, (), 9) for name in ('"a"', "b\\", "c\n", "d"))
    facts = replace(FACTS, features=features, dense=())
    named = {feature.name: [number] for number, feature in enumerate(features)}
    quick, plain = both(json.dumps({"instances": [{"features": named}]}).encode(), facts)
    assert quick == plain == [([], [[0], [1], [2], [3]], [])]
    quick, plain = both(json.dumps({"instances": [{"features": {'"a"': [9]}}]}).encode(), facts)
    assert quick == plain and quick["code"] == "id_out_of_range"


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
    numbers = metrics.Metrics({"serve_ready": ("Is it?", lambda: True)})
    for path, status in (("/b", "200"), ('/a"', "400"), ("/b", "200")):
        numbers.requests.labels(path, status).inc()
    for seconds in (0.5, 0.75, 300):
        numbers.latency.observe(seconds)
    numbers.describe_model({"torch": "2"}, 12)
    parsed = {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(numbers.text().decode())
        for sample in family.samples
    }
    assert parsed["serve_requests_total", ("path", "/b"), ("status", "200")] == 2
    assert parsed["serve_requests_total", ("path", '/a"'), ("status", "400")] == 1
    buckets = [parsed["serve_predict_seconds_bucket", ("le", le)] for le in ("0.25", "0.5", "1.0", "30.0", "+Inf")]
    assert buckets == [0, 1, 2, 2, 3] and parsed["serve_predict_seconds_sum",] == 301.25
    assert parsed["serve_ready",] == 1 and parsed["serve_model_table_bytes",] == 12
    assert parsed["serve_model_info", ("torch", "2")] == 1
    # a series of when each began would double them
    assert not [name for name, *_ in parsed if name.endswith("_created")]


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


def test_the_page_on_monitoring_has_every_metric_and_asks_for_no_other() -> None:
    numbers = server_module.Server(".", batches.Limits(), max_instances=4, max_bytes=100, threads=1).numbers
    numbers.describe_model({"tables": "1"}, 1)
    families = {family.name: family.type for family in text_string_to_metric_families(numbers.text().decode())}
    # the parser names counters and infos without what their samples end in
    exposed = {f"{name}_total" if kind == "counter" else name: kind for name, kind in families.items()}
    page = (ROOT / "docs/howto/monitor.md").read_text()
    rows = dict(re.findall(r"^\| `(serve_\w+)` \| (\w+)", page, re.MULTILINE))
    assert rows == exposed
    asked = {re.sub(r"_(bucket|sum|count)$", "", name) for name in re.findall(r"\b(serve_\w+)\b", page)}
    assert asked == {*exposed}
