"""A real Triton Inference Server: the binary that PyPI's `nvidia-pytriton` carries, on free ports of this host.

It lies in a folder of its own, see `scripts/triton.txt`; of that package only the binaries are used.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
import uuid
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

from tests.support.held import FILE, Hold
from tests.support.paths import ROOT
from tests.support.ports import free_ports

INSTALLED = Path(sys.prefix) / "triton"
"""Where `scripts/triton.txt` is installed."""
BUNDLE = INSTALLED / "pytriton" / "tritonserver"

assert BUNDLE.is_dir(), f"pip install --no-deps --target {INSTALLED} -r scripts/triton.txt"
sys.path.append(str(INSTALLED))  # for tritonclient; everything else comes from where it always does


def make_backends(folder: Path) -> Path:
    """A backend directory whose Python backend is made for this minor version of Python."""
    python = folder / "python"
    python.mkdir(parents=True)
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    stub = BUNDLE / "python_backend_stubs" / version / "triton_python_backend_stub"
    for file in (*(BUNDLE / "backends" / "python").glob("*[yo]"), stub):
        if file.is_file():
            shutil.copy(file, python / file.name)
    return folder


def make_environment(folder: Path) -> Path:
    """A virtual environment that has this one's packages and this working copy, for Triton to run the model in."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    site = next(folder.glob("lib/python*/site-packages"))
    (site / "these.pth").write_text(
        "\n".join(
            [
                *(str(ROOT), str(INSTALLED), sysconfig.get_path("purelib"), sysconfig.get_path("platlib")),
                "import tests.support.held; tests.support.held.install()",
            ]
        )
    )
    return folder


class TritonServer:
    """One server in a process of its own.

    Attributes:
        http, grpc, metrics: its ports on 127.0.0.1.
    """

    def __init__(self, repository: Path, backends: Path, log: Path, hold: Hold, *models: str) -> None:
        self.http, self.grpc, self.metrics = free_ports(3)
        self._prefix = f"mtad{uuid.uuid4().hex[:8]}"
        self._log = log
        libraries = [INSTALLED / "nvidia_pytriton.libs", sysconfig.get_config_var("LIBDIR")]
        options = {
            "model-repository": repository,
            "backend-directory": backends,
            "model-control-mode": "explicit",
            "http-address": "127.0.0.1",
            "grpc-address": "127.0.0.1",
            "metrics-address": "127.0.0.1",
            "http-port": self.http,
            "grpc-port": self.grpc,
            "metrics-port": self.metrics,
            "allow-gpu-metrics": "false",
            "exit-timeout-secs": 120,
        }
        backend = {"shm-region-prefix-name": self._prefix, "shm-default-byte-size": 4 * 2**20}
        self.process = subprocess.Popen(
            [
                BUNDLE / "bin" / "tritonserver",
                "--disable-auto-complete-config",
                *(f"--{name}={value}" for name, value in options.items()),
                *(f"--backend-config=python,{name}={value}" for name, value in backend.items()),
                *(f"--load-model={model}" for model in models),
            ],
            env={**os.environ, FILE: hold.environment[FILE], "LD_LIBRARY_PATH": ":".join(map(str, libraries))},
            stdin=subprocess.DEVNULL,
            stdout=log.open("ab"),
            stderr=subprocess.STDOUT,
            start_new_session=True,  # a group of its own: its models' processes end with it
        )

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def wait(self, seconds: float = 1200) -> None:
        """Until it is ready and its metrics are served, which is later."""
        end = time.monotonic() + seconds
        while True:
            assert self.process.poll() is None, self.log[-4000:]
            assert time.monotonic() < end, self.log[-4000:]
            try:
                ready = self.call("GET", "/v2/health/ready")[0] == 200
                if ready and self.call("GET", "/metrics", port=self.metrics)[0] == 200:
                    return
            except OSError:
                pass
            time.sleep(0.05)

    def call(self, method: str, path: str, body: Any = None, port: int | None = None) -> tuple[int, Any]:
        """One HTTP request: status, and the body as JSON or text."""
        connection = HTTPConnection("127.0.0.1", port or self.http, timeout=120)
        try:
            connection.request(method, path, None if body is None else json.dumps(body))
            response = connection.getresponse()
            text = response.read().decode()
            kind = response.getheader("content-type", "")
            return response.status, json.loads(text) if "json" in kind and text else text
        finally:
            connection.close()

    def processes(self) -> list[int]:
        """The models' processes."""
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                if self._prefix.encode() in (entry / "cmdline").read_bytes() and int(entry.name) != self.process.pid:
                    found.append(int(entry.name))
            except OSError:
                continue
        return found

    def stop(self) -> int:
        """End it as an operator does; its exit status."""
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(150)
        finally:
            self.kill()

    def kill(self) -> None:
        """End it and whatever it left behind."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(60)
        for region in Path("/dev/shm").glob(f"{self._prefix}*"):
            region.unlink(missing_ok=True)
