"""TorchRec's performance estimator, and the configs of hardware that it is made with by name."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from typing import ClassVar, TypeVar

from ..constants import DEFAULT_PERF_ESTIMATOR
from ..constraints import ParameterConstraints
from ..topology import Perf, Topology
from .annotations import decorated_names
from .evaluators import get_embedding_perf_sharding_evaluator
from .hardware import EmbeddingPerfEstimatorConfig, HardwarePerfConfig, PerfCoefficientConfig
from .shard_context import ShardPerfContext
from .sharding_option import SharderDataMap, ShardingOption
from .types import ShardEstimator

Config = TypeVar("Config", bound=type[HardwarePerfConfig])
# what only formulas of a config's own read
_FOR_OWN_FORMULAS = ("hbm_mem_bw", "ddr_mem_bw", "ssd_mem_bw", "intra_host_bw", "inter_host_bw")
# of its coefficients
_OF_TOPOLOGY = ("bwd_compute_multiplier", "weighted_feature_bwd_compute_multiplier")


class EmbeddingPerfEstimator(ShardEstimator):
    """Writes the milliseconds of every shard, as TorchRec estimates them.

    Args:
        topology: its bandwidths and multipliers count.
        constraints: by table name; `num_poolings`, `batch_sizes` and `is_weighted` are read.
        is_inference: there is no backward.
        config: what is otherwise on a machine; by default what `EmbeddingPerfEstimatorFactory` has as
            "default_estimator".
        use_batch_inputs_for_expected_cache_fetches: a cache misses a share of all ids, not of the different ones.
        use_linear_regression_prefetch_estimate: the config's `PrefetchCoefficients` say how long a prefetch takes.

    A config that sets a bandwidth or a multiplier which nothing reads gets a warning.
    """

    def __init__(
        self,
        topology: Topology,
        constraints: dict[str, ParameterConstraints] | None = None,
        is_inference: bool = False,
        config: HardwarePerfConfig | None = None,
        use_batch_inputs_for_expected_cache_fetches: bool = False,
        use_linear_regression_prefetch_estimate: bool = False,
    ) -> None:
        self._topology = topology
        self._constraints = constraints or {}
        self._is_inference = is_inference
        self._config = EmbeddingPerfEstimatorFactory.config(DEFAULT_PERF_ESTIMATOR) if config is None else config
        self._fetches_of_all_ids = use_batch_inputs_for_expected_cache_fetches
        self._prefetch_by_coefficients = use_linear_regression_prefetch_estimate
        unread = [
            name for name in _FOR_OWN_FORMULAS if getattr(self._config, name) != getattr(HardwarePerfConfig, name)
        ]
        coefficients = self._config.coefficients
        unread += [name for name in _OF_TOPOLOGY if getattr(coefficients, name) != getattr(PerfCoefficientConfig, name)]
        if unread and not decorated_names(self._config):
            warnings.warn(
                f"{type(self._config).__name__} sets {', '.join(unread)}, which only formulas of its own could read:"
                " the topology has those that estimates are made with, and device_bw the speed of a kernel",
                stacklevel=2,
            )

    @property
    def config(self) -> HardwarePerfConfig:
        """What is otherwise on the machine."""
        return self._config

    @property
    def is_inference(self) -> bool:
        """Is there no backward?"""
        return self._is_inference

    def estimate(self, sharding_options: list[ShardingOption], sharder_data_map: SharderDataMap) -> None:
        """Writes `perf` into the shards.

        Raises:
            ValueError: the device has no such kernel, numbers of features differ, or the config leaves a sharding type
                out.
        """
        for option in sharding_options:
            kind, sizes = option.sharding_type, [shard.size for shard in option.shards]
            self._config.validate_sharding_type(kind)
            contexts = ShardPerfContext.build_shard_perf_contexts(
                self._config,
                sizes,
                option,
                self._topology,
                self._constraints,
                sharder_data_map[option.module_type_key],
                is_inference=self._is_inference,
                use_batch_inputs_for_expected_cache_fetches=self._fetches_of_all_ids,
                use_linear_regression_prefetch_estimate=self._prefetch_by_coefficients,
            )
            if not contexts:
                continue
            option.is_weighted = contexts[0].is_weighted
            evaluator = get_embedding_perf_sharding_evaluator(kind, self._is_inference)
            # shards of one size cost the same
            of_size: dict[tuple[int, int], Perf] = {}
            perfs = []
            for context in contexts:
                size = context.hash_size, context.emb_dim
                if size not in of_size:
                    of_size[size] = evaluator.compute_perf(context, self._config)
                perfs.append(dataclasses.replace(of_size[size]))
            uneven = self._topology.uneven_sharding_perf_multiplier
            perfs = self._config.post_process_perfs(perfs, sizes, kind, uneven_sharding_perf_multiplier=uneven)
            for shard, perf in zip(option.shards, perfs, strict=True):
                shard.perf = perf


class EmbeddingPerfEstimatorFactory:
    """Estimators by the name of a machine, in this process.

    Example:
        >>> @EmbeddingPerfEstimatorFactory.register("card")
        ... @device_bw(2000 * 1024**3 / 1000)
        ... class Card(HardwarePerfConfig):
        ...     name = "card"
        >>> estimator = EmbeddingPerfEstimatorFactory.create("card", topology=topology)
    """

    _registered: ClassVar[dict[str, type[HardwarePerfConfig]]] = {DEFAULT_PERF_ESTIMATOR: EmbeddingPerfEstimatorConfig}

    @classmethod
    def register(cls, name: str) -> Callable[[Config], Config]:
        """A class decorator that gives a config a name, in any case; "default_estimator" makes it the default."""

        def decorate(config: Config) -> Config:
            cls._registered[name.lower()] = config
            return config

        return decorate

    @classmethod
    def config(cls, name: str) -> HardwarePerfConfig:
        """The config of a name.

        Raises:
            ValueError: there is none.
        """
        if not cls.is_registered(name):
            raise ValueError(f"hardware {name!r} is not registered; there is {', '.join(sorted(cls._registered))}")
        return cls._registered[name.lower()]()

    @classmethod
    def create(
        cls,
        hardware_name: str,
        is_inference: bool = False,
        topology: Topology | None = None,
        constraints: dict[str, ParameterConstraints] | None = None,
        use_batch_inputs_for_expected_cache_fetches: bool = False,
        use_linear_regression_prefetch_estimate: bool = False,
    ) -> EmbeddingPerfEstimator:
        """An estimator for a machine by its name; arguments as `EmbeddingPerfEstimator`.

        Raises:
            ValueError: there is no such name, or no topology.
        """
        return cls.create_with_config(
            cls.config(hardware_name), is_inference, topology, constraints,
            use_batch_inputs_for_expected_cache_fetches, use_linear_regression_prefetch_estimate,
        )  # fmt: skip

    @classmethod
    def create_with_config(
        cls,
        config: HardwarePerfConfig,
        is_inference: bool = False,
        topology: Topology | None = None,
        constraints: dict[str, ParameterConstraints] | None = None,
        use_batch_inputs_for_expected_cache_fetches: bool = False,
        use_linear_regression_prefetch_estimate: bool = False,
    ) -> EmbeddingPerfEstimator:
        """The same with a config.

        Raises:
            ValueError: there is no topology.
        """
        if topology is None:
            raise ValueError("topology is None: an estimator reads the bandwidths of a Topology")
        return EmbeddingPerfEstimator(
            topology, constraints, is_inference, config, use_batch_inputs_for_expected_cache_fetches,
            use_linear_regression_prefetch_estimate,
        )  # fmt: skip

    @classmethod
    def list_registered(cls) -> list[str]:
        """All names."""
        return list(cls._registered)

    @classmethod
    def is_registered(cls, name: str) -> bool:
        """Is there a config of this name?"""
        return name.lower() in cls._registered
