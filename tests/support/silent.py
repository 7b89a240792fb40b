"""A network of its own, empty but for a name server that notes who asks: for programs that should talk to nobody.

Run as `unshare --map-root-user --net --mount python -m tests.support.silent CODE HOME`; prints what was seen as JSON.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

NETWORK = """\
link set lo up
link add outside type veth peer name nowhere
address add 10.0.0.1/24 dev outside
link set outside up
link set nowhere up
route add default via 10.0.0.2
"""
"""A way out that ends nowhere: without one, libraries do not even try."""


def main(code: str, home: str) -> None:
    """Run `code` in a process of its own; print its exit status, the names it looked up and the files it wrote."""
    subprocess.run(["ip", "-batch", "-"], input=NETWORK, text=True, check=True)
    resolver = Path(home) / "resolv.conf"
    resolver.write_text("nameserver 127.0.0.1\noptions attempts:1 timeout:1\n")
    subprocess.run(["mount", "--bind", str(resolver), "/etc/resolv.conf"], check=True)
    asked: list[str] = []
    server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    server.bind(("127.0.0.1", 53))

    def answer() -> None:
        while True:
            query, client = server.recvfrom(4096)
            asked.append(name_in(query))
            server.sendto(query[:2] + b"\x81\x83" + query[4:], client)  # there is no such name

    threading.Thread(target=answer, daemon=True).start()
    folder = Path(home) / "home"
    folder.mkdir()
    environment = {**os.environ, "HOME": str(folder), "XDG_CACHE_HOME": str(folder / "cache")}
    ended = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    written = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    print(json.dumps({"status": ended.returncode, "error": ended.stderr, "asked": asked, "written": written}))


def name_in(query: bytes) -> str:
    """The name that a query of DNS asks for."""
    labels, at = [], 12
    while query[at]:
        labels.append(query[at + 1 : at + 1 + query[at]].decode())
        at += 1 + query[at]
    return ".".join(labels)


if __name__ == "__main__":
    main(*sys.argv[1:])
