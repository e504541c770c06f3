"""An S3 server for the tests: moto's, in a process of its own on a free loopback port.

moto looks whether an object exists and then puts it, in separate steps and in as many threads as
there are connections, so two conditional creates may both succeed. S3 answers one of them with 412.
Here every request is therefore received whole first and then answered under one lock, which makes
each of them atomic, and one whose client died half way through is dropped, as S3 does.

The process ends when its standard input does, so it does not outlive a test run that was killed.
"""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HOST = "127.0.0.1"
BUCKET = "pairs"
_ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class S3Server:
    """A running server with one bucket; `location("a")` is "s3://pairs/<prefix>a".

    `environment` are the AWS_* variables that a process needs to use it.
    """

    endpoint: str
    bucket: str = BUCKET
    prefix: str = ""
    pid: int = field(default=0, compare=False)

    def location(self, prefix: str) -> str:
        return f"s3://{self.bucket}/{self.prefix}{prefix}"

    @property
    def environment(self) -> dict[str, str]:
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_REGION": "us-east-1",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
            "NO_PROXY": HOST,
            "no_proxy": HOST,
        }


@contextmanager
def s3_server() -> Iterator[S3Server]:
    """Starts a server with an empty bucket; it and what it holds are gone afterwards."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.storage.s3_server"],
        cwd=_ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    assert process.stdout is not None
    assert process.stdin is not None
    try:
        line = process.stdout.readline()
        if not line:
            raise RuntimeError(
                f"moto's server ended with code {process.wait()} before it listened; run "
                f"`{sys.executable} -m tests.storage.s3_server` to see why"
            )
        endpoint = f"http://{HOST}:{json.loads(line)}"
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(urllib.request.Request(f"{endpoint}/{BUCKET}", method="PUT")):
            pass
        yield S3Server(endpoint, pid=process.pid)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stdin.close()
        process.stdout.close()


def one_at_a_time(app: Callable[[dict[str, Any], Any], Any]) -> Callable[..., list[bytes]]:
    """`app` answering one whole request at a time."""
    lock = threading.Lock()

    def answer(environ: dict[str, Any], start_response: Any) -> list[bytes]:
        length = int(environ.get("CONTENT_LENGTH") or 0)
        body = environ["wsgi.input"].read(length) if length else b""
        if len(body) < length:
            start_response("400 Bad Request", [("Content-Length", "0")])
            return []
        environ["wsgi.input"] = io.BytesIO(body)
        with lock:
            response = app(environ, start_response)
            try:
                return list(response)
            finally:
                if hasattr(response, "close"):
                    response.close()

    return answer


def _serve() -> None:
    """Prints the port, then serves until the standard input ends."""
    from moto.moto_server.werkzeug_app import (
        DomainDispatcherApplication,
        MotoRequestHandler,
        create_backend_app,
    )
    from werkzeug.serving import make_server

    class Handler(MotoRequestHandler):
        protocol_version = "HTTP/1.1"  # keeps connections, which halves the time of a small request
        disable_nagle_algorithm = True  # the head and the body of a response are separate writes

        def log(self, type: str, message: str, *args: object) -> None:
            """Says nothing: a storm makes a hundred thousand requests."""

    application = DomainDispatcherApplication(create_backend_app)
    server = make_server(
        HOST, 0, one_at_a_time(application), threaded=True, request_handler=Handler
    )
    threading.Thread(target=server.serve_forever, daemon=True).start()
    sys.stdout.write(f"{json.dumps(server.server_port)}\n")
    sys.stdout.flush()
    sys.stdin.buffer.read()
    os._exit(0)  # connections of killed clients may still be open


if __name__ == "__main__":
    _serve()
