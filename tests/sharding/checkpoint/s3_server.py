"""An S3 server in this process, for tests: moto's. Other processes reach it by its address."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import fsspec
from fsspec.config import conf
from optional import need

BUCKET = "bucket"


@contextmanager
def s3_server() -> Iterator[str]:
    """The address of a server that has one bucket; this process uses it for s3:// meanwhile."""
    need("s3fs")
    server = need("moto.server").ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    # a line for each request
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server.start()
    try:
        host, port = server.get_host_and_port()
        use_s3(f"http://{host}:{port}")
        fsspec.filesystem("s3").mkdir(BUCKET)
        yield f"http://{host}:{port}"
    finally:
        conf.pop("s3", None)
        server.stop()


def use_s3(address: str) -> None:
    """Have s3:// mean that server in this process, with credentials that it takes."""
    conf["s3"] = {
        "endpoint_url": address, "key": "key", "secret": "secret",
    }  # fmt: skip
