"""From the JSON of a request to the tensors of a batch, and back to JSON. Nothing here knows of HTTP.

A request is `{"instances": [{"dense": [0.5, 3], "features": {"user": [3], "item": [7, 8]}}, ...]}`. A feature that an
instance leaves out has no ids for it; anything else that does not fit the model is refused, with its place and what
would be permitted. A weighted model takes `"weights": {"user": [0.5], ...}` as well, one for each id.

Letters: B instances of a batch, F features of the model, N ids of all of them.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardwise.inference import ModelFacts, Program
from shardwise.untrusted import repeated

MAX_INT64 = 2**63 - 1
MAX_FLOAT32 = torch.finfo(torch.float32).max
# of a request, unless a server says otherwise
MAX_IDS = 2**16
# characters of a value that an error repeats
_SHOWN = 80


@dataclass(frozen=True)
class Instance:
    """What one sample asks: dense columns, and per feature, in the order of the model, ids and their weights."""

    dense: Sequence[float]
    ids: Sequence[Sequence[int]]
    weights: Sequence[Sequence[float]]


class BadRequest(ValueError):
    """A request that the model cannot answer; the rest says where it is wrong and what would be right."""

    def __init__(
        self,
        code: str,
        message: str,
        *,
        instance: int | None = None,
        feature: str | None = None,
        value: object = None,
        permitted: str | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.places = {"instance": instance, "feature": feature, "value": _shown(value), "permitted": permitted}

    def as_json(self) -> dict[str, object]:
        """What a client is told; places that do not apply are left out."""
        places = {name: place for name, place in self.places.items() if place is not None}
        return {"code": self.code, "message": str(self), **places}


def read_body(body: bytes) -> object:
    """The JSON of a body; BadRequest for what is none. Of a key that is there twice, one would be lost: refused too.

    NaN and infinities come through, to be refused where they stand.
    """
    try:
        return json.loads(body.decode(), object_pairs_hook=_no_key_twice)
    except UnicodeDecodeError as error:
        raise BadRequest("invalid_json", f"the body is not UTF-8, from byte {error.start} on") from None
    except json.JSONDecodeError as error:
        raise BadRequest("invalid_json", f"the body is not JSON: {error}") from None
    except RecursionError:
        raise BadRequest("invalid_json", "the body is nested too deeply") from None
    except BadRequest:
        raise
    except ValueError as error:
        # an integer of thousands of digits
        raise BadRequest("invalid_json", f"the body is not JSON: {error}") from None


def read_instances(request: object, facts: ModelFacts, *, max_instances: int, max_ids: int = MAX_IDS) -> list[Instance]:
    """The instances of a request, which have at most `max_ids` ids together. Linear in its size.

    Raises:
        BadRequest: something does not fit the model `facts`; of several things, the first.
    """
    whole = _object(request, "the body", ["instances"], ["instances"])
    listed = whole["instances"]
    if not isinstance(listed, list) or not 1 <= len(listed) <= max_instances:
        value = f"{len(listed)} of them" if isinstance(listed, list) else listed
        permitted = f"a list of 1 to {max_instances}"
        raise BadRequest("bad_instances", f"instances must be {permitted}", value=value, permitted=permitted)
    # by name, in the order of the model
    names = dict.fromkeys(feature.name for feature in facts.features)
    made, ids = [], 0
    for number, instance in enumerate(listed):
        made.append(_instance(instance, number, facts, names))
        ids += sum(map(len, made[-1].ids))
        if ids > max_ids:
            permitted = f"at most {max_ids} ids in a request"
            raise BadRequest(
                "too_many_ids",
                f"instances 0 to {number} have {ids} ids: {permitted}",
                instance=number,
                permitted=permitted,
            )
    return made


def _instance(given: object, number: int, facts: ModelFacts, names: Mapping[str, None]) -> Instance:
    needed = ["features", *(["dense"] if facts.dense else []), *(["weights"] if facts.weighted else [])]
    parts = _object(given, f"instance {number}", needed, needed, instance=number)
    features = _object(parts["features"], f"features of instance {number}", names, [], instance=number)
    ids = [
        _ids(
            features.get(feature.name, []), feature.name, MAX_INT64 + 1 if feature.ids is None else feature.ids, number
        )
        for feature in facts.features
    ]
    weights: list[list[float]] = []
    if facts.weighted:
        given_weights = _object(parts["weights"], f"weights of instance {number}", names, [], instance=number)
        for name, of_feature in zip(names, ids, strict=True):
            floats = given_weights.get(name, [])
            weights.append(_floats(floats, f"weights of {name!r}", len(of_feature), number, name))
    dense = _floats(parts["dense"], "dense", len(facts.dense), number, None) if facts.dense else []
    return Instance(dense, ids, weights)


def _object(
    given: object, subject: str, known: Collection[str], needed: Sequence[str], *, instance: int | None = None
) -> dict[str, Any]:
    """`given` as a JSON object with keys among `known`, and all those `needed`."""

    def refused(code: str, why: str, **places: Any) -> BadRequest:
        return BadRequest(code, f"{subject}{why}", instance=instance, permitted=f"keys {', '.join(known)}", **places)

    if not isinstance(given, dict):
        raise refused("not_an_object", " must be an object", value=given)
    for key in given:
        if key not in known:
            kind = "unknown_feature" if subject.startswith(("features", "weights")) else "unknown_key"
            feature = key[:_SHOWN] if kind == "unknown_feature" else None
            raise refused(kind, f": unknown key {key[:_SHOWN]!r}", feature=feature)
    for key in needed:
        if key not in given:
            raise refused("missing_key", f": {key!r} is missing")
    return given


def _ids(given: object, feature: str, end: int, number: int) -> list[int]:
    """Ids in [0, end)."""
    subject = f"feature {feature!r} of instance {number}"
    if not isinstance(given, list):
        raise BadRequest(
            "not_a_list", f"{subject} must be a list of ids", instance=number, feature=feature, value=given
        )
    for id_ in given:
        # True is an int to Python
        if type(id_) is not int:
            code, why = "not_an_integer", "is not an integer"
        elif not 0 <= id_ < end:
            code, why = "id_out_of_range", f"is outside [0, {end})"
        else:
            continue
        raise BadRequest(
            code, f"{subject}: id {_written(id_)} {why}",
            instance=number, feature=feature, value=id_, permitted=f"integers in [0, {end})",
        )  # fmt: skip
    return given


def _floats(given: object, subject: str, count: int, number: int, feature: str | None) -> list[float]:
    subject = f"{subject} of instance {number}"
    if not isinstance(given, list) or len(given) != count:
        had = f"{len(given)} of them" if isinstance(given, list) else given
        permitted = f"a list of {count} numbers"
        raise BadRequest(
            "wrong_length" if isinstance(given, list) else "not_a_list", f"{subject} must be {permitted}",
            instance=number, feature=feature, value=had, permitted=permitted,
        )  # fmt: skip
    for place, value in enumerate(given):
        if type(value) not in (int, float) or not abs(value) <= MAX_FLOAT32:
            raise BadRequest(
                "not_a_number", f"{subject}, number {place}: {_written(value)} is not a finite float32",
                instance=number, feature=feature, value=value, permitted="finite numbers of float32",
            )  # fmt: skip
    return given


def _no_key_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        twice = repeated(key for key, _ in pairs)[0]
        raise BadRequest("repeated_key", f"the key {twice[:_SHOWN]!r} is there twice", permitted="each key once")
    return content


def _shown(value: object) -> object:
    """A value as an error repeats it: itself if it is a number or a short string, otherwise its JSON, cut off."""
    if value is None or isinstance(value, bool) or (isinstance(value, int | float) and abs(value) <= MAX_INT64):
        return value
    text = value if isinstance(value, str) else _begin_of_json(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _written(value: object) -> str:
    """The same in a sentence, as JSON spells it."""
    text = _begin_of_json(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _begin_of_json(value: object) -> str:
    """The JSON of a value, as far as it is shown: what is nested too deeply to be written can still be refused."""
    text = ""
    for part in json.JSONEncoder().iterencode(value):
        text += part
        if len(text) > _SHOWN:
            break
    return text


def answer(program: Program, instances: Sequence[Instance]) -> list[dict[str, Any]]:
    """The predictions of a batch, one for each instance: numbers, or lists of them, by the outputs' names."""
    facts = program.facts
    by_feature = [[instance.ids[number] for instance in instances] for number in range(len(facts.features))]
    values = torch.tensor([id_ for column in by_feature for bag in column for id_ in bag], dtype=torch.int64)  # [N]
    lengths = torch.tensor([[len(bag) for bag in column] for column in by_feature], dtype=torch.int64)  # [F, B]
    dense = torch.tensor([instance.dense for instance in instances], dtype=torch.float32) if facts.dense else None
    weights = None
    if facts.weighted:
        flat = [w for number in range(len(facts.features)) for instance in instances for w in instance.weights[number]]
        weights = torch.tensor(flat, dtype=torch.float32)
    outputs = program(values, lengths, dense=dense, weights=weights)
    columns = {name: _rows(output, len(instances)) for name, output in outputs.items()}
    return [{name: rows[number] for name, rows in columns.items()} for number in range(len(instances))]


def _rows(output: Tensor, batch: int) -> list[Any]:
    """One entry for each sample: a number where it has one."""
    return output.reshape(batch).tolist() if output.numel() == batch else output.tolist()


def check_outputs(facts: ModelFacts) -> None:
    """Refuse a model whose outputs cannot be told apart by sample.

    Raises:
        ValueError: names the output.
    """
    for output in facts.outputs:
        if not output.shape or output.shape[0] != "batch":
            raise ValueError(
                f"output {output.name!r} has shape {list(output.shape)}: what is served has a row for each sample, "
                "so its first size must be the batch"
            )
