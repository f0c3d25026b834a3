"""Requests that the server must refuse, one kind after the other: for the load test, and as a list of what is checked.

Each is made from a good instance of the model, so that nothing else is wrong with it.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from shardwise.inference import ModelFacts

JSON = {"Content-Type": "application/json"}


@dataclass(frozen=True)
class Bad:
    """A request, and what its refusal must say: the status, and these entries of `error`."""

    body: bytes
    error: Mapping[str, object]
    status: int = 400
    method: str = "POST"
    path: str = "/predict"
    headers: Mapping[str, str] = field(default_factory=lambda: JSON)


def bad_requests(facts: ModelFacts, good: Mapping[str, Any], *, max_instances: int, max_bytes: int) -> dict[str, Bad]:
    """Every kind that the model `facts` can be asked, by name; `good` is an instance that it takes."""
    feature = facts.features[0]
    end = feature.ids or 2**63
    fine = json.dumps({"instances": [good]}).encode()
    at = {"instance": 1, "feature": feature.name}

    def second(change: Callable[[dict[str, Any]], object]) -> bytes:
        """The body of two instances, of which the second is changed."""
        changed = copy.deepcopy(dict(good))
        change(changed)
        return json.dumps({"instances": [good, changed]}).encode()

    def ids(value: object) -> bytes:
        return second(lambda given: given["features"].update({feature.name: value}))

    def refused(body: bytes, code: str, /, **error: object) -> Bad:
        return Bad(body, {"code": code, **error})

    permitted = f"integers in [0, {end})"
    kinds = {
        "id too large": refused(ids([0, end]), "id_out_of_range", **at, permitted=permitted),
        "id far too large": refused(ids([10**30]), "id_out_of_range", **at, permitted=permitted),
        "id negative": refused(ids([-1]), "id_out_of_range", **at, value=-1, permitted=permitted),
        "id a bool": refused(ids([True]), "not_an_integer", **at, value=True),
        "id a float": refused(ids([3.0]), "not_an_integer", **at, value=3.0),
        "id a string": refused(ids(["3"]), "not_an_integer", **at, value="3"),
        "id null": refused(ids([None]), "not_an_integer", **at),
        "id a list": refused(ids([[3]]), "not_an_integer", **at, value="[3]"),
        "ids no list": refused(ids(3), "not_a_list", **at, value=3),
        "unknown feature": refused(
            second(lambda given: given["features"].update({"no such": [1]})), "unknown_feature",
            instance=1, feature="no such",
        ),
        "features no object": refused(second(lambda given: given.update(features=[1])), "not_an_object", instance=1),
        "features missing": refused(second(lambda given: given.pop("features")), "missing_key", instance=1),
        "unknown key": refused(second(lambda given: given.update(context={})), "unknown_key", instance=1),
        "instance no object": refused(b'{"instances": [[1]]}', "not_an_object", instance=0),
        "no instances": refused(b'{"instances": []}', "bad_instances", permitted=f"a list of 1 to {max_instances}"),
        "too many instances": refused(
            json.dumps({"instances": [{}] * (max_instances + 1)}).encode(), "bad_instances",
            value=f"{max_instances + 1} of them",
        ),
        "instances no list": refused(b'{"instances": {"0": 1}}', "bad_instances"),
        "body no object": refused(b"[1, 2]", "not_an_object"),
        "key twice": refused(fine.replace(b'{"instances"', b'{"instances": [], "instances"'), "repeated_key"),
        "key twice among thousands": refused(
            f'{{{",".join(f"{json.dumps(str(n))}:0" for n in range(4000))},"3999":0}}'.encode(), "repeated_key"
        ),
        "cut off": refused(fine[:-3], "invalid_json"),
        "empty": refused(b"", "invalid_json"),
        "not UTF-8": refused(fine.replace(b"}", b"\xff}", 1), "invalid_json"),
        "nested deeply": refused(b'{"instances": ' + b"[" * 20_000 + b"]" * 20_000 + b"}", "invalid_json"),
        # Python reads about so many levels: what it reads and cannot write is refused too
        "nested as deeply as is read": Bad(b'{"instances": ' + b"[" * 974 + b"]" * 974 + b"}", {}),
        "a number of 5000 digits": refused(ids([0]).replace(b"[0]", b"[" + b"9" * 5000 + b"]"), "invalid_json"),
        "body too large": Bad(b" " * (max_bytes + 1), {"code": "body_too_large"}, status=413),
        "no JSON by its type": Bad(
            fine, {"code": "wrong_content_type"}, status=415, headers={"Content-Type": "text/plain"}
        ),
        "packed": Bad(
            fine, {"code": "wrong_content_encoding"}, status=415, headers={**JSON, "Content-Encoding": "gzip"}
        ),
        "wrong method": Bad(b"", {"code": "wrong_method", "permitted": "POST"}, status=405, method="PUT"),
        "wrong path": Bad(fine, {"code": "not_found"}, status=404, path="/predicts"),
    }  # fmt: skip
    if not facts.weighted:
        kinds["weights"] = refused(second(lambda given: given.update(weights={})), "unknown_key", instance=1)
    if facts.dense:
        dense, last = good["dense"], len(facts.dense) - 1
        for name, value in {"NaN": float("nan"), "infinite": 1e400, "beyond float32": 1e39, "a string": "1"}.items():
            body = second(lambda given, value=value: given.update(dense=[*dense[:-1], value]))
            kinds[f"dense {name}"] = refused(body, "not_a_number", instance=1)
        kinds["dense too short"] = refused(
            second(lambda given: given.update(dense=dense[:-1])), "wrong_length", instance=1, value=f"{last} of them"
        )
        kinds["dense missing"] = refused(second(lambda given: given.pop("dense")), "missing_key", instance=1)
        kinds["dense no list"] = refused(second(lambda given: given.update(dense=1.5)), "not_a_list", instance=1)
    return kinds
