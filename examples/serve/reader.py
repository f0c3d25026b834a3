"""Bodies of requests, decoded and checked by msgspec in one pass: several times as fast as by Python.

What msgspec refuses, and what it would take though it should not, goes through `instances.py`, which says what is wrong
as a client is told it. So what is taken and what is refused is decided there, and msgspec saves time on what is right.
"""

from __future__ import annotations

import re
from contextlib import suppress
from typing import Annotated, Any

import msgspec
from instances import MAX_FLOAT32, MAX_INT64, Instance, read_body, read_instances

from shardwise.inference import ModelFacts

# characters that msgspec has in no name of a key
_NO_KEY = re.compile(r'["\\\x00-\x1f]')
_Number = Annotated[float, msgspec.Meta(ge=-MAX_FLOAT32, le=MAX_FLOAT32)]


class Reader:
    """Reads bodies for the model `facts`, with at most so many instances, and ids of all of them together."""

    def __init__(self, facts: ModelFacts, *, max_instances: int, max_ids: int) -> None:
        self._facts, self._max_instances, self._max_ids = facts, max_instances, max_ids
        self._places = [f"f{number}" for number in range(len(facts.features))]
        # names of the keys that every instance has
        self._keys = 1 + bool(facts.dense) + bool(facts.weighted)
        # of a model with other names every body goes through `instances.py`
        odd = any(_NO_KEY.search(feature.name) for feature in facts.features)
        self._decoder = None if odd else self._decoder_of(facts, max_instances)

    def _decoder_of(self, facts: ModelFacts, max_instances: int) -> msgspec.json.Decoder[Any]:
        ids = [Annotated[int, msgspec.Meta(ge=0, le=_last(feature.ids))] for feature in facts.features]
        fields: list[Any] = [("features", self._by_feature("Features", [list[each] for each in ids]))]
        if facts.dense:
            count = len(facts.dense)
            fields.append(("dense", Annotated[list[_Number], msgspec.Meta(min_length=count, max_length=count)]))
        if facts.weighted:
            fields.append(("weights", self._by_feature("Weights", [list[_Number] for _ in facts.features])))
        instance = msgspec.defstruct("Instance", fields, forbid_unknown_fields=True)
        listed = Annotated[list[instance], msgspec.Meta(min_length=1, max_length=max_instances)]  # type: ignore[valid-type]
        body = msgspec.defstruct("Body", [("instances", listed)], forbid_unknown_fields=True)
        decoder: msgspec.json.Decoder[Any] = msgspec.json.Decoder(body)
        return decoder

    def _by_feature(self, name: str, kinds: list[Any]) -> type[msgspec.Struct]:
        """An object with a key for each feature, any of which may be left out."""
        named = zip(self._places, kinds, self._facts.features, strict=True)
        fields = [
            (place, kind | msgspec.UnsetType, msgspec.field(name=feature.name, default=msgspec.UNSET))
            for place, kind, feature in named
        ]
        return msgspec.defstruct(name, fields, forbid_unknown_fields=True)

    def read(self, body: bytes) -> list[Instance]:
        """The instances of a body.

        Raises:
            BadRequest: something does not fit the model; of several things, the first.
        """
        taken = None
        if self._decoder is not None:
            with suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                taken = self._taken(self._decoder.decode(body).instances, body.count(b'"'))
        if taken is not None:
            return taken
        return read_instances(read_body(body), self._facts, max_instances=self._max_instances, max_ids=self._max_ids)

    def _taken(self, decoded: list[Any], quotes: int) -> list[Instance] | None:
        """The instances; None where something is wrong that msgspec does not look at.

        Of a key that is there twice it takes the last. A right body has no strings but its keys, so that more quotes
        than those of the keys it gave are of others.
        """
        made, keys, num_ids = [], 1, 0
        none: list[Any] = []
        for each in decoded:
            keys += self._keys
            by_feature, weights = [], []
            for place in self._places:
                ids = getattr(each.features, place)
                if ids is msgspec.UNSET:
                    ids = none
                else:
                    keys += 1
                    num_ids += len(ids)
                by_feature.append(ids)
                if self._facts.weighted:
                    of_feature = getattr(each.weights, place)
                    if of_feature is msgspec.UNSET:
                        of_feature = none
                    else:
                        keys += 1
                    if len(of_feature) != len(ids):
                        return None
                    weights.append(of_feature)
            made.append(Instance(each.dense if self._facts.dense else [], by_feature, weights))
        return made if quotes == 2 * keys and num_ids <= self._max_ids else None


def _last(ids: int | None) -> int:
    """The highest id of a feature with so many rows; any of int64 where ids are not rows."""
    return MAX_INT64 if ids is None else ids - 1
