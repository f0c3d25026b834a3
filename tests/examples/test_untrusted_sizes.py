"""Every check of what others wrote is linear in it: counted in comparisons of keys and lines of Python, not seconds."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("aiohttp")

from http_serving import example
from lines_run import lines_run
from test_example_serve import FACTS

from shardwise.checkpoint import LoadPolicy, Manifest, Stored, TableFacts, read_manifest
from shardwise.inference import Signature
from shardwise.planner.layout import Shard
from shardwise.sharding.checkpoint import compare
from shardwise.sharding.checkpoint.files import check_header, write_tensors
from shardwise.sharding.checkpoint.manifest import DENSE, TABLE, WEIGHT, FileFacts, to_bytes
from shardwise.untrusted import _no_key_twice, parse_json, repeated

instances = example("instances")


class Name(str):
    """Counts how often names are compared or hashed."""

    touched = 0

    def __eq__(self, other: object) -> bool:
        Name.touched += 1
        return str.__eq__(self, str(other))

    def __hash__(self) -> int:
        Name.touched += 1
        return str.__hash__(self)


def names(count: int) -> list[str]:
    """Distinct ones, and at the end the last once more."""
    return [Name(f"k{n}") for n in [*range(count - 1), count - 2]]


def rename(given: list[str]) -> None:
    """A policy that makes two tables of a checkpoint one."""
    saved: dict[str, str] = {Name(f"old {n}"): name for n, name in enumerate(given)}
    manifest: Any = SimpleNamespace(tables=dict.fromkeys(saved), by_address={})
    contents: Any = SimpleNamespace(tables=dict.fromkeys(given), dense={})
    compare._rename(manifest, contents, LoadPolicy(rename=saved))


CHECKS: dict[str, tuple[Callable[[list[str]], object], str]] = {
    "keys of a file": (lambda given: _no_key_twice([(key, 1) for key in given]), "is there twice"),
    "keys of a request": (lambda given: instances._no_key_twice([(key, 1) for key in given]), "is there twice"),
    "a signature": (lambda given: Signature(features=given), "features repeat"),
    "a renaming policy": (rename, "the checkpoint would have .* twice"),
}


@pytest.mark.parametrize("check", CHECKS)
def test_a_repeated_name_is_found_in_linear_time(check: str) -> None:
    """`names.count(name)` for each name: a request of 1 MB stopped the example server for 93 s."""
    touched = []
    for count in (200, 400, 800):
        given = names(count)
        Name.touched = 0
        with pytest.raises(ValueError, match=CHECKS[check][1]):
            CHECKS[check][0](given)
        touched.append(Name.touched)
    # a quadratic check takes four times as many for twice the names
    assert touched[2] < 2.5 * touched[1] < 2.5 * 2.5 * touched[0]
    assert touched[2] < 20 * 800


def test_repeated_names_come_once_each_in_their_order() -> None:
    assert repeated(["b", "a", "b", "c", "a", "b"]) == ["b", "a"]
    assert repeated([]) == repeated(iter("abc")) == []
    with pytest.raises(ValueError, match="key 'a' is there twice"):
        parse_json('{"x": [{"a": 1, "b": 2, "a": 3}]}')


def body(instance: str) -> str:
    return f'{{"instances": [{instance}]}}'


def features(members: str) -> str:
    return body(f'{{"dense": [1, 2, 3], "features": {{{members}}}}}')


# what a body of about `n` bytes is made of
BODIES: dict[str, Callable[[int], str]] = {
    "a key twice at the end": lambda n: body("{" + "".join(f'"k{i}":1,' for i in range(n // 9)) + '"k0":1}'),
    "one key": lambda n: body("{" + '"k":1,' * (n // 6) + '"k":1}'),
    "unknown keys": lambda n: features(",".join(f'"k{i}":[]' for i in range(n // 11))),
    "empty objects": lambda n: body(",".join("{}" for _ in range(n // 3))),
    "good instances": lambda n: body(",".join('{"dense":[1,2,3],"features":{"user":[1]}}' for _ in range(n // 42))),
    "ids": lambda n: features('"tag":[' + ",".join("1" for _ in range(n // 2)) + "]"),
    "ids of which the last is bad": lambda n: features('"tag":[' + "1," * (n // 2) + "-1]"),
    "lists of ids": lambda n: features('"tag":[' + ",".join("[]" for _ in range(n // 3)) + "]"),
    "a long key": lambda n: features(f'"{"k" * n}":[]'),
    "a long text": lambda n: features(f'"tag":["{"x" * n}"]'),
    "escapes": lambda n: features('"tag":["' + "\\u00e9" * (n // 6) + '"]'),
    "backslashes that do not end": lambda n: '{"' + '\\"' * (n // 2),
    "long numbers": lambda n: features('"tag":[' + ",".join("9" * 4000 for _ in range(n // 4001)) + "]"),
    "floats": lambda n: body('{"features":{},"dense":[' + ",".join("1e300" for _ in range(n // 6)) + "]}"),
    "open brackets": lambda n: "[" * n,
    "spaces": lambda n: " " * n + "{",
    "NaN": lambda n: body('{"features":{},"dense":[' + ",".join("NaN" for _ in range(n // 4)) + "]}"),
}


def read(text: str) -> object:
    """The instances of a request, or how it is refused."""
    try:
        return instances.read_instances(instances.read_body(text.encode()), FACTS, max_instances=10**6, max_ids=10**6)
    except instances.BadRequest as error:
        error_text = json.dumps(error.as_json(), allow_nan=False)
        assert len(error_text) < 1000
        return error_text


@pytest.mark.parametrize("kind", BODIES)
def test_reading_a_request_is_linear_in_its_bytes(kind: str) -> None:
    small, large = (BODIES[kind](size) for size in (2**12, 2**14))
    (_, few), (_, many) = (lines_run(lambda text=text: read(text)) for text in (small, large))  # type: ignore[misc]
    assert many < 5 * few + 500, f"{len(small)} bytes: {few} lines, {len(large)} bytes: {many} lines"
    # what Python's lines do not show ends within the time of a test run: it took a minute and a half
    read(BODIES[kind](2**20))


def manifest_of(count: int) -> Manifest:
    """A table in `count` pieces of a row, `count` dense parameters, and as many files."""
    shards = tuple(Shard("t", n, (n, n + 1), (0, 4)) for n in range(count))
    table = TableFacts("t", count, 4, torch.float32, "shard", None, {}, 0, shards)
    names = [f"rank-{n:05d}.safetensors" for n in range(count)]
    pieces = [Stored(TABLE, "t", WEIGHT, (1, 4), torch.float32, (n, n + 1), (0, 4), names[n]) for n in range(count)]
    dense = [Stored(DENSE, f"d{n}", WEIGHT, (1,), torch.float32, file=names[n]) for n in range(count)]
    files = tuple(FileFacts(name, 0, "0" * 64) for name in names)
    return Manifest(1, count, {}, {"k": list(range(count))}, {"t": table}, (*pieces, *dense), files)


def test_reading_a_manifest_is_linear_in_what_it_lists(tmp_path: Path) -> None:
    lines = []
    for count in (50, 200):
        (tmp_path / "manifest.json").write_bytes(to_bytes(manifest_of(count)))
        manifest, ran = lines_run(lambda: read_manifest(tmp_path))
        assert (manifest.world_size, len(manifest.tensors), len(manifest.by_file)) == (count, 2 * count, count)
        lines.append(ran)
    assert lines[1] < 5 * lines[0]


def test_reading_a_header_is_linear_in_its_tensors(tmp_path: Path) -> None:
    lines = []
    for count in (50, 200):
        tensors = [(Stored(DENSE, f"d{n}", WEIGHT, (2,), torch.float32), torch.ones(2)) for n in range(count)]
        facts = write_tensors(tmp_path / f"rank-{count:05d}.safetensors", tensors)
        _, ran = lines_run(lambda facts=facts, of=tensors: check_header(tmp_path, facts, [name for name, _ in of]))  # type: ignore[misc]
        lines.append(ran)
    assert lines[1] < 5 * lines[0]


PLACES: dict[str, Callable[[str], str]] = {
    "the body": lambda deep: deep,
    "instances": lambda deep: f'{{"instances": {deep}}}',
    "an instance": body,
    "features": lambda deep: body(f'{{"dense": [1, 2, 3], "features": {deep}}}'),
    "ids": lambda deep: features(f'"user": {deep}'),
    "an id": lambda deep: features(f'"user": [{deep}]'),
    "dense": lambda deep: body(f'{{"features": {{}}, "dense": {deep}}}'),
    "a number": lambda deep: body(f'{{"features": {{}}, "dense": [1, 2, {deep}]}}'),
    "an unknown key": lambda deep: body(f'{{"features": {{}}, "dense": [1, 2, 3], "more": {deep}}}'),
}


@pytest.mark.parametrize("place", PLACES)
def test_a_request_of_any_depth_is_refused_as_one(place: str) -> None:
    """Python read a body nested 973 to 976 deep and could not write it into the refusal: RecursionError, 500."""
    codes = set()
    # the depth that can be read and not be written depends on who calls
    for depth in [*range(2, 20), *range(850, 1010), 5000, 100_000]:
        for begin, end in (("[", "]"), ('{"a":', "}")):
            deep = begin * depth + "1" + end * depth
            with pytest.raises(instances.BadRequest) as caught:
                instances.read_instances(instances.read_body(PLACES[place](deep).encode()), FACTS, max_instances=4)
            codes.add(caught.value.as_json()["code"])
            assert len(json.dumps(caught.value.as_json())) < 1000
    assert "invalid_json" in codes and len(codes) > 1


def test_a_request_has_so_many_ids_and_no_more() -> None:
    instance = {"dense": [0, 0, 0], "features": {"tag": [1, 2]}}
    assert len(instances.read_instances({"instances": [instance, instance]}, FACTS, max_instances=4, max_ids=4)) == 2
    with pytest.raises(instances.BadRequest, match="instances 0 to 1 have 4 ids: at most 3 ids") as caught:
        instances.read_instances({"instances": [instance, instance]}, FACTS, max_instances=4, max_ids=3)
    assert (caught.value.code, caught.value.places["instance"]) == ("too_many_ids", 1)
