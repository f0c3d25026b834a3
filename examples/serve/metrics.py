"""The server's numbers for Prometheus, by prometheus_client: docs/howto/monitor.md has each of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    Info,
    disable_created_metrics,
    generate_latest,
)

LATENCY_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
CONTENT_TYPE = CONTENT_TYPE_LATEST

# a second series for each counter and histogram, of when it began
disable_created_metrics()


class Metrics:
    """Of one server, in a registry of its own, so that a process can have several."""

    def __init__(self, gauges: dict[str, tuple[str, Callable[[], float]]]) -> None:
        """`gauges`: name -> what it says, and the number as it is at a scrape."""
        # Any: mypy and pyright read what prometheus_client says of keywords differently
        own: dict[str, Any] = {"registry": CollectorRegistry()}
        self._own = own
        self.requests = Counter("serve_requests", "Requests answered.", ("path", "status"), **own)
        self.latency = Histogram("serve_predict_seconds", "From request to answer.", buckets=LATENCY_SECONDS, **own)
        self.batch_sizes = Histogram("serve_batch_instances", "Instances in a batch.", buckets=BATCH_SIZES, **own)
        self.closed = Counter(
            "serve_connections_closed", "Connections that were closed by a limit.", ("reason",), **own
        )
        for name, (says, read) in gauges.items():
            Gauge(name, says, **own).set_function(read)

    def describe_model(self, about: dict[str, str], table_bytes: int) -> None:
        """What is served, from now on; once."""
        Info("serve_model", "The model that is served.", **self._own).info(about)
        Gauge("serve_model_table_bytes", "Bytes of its tables.", **self._own).set(table_bytes)

    def text(self) -> bytes:
        """All of them, as a scrape has it."""
        return generate_latest(self._own["registry"])
