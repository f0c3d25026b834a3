"""`canary`: named tables of a TorchRec model are looked up and trained by us, all else stays TorchRec's and FBGEMM's.

The seam is the forward of FBGEMM's modules of tables, which TorchRec's sharded collections hold: ours works in FBGEMM's
memory. So the plan, the exchanges, pipelines, optimizers, parameters and checkpoints are TorchRec's own objects, with
the canary as without it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch import nn

from shardwise._names import did_you_mean

from .fbgemm_tables import require_served
from .lookup import CanaryLookup
from .report import CanaryReport
from .shadow import ShadowLookup


class Options(NamedTuple):
    """How a canary runs: `tolerance` None is by dtype."""

    shadow: bool
    tolerance: float | None
    on_difference: str


class Canary:
    """Tables of a model that are ours, until `remove`.

    Example:
        >>> with canary(model, ["item"]) as trial:  # doctest: +SKIP
        ...     train(model)
        ...     print(trial.report())
    """

    def __init__(self, model: nn.Module, tables: Sequence[str], options: Options) -> None:
        self._tables, self._options = tables, options
        self._lookups: list[CanaryLookup] = []
        self._hook: Any = None
        self._removed = False
        if next(_sharded(model), None) is not None:
            self._attach(model)
            return
        _require_own_weights(_require_known(tables, _unsharded(model), model), model)
        # TorchRec's DMP puts sharded modules into this very module; a forward follows that
        self._hook = model.register_forward_pre_hook(lambda module, _: self._attach(module))

    def _attach(self, model: nn.Module) -> None:
        """Put ours into the sharded collections of a model; all of them, or none."""
        sharded = dict(_sharded(model))
        chosen = _require_known(self._tables, {path: _names_of(module) for path, module in sharded.items()}, model)
        _require_own_weights(chosen, model)
        lookups: list[CanaryLookup] = []
        for path, names in chosen.items():
            _require_fused(sharded[path], path, names)
            lookups += self._lookups_in(sharded[path], path, names)
        if self._hook is not None:
            self._hook.remove()
        for lookup in lookups:
            lookup.attach()
        self._lookups = lookups

    def _lookups_in(self, module: nn.Module, path: str, names: set[str]) -> Iterator[CanaryLookup]:
        """Those of a sharded collection, for whatever this rank holds of these tables."""
        kernels = [kernel for lookup in _lookups_of(module) for kernel in lookup._emb_modules]
        shadow, tolerance, on_difference = self._options
        for number, kernel in enumerate(kernels):
            held = [table.name for table in kernel._config.embedding_tables]
            numbers = [t for t, name in enumerate(held) if name in names]
            if not numbers:
                continue
            tables, where = kernel._emb_module, f"{path}#{number}" if len(kernels) > 1 else path
            require_served(tables, f"{where} (tables {', '.join(sorted(names & set(held)))})")
            if isinstance(getattr(tables.__dict__.get("forward"), "__self__", None), CanaryLookup):
                raise ValueError(f"{where}: there is a canary already: remove() it first")
            if shadow:
                yield ShadowLookup(where, tables, numbers, held, tolerance=tolerance, on_difference=on_difference)
            else:
                yield CanaryLookup(where, tables, numbers, held, copied=False)

    def report(self) -> CanaryReport:
        """Time and memory of both libraries on this rank and, of a shadow, the largest differences so far.

        Raises:
            RuntimeError: no forward came yet since `canary` was called before DMP.
        """
        if not self._lookups and self._hook is not None and not self._removed:
            raise RuntimeError("the canary comes into the model at its first forward after DMP: none came yet")
        shadows = [lookup for lookup in self._lookups if isinstance(lookup, ShadowLookup)]
        halves = [half for lookup in self._lookups for half in lookup.halves()]
        return CanaryReport(tuple(halves), tuple(shadow.worst() for shadow in shadows))

    def remove(self) -> None:
        """Give the tables back to FBGEMM, which goes on with the rows as they are. A second time nothing happens.

        Raises:
            RuntimeError: somebody else has replaced a forward since.
        """
        if self._removed:
            return
        if self._hook is not None:
            self._hook.remove()
        for lookup in self._lookups:
            lookup.detach()
        self._removed = True

    def __enter__(self) -> Canary:
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()


def canary(
    model: nn.Module,
    tables: Iterable[str],
    *,
    shadow: bool = False,
    tolerance: float | None = None,
    on_difference: str = "raise",
) -> Canary:
    """Have named tables of a TorchRec model looked up and trained by shardwise; all else stays as it is.

    Call it on all ranks after TorchRec's `DistributedModelParallel`, at any step, or before it: then it is in effect
    from the first forward on. Tables and optimizer states stay where FBGEMM has them, so that checkpoints, plans,
    pipelines and exchanges are TorchRec's own, and `remove` at any step, or a job without this line, goes on with them.
    TorchRec and FBGEMM are not replaced: no alias is installed and no op of theirs is registered.

    Args:
        model: the model, sharded or not.
        tables: names of tables, as configs have them. Where several collections have one of a name, put the path of
            the collection before it: "sparse.ebc.item".
        shadow: FBGEMM keeps answering; ours runs beside it on a copy of these tables, and every step is compared.
        tolerance: of a shadow, the largest difference of an output, row or state, relative to the largest number of
            it. Default: 1e-5 in fp32, 4e-3 in fp16, 3e-2 in bf16.
        on_difference: of a shadow, "raise" (on the rank that sees it) or "warn".

    Returns:
        The canary: `report()`, `remove()`, or use it as a context.

    Raises:
        ImportError: TorchRec is not imported.
        ValueError: a table is unknown, or of several collections, or shares its weight, or is not one that FBGEMM
            trains in its backward on the device where it lies (kernel "fused"); a setting of its optimizer is not
            served; an argument is not valid.
        CanaryDifference: later, from the forward or the backward of a step in which a shadow is off.

    Example:
        >>> model = DistributedModelParallel(model, device=device)  # doctest: +SKIP
        >>> trial = shardwise.canary(model, tables=["item"])  # doctest: +SKIP
        >>> print(trial.report())  # doctest: +SKIP
    """
    if "torchrec" not in sys.modules:
        raise ImportError("canary tries tables of a TorchRec model on shardwise, and torchrec is not imported here")
    if not isinstance(model, nn.Module):
        raise ValueError(f"model must be a module, got {type(model).__name__}")
    names = list(tables) if isinstance(tables, Iterable) and not isinstance(tables, str) else []
    if not names or not all(isinstance(name, str) for name in names) or len({*names}) != len(names):
        raise ValueError(f"tables must be a list of names, each once, got {tables!r}")
    if not isinstance(shadow, bool):
        raise ValueError(f"shadow must be True or False, got {shadow!r}")
    if on_difference not in ("raise", "warn"):
        raise ValueError(f"on_difference must be 'raise' or 'warn', got {on_difference!r}")
    if tolerance is not None and not (shadow and isinstance(tolerance, int | float) and tolerance >= 0):
        raise ValueError(
            f"tolerance is one number of a shadow, and not negative, got {tolerance!r} with shadow={shadow}"
        )
    return Canary(model, names, Options(shadow, tolerance, on_difference))


def _sharded(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Collections that TorchRec has sharded, by their paths without those of wrappers."""
    for path, module in model.named_modules():
        if hasattr(module, "module_sharding_plan") and hasattr(module, "_lookups"):
            yield _without_wrappers(path), module


