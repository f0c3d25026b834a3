"""Serve an exported model over HTTP: `python examples/serve/server.py --folder served`. Needs the extra `serve`.

    POST /predict    {"instances": [...]} -> {"predictions": [...]}; see instances.py for what an instance is
    GET /v1/model    what the model takes and gives, and the limits of this server
    GET /healthz     200 when it answers, 503 while it loads and once it goes down
    GET /metrics     for Prometheus

Every refusal is JSON, `{"error": {"code": ..., "message": ...}}`, with the instance, the feature, the value and what is
permitted where there are such. SIGTERM and SIGINT let it answer what it has taken, and end it.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import signal
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

import torch

from shardwise._version import how_to_install

try:
    import aiohttp
    import msgspec  # noqa: F401
    import prometheus_client  # noqa: F401
except ModuleNotFoundError as error:
    raise SystemExit(f"server.py: {error.name} is missing: {how_to_install('serve')}") from None
from aiohttp import web
from aiohttp.http import HttpProcessingError
from batches import Batcher, Limits, ModelFailed
from connections import ConnectionLimits, Connections
from errors import Handler, Refused, json_response, respond_to_errors
from instances import MAX_IDS, Instance, answer, check_outputs
from metrics import CONTENT_TYPE, Metrics
from reader import Reader

from shardwise.inference import Program, load_program

# a burst of new connections waits in the kernel until they are accepted
BACKLOG = 4096
SHUTDOWN_SECONDS = 60.0


class Server:
    """The application, its model and its numbers. `state` is "loading", "ready" or "draining"."""

    def __init__(
        self,
        folder: str,
        limits: Limits,
        *,
        max_instances: int,
        max_bytes: int,
        threads: int,
        max_ids: int = MAX_IDS,
        connection_limits: ConnectionLimits | None = None,
    ) -> None:
        if not 1 <= max_instances <= limits.max_batch:
            raise ValueError(f"max_instances must be in [1, max_batch = {limits.max_batch}], got {max_instances}")
        for name, value in (("max_bytes", max_bytes), ("max_ids", max_ids)):
            if value < 1:
                raise ValueError(f"{name} must be positive, got {value}")
        self.folder, self.limits, self.max_instances, self.max_bytes = folder, limits, max_instances, max_bytes
        self.max_ids = max_ids
        self.state = "loading"
        self.program: Program | None = None
        # torch reads its number of threads in the thread that computes
        self.worker = ThreadPoolExecutor(1, "model", initializer=torch.set_num_threads, initargs=(threads,))
        self.numbers = numbers = Metrics(
            {
                "serve_queue_instances": ("Instances that wait.", lambda: self.batcher.waiting),
                "serve_queue_most_instances": ("Most that ever waited.", lambda: self.batcher.most_waiting),
                "serve_connections": ("Open connections.", lambda: len(self.connections)),
                "serve_ready": ("1 when requests are answered.", lambda: self.state == "ready"),
            }
        )
        self.connections = Connections(
            connection_limits or ConnectionLimits(), lambda reason: numbers.closed.labels(reason).inc()
        )
        self.batcher: Batcher[Instance] = Batcher(self._predict, self.worker, limits, numbers.batch_sizes.observe)

    def application(self) -> web.Application:
        app = web.Application(middlewares=[self._counted, respond_to_errors], client_max_size=self.max_bytes)
        app.router.add_post("/predict", self.predict)
        app.router.add_get("/healthz", self.health)
        app.router.add_get("/metrics", self.metrics)
        app.router.add_get("/v1/model", self.model)
        return app

    def load(self) -> None:
        """Load the model and run it once, so that the first request need not wait for what is made at first use."""
        program = load_program(self.folder)
        check_outputs(program.facts)
        facts = program.facts
        instance = Instance([0.0] * len(facts.dense), [[] for _ in facts.features], [[] for _ in facts.features])
        for size in (1, min(2, self.limits.max_batch)):
            answer(program, [instance] * size)
        self.numbers.describe_model(
            {"tables": str(len(facts.tables)), **facts.versions}, sum(table.bytes for table in facts.tables)
        )
        self.reader = Reader(facts, max_instances=self.max_instances, max_ids=self.max_ids)
        self.program = program

    async def run(self) -> None:
        """Load in the worker while /healthz says so, then answer."""
        await asyncio.get_running_loop().run_in_executor(self.worker, self.load)
        self.batcher.start()
        self.state = "ready"

    async def drain(self) -> None:
        """Answer what waits."""
        await self.batcher.drain()
        self.worker.shutdown()

    def _predict(self, instances: list[Instance]) -> list[dict[str, Any]]:
        # what was taken before a signal is answered after it
        assert self.program is not None
        return answer(self.program, instances)

    def _loaded(self) -> Program:
        if self.program is None or self.state != "ready":
            raise Refused(503, self.state, f"the server is {self.state}")
        return self.program

    async def predict(self, request: web.Request) -> web.Response:
        self._loaded()
        if request.content_type != "application/json":
            raise Refused(415, "wrong_content_type", f"the body is {request.content_type}", "application/json")
        encoding = request.headers.get("Content-Encoding", "identity")
        if encoding.strip().lower() != "identity":
            # a few bytes of one can unpack to any number
            raise Refused(415, "wrong_content_encoding", f"the body is packed: {encoding[:80]}", "no Content-Encoding")
        seconds = self.connections.limits.body_seconds
        try:
            body = await asyncio.wait_for(request.read(), seconds)
        except asyncio.TimeoutError:
            raise Refused(408, "body_too_slow", "the body did not come in time", f"at most {seconds:g} s") from None
        except (ConnectionError, aiohttp.ClientPayloadError) as error:
            # nobody is there to be told, and nothing of ours to be mended
            raise Refused(400, "body_cut_off", f"the body did not come whole: {type(error).__name__}") from None
        predictions = await self.batcher.submit(self.reader.read(body))
        try:
            return json_response({"predictions": predictions})
        except ValueError:
            raise ModelFailed("an output is not finite") from None

    async def health(self, request: web.Request) -> web.Response:
        return json_response({"status": self.state}, status=200 if self.state == "ready" else 503)

    async def model(self, request: web.Request) -> web.Response:
        facts = self._loaded().facts
        features = [{"name": feature.name, "ids": [0, feature.ids], "missing": "no ids"} for feature in facts.features]
        limits = {
            **asdict(self.limits), "max_instances": self.max_instances, "max_bytes": self.max_bytes,
            "max_ids": self.max_ids, **asdict(self.connections.limits),
        }  # fmt: skip
        return json_response(
            {
                "features": features, "dense": facts.dense, "weighted": facts.weighted,
                "outputs": [asdict(output) for output in facts.outputs], "versions": facts.versions, "limits": limits,
            }
        )  # fmt: skip

    async def metrics(self, request: web.Request) -> web.Response:
        return web.Response(body=self.numbers.text(), headers={"Content-Type": CONTENT_TYPE})

    @web.middleware
    async def _counted(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        began = time.perf_counter()
        resource = request.match_info.route.resource
        path = "other" if resource is None else resource.canonical
        status = "disconnected"
        try:
            with self.connections.working(request.protocol):
                response = await handler(request)
            status = str(response.status)
            return response
        finally:
            self.numbers.requests.labels(path, status).inc()
            if path == "/predict":
                self.numbers.latency.observe(time.perf_counter() - began)


def parsed(argv: Sequence[str] | None = None) -> argparse.Namespace:
    default = Limits()
    parser = argparse.ArgumentParser(description="Serve an exported model over HTTP.")
    parser.add_argument("--folder", required=True, help="what `shardwise export` wrote")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000, help="0 takes a free one; the first line printed says which")
    parser.add_argument("--max-batch", type=int, default=default.max_batch, help="instances in a batch")
    parser.add_argument("--max-wait-ms", type=float, default=default.max_wait_ms, help="how long a request waits")
    parser.add_argument("--max-queue", type=int, default=default.max_queue, help="instances that may wait")
    parser.add_argument("--max-instances", type=int, default=64, help="instances of a request")
    parser.add_argument("--max-bytes", type=int, default=2**20, help="bytes of a request's body")
    parser.add_argument("--max-ids", type=int, default=MAX_IDS, help="ids of a request, all features together")
    connection = ConnectionLimits()
    parser.add_argument("--max-connections", type=int, default=connection.max_connections, help="open at a time")
    for name, purpose in (
        ("header", "for the line and the headers of a request, from its first byte"),
        ("body", "for the body of a request"),
        ("idle", "that a connection may do nothing, or take no answers"),
    ):
        seconds = getattr(connection, f"{name}_seconds")
        parser.add_argument(f"--{name}-seconds", type=float, default=seconds, help=f"time {purpose}")
    parser.add_argument("--threads", type=int, default=1, help="threads of the model")
    return parser.parse_args(argv)


async def listen(server: Server, host: str, port: int) -> tuple[web.AppRunner, asyncio.Server]:
    """Take connections: aiohttp's runner, for its `cleanup`, and what listens, to be closed before."""
    # a client that goes away takes its request out of the queue; bodies that are packed are refused, not unpacked
    runner = web.AppRunner(
        server.application(),
        access_log=None,
        handler_cancellation=True,
        shutdown_timeout=SHUTDOWN_SECONDS,
        auto_decompress=False,
        # what is left of a refused body is read for so long; before it would count as the head of a request
        lingering_time=server.connections.limits.header_seconds / 2,
        logger=_logger(),
    )
    await runner.setup()
    protocols = runner.server
    assert protocols is not None
    try:
        listening = await asyncio.get_running_loop().create_server(
            lambda: server.connections.new(protocols()), host, port, backlog=BACKLOG
        )
    except BaseException:
        await runner.cleanup()
        raise
    return runner, listening


