"""An S3 store on this machine: moto's server."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from vitkit.data import remote

BUCKET = "photos"
KEYS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": "us-east-1"}


@contextmanager
def store() -> Iterator[str]:
    """Start the server with an empty bucket and point AWS_ENDPOINT_URL to it; yield the bucket's address."""
    pytest.importorskip("pyarrow", reason="pyarrow is not installed: pip install 'vitkit[data]'")
    server = pytest.importorskip("moto.server", reason="moto is not installed: pip install 'vitkit[dev]'")
    boto3 = pytest.importorskip("boto3")
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    running = server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    running.start()
    try:
        host, port = running.get_host_and_port()
        with pytest.MonkeyPatch.context() as patch:
            for name, value in (KEYS | {"AWS_ENDPOINT_URL": f"http://{host}:{port}"}).items():
                patch.setenv(name, value)
            remote._connect.cache_clear()  # connections to an earlier server
            boto3.client("s3").create_bucket(Bucket=BUCKET)
            yield f"s3://{BUCKET}"
    finally:
        running.stop()


def upload(folder: Path, address: str) -> str:
    """Copy the files of a folder to an address; return the address."""
    for file in sorted(folder.rglob("*")):
        if file.is_file():
            remote.write(remote.join(address, file.relative_to(folder).as_posix()), file.read_bytes())
    return address