def _unsharded(model: nn.Module) -> dict[str, set[str]]:
    """Names of tables of TorchRec's collections that are not sharded, by path."""
    configs: dict[str, set[str]] = {}
    for path, module in model.named_modules():
        for method in ("embedding_bag_configs", "embedding_configs"):
            if callable(getattr(module, method, None)) and type(module).__module__.partition(".")[0] != "shardwise":
                configs[path] = {config.name for config in getattr(module, method)()}
    if "" in configs:
        raise ValueError(
            "the model is a collection itself, which DMP replaces: call canary(model, ...) on the model that DMP gives"
        )
    return configs


def _without_wrappers(path: str) -> str:
    """The path in the model before DMP, which may have put DistributedDataParallel around it."""
    inner = path.removeprefix("_dmp_wrapped_module").removeprefix(".")
    return inner if inner == path else inner.removeprefix("module").removeprefix(".")


def _names_of(module: nn.Module) -> set[str]:
    plan: Any = module.module_sharding_plan
    return set(plan)


def _lookups_of(module: nn.Module) -> Iterator[Any]:
    """The lookups of a sharded collection, each kind of sharding one; those of replicated tables are wrapped."""
    of_module: Any = module._lookups
    for lookup in of_module:
        yield getattr(lookup, "module", lookup)