def _logger() -> logging.Logger:
    """Of what aiohttp has to say, without a traceback for each request that is no HTTP: clients would fill the log."""
    logger = logging.getLogger("serve")

    def is_news(record: logging.LogRecord) -> bool:
        return record.exc_info is None or not isinstance(record.exc_info[1], HttpProcessingError)

    if not logger.filters:
        logger.addFilter(is_news)
    return logger


def settle() -> None:
    """Take what lives as long as the process out of the garbage collector's passes.

    A body of many lists makes it look through all modules of torch again and again: 1 MB stopped the event loop for
    more than a second.
    """
    gc.collect()
    gc.freeze()


async def serve(server: Server, host: str, port: int) -> None:
    """Serve until a signal ends it."""
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    runner, listening = await listen(server, host, port)
    try:
        bound = listening.sockets[0].getsockname()
        print(f"listening on http://{bound[0]}:{bound[1]}", flush=True)
        await server.run()
        settle()
        print("ready", flush=True)
        await stop.wait()
        server.state = "draining"
    finally:
        # requests that were taken are answered; new connections are not
        listening.close()
        await runner.cleanup()
        await server.drain()


def main(argv: Sequence[str] | None = None) -> int:
    args = parsed(argv)
    try:
        limits = Limits(args.max_batch, args.max_wait_ms, args.max_queue)
        connection_limits = ConnectionLimits(
            args.max_connections, args.header_seconds, args.body_seconds, args.idle_seconds
        )
        server = Server(
            args.folder,
            limits,
            max_instances=args.max_instances,
            max_bytes=args.max_bytes,
            threads=args.threads,
            max_ids=args.max_ids,
            connection_limits=connection_limits,
        )
        asyncio.run(serve(server, args.host, args.port))
    # OverflowError: a port that is none
    except (ValueError, OSError, OverflowError) as error:
        print(f"server: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