def _require_fused(module: nn.Module, path: str, names: set[str]) -> None:
    """Raise for tables that every rank has whole, and trains by the dense optimizer.

    Raises:
        ValueError: names the first.
    """
    plan: Any = module.module_sharding_plan
    for name in sorted(names):
        kernel = str(getattr(plan[name], "compute_kernel", "fused"))
        if plan[name].sharding_type == "data_parallel" or kernel != "fused":
            raise ValueError(
                f"table {name!r} of {path!r} is {plan[name].sharding_type} with the compute kernel {kernel!r}: a canary"
                " serves tables that FBGEMM trains in its backward (compute kernel 'fused')"
            )


def _require_own_weights(chosen: Mapping[str, set[str]], model: nn.Module) -> None:
    """Raise for tables whose weight is in another place of the model too, which would train by one library each.

    Raises:
        ValueError: names the first, and the other place.
    """
    holders: dict[int, list[str]] = {}
    for path, module in model.named_modules():
        for name, param in module._parameters.items():
            if param is not None:
                # two parameters may be one memory; what is on meta or empty has none
                holders.setdefault(param.data_ptr() or id(param), []).append(_without_wrappers(f"{path}.{name}"))
    shared = {place: places for places in holders.values() if len(places) > 1 for place in places}
    for path, names in chosen.items():
        for name in sorted(names):
            for children in ("embedding_bags", "embeddings"):
                place = f"{path}.{children}.{name}.weight"
                if place in shared:
                    other = next(other for other in shared[place] if other != place)
                    raise ValueError(
                        f"table {name!r} of {path!r} shares its weight with {other!r}: a canary serves tables with a"
                        " weight of their own (TorchRec's sharding gives each table one, and the planner plans one of"
                        " them alone)"
                    )


def _require_known(tables: Sequence[str], names: Mapping[str, set[str]], model: nn.Module) -> dict[str, set[str]]:
    """The collections of tables by path, and which of each.

    Raises:
        ValueError: a table is unknown, or in several.
    """
    chosen: dict[str, set[str]] = {}
    for table in tables:
        places = [(path, table) for path, known in names.items() if table in known]
        path, _, name = table.rpartition(".")
        if not places and name in names.get(path, ()):
            places = [(path, name)]
        if not places:
            known = sorted({name for of_path in names.values() for name in of_path})
            if not known:
                raise ValueError(f"{type(model).__name__} has no collection of TorchRec's, and so no table {table!r}")
            raise ValueError(f"no collection of TorchRec's has a table {table!r}{did_you_mean(table, known)}")
        if len(places) > 1:
            paths = " or ".join(f"{path}.{table}" for path, _ in places)
            raise ValueError(f"table {table!r} is in several collections: say {paths}")
        chosen.setdefault(places[0][0], set()).add(places[0][1])
    return chosen
