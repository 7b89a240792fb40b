"""Existing clients against `mtad serve`, each in an environment of its own, and whether each got what it must.

    python -m scripts.clients                        all of them
    python -m scripts.clients openai langchain       only these

The environments are made in build/clients from `requirements/` (exact versions, without what those ask for beyond them,
so that none brings a CUDA build of torch). Each client runs its program of `checks/`, which prints a line of JSON for
each thing it checked. Writes docs/results/clients.json, or the part of these clients; the exit code is 1 if anything
failed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from runtime.commands.entry import Parser, command
from scripts.clients.served import MODEL, served
from scripts.machine import machine
from scripts.paths import DEMO, RESULTS, ROOT

HERE = Path(__file__).parent
BUILD = ROOT / "build" / "clients"
PACKAGES = {
    "openai": "openai",
    "langchain": "langchain-openai",
    "llamaindex": "llama-index-llms-openai-like",
    "aiperf": "aiperf",
    "guidellm": "guidellm",
    "lm-eval": "lm_eval",
}
"""What each environment is made for."""
SECONDS = 600
"""For one client's checks."""


def environment(name: str) -> Path:
    """The interpreter of a client's environment, which is made anew where its requirements have changed."""
    folder, requirements = BUILD / name, (HERE / "requirements" / f"{name}.txt")
    stamp, python = folder / "installed.txt", folder / "bin" / "python"
    if not stamp.exists() or stamp.read_text() != requirements.read_text():
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
        subprocess.run([*install, "-r", str(requirements)], check=True)
        stamp.write_text(requirements.read_text())
    return python


def version(name: str) -> str:
    """The client's, as its requirements pin it."""
    text = (HERE / "requirements" / f"{name}.txt").read_text()
    return next(line.partition("==")[2] for line in text.splitlines() if line.startswith(f"{PACKAGES[name]}=="))


def run(name: str, url: str, tokenizer: Path) -> dict[str, Any]:
    """One client's checks."""
    work = BUILD / "work" / name
    work.mkdir(parents=True, exist_ok=True)
    if name == "lm-eval":
        from scripts.clients.likelihoods import write_task

        write_task(DEMO / "pair" / "target", work)
    module = f"scripts.clients.checks.check_{name.replace('-', '_')}"
    clean = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "OPENAI_API_KEY")}
    own = {"HF_HOME": str(work / "hf"), "HF_HUB_OFFLINE": "1", "TIKTOKEN_CACHE_DIR": str(work)}
    with (work / "log.txt").open("w") as log:
        ended = subprocess.run(
            [str(environment(name)), "-m", module, url, MODEL, str(tokenizer), str(work)],
            cwd=ROOT,
            env={**clean, **own},
            check=False,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            timeout=SECONDS,
        )
    checks = [json.loads(line) for line in ended.stdout.splitlines() if line.startswith("{")]
    passed = bool(checks) and ended.returncode == 0 and all(one["passed"] for one in checks)
    return {"client": PACKAGES[name], "version": version(name), "passed": passed, "checks": checks}


@command
def main() -> None:
    parser = Parser(prog="scripts.clients", description="Existing clients against mtad serve.")
    parser.add_argument("client", nargs="*", choices=[[], *PACKAGES], help="(default: all)")
    parser.add_argument("--pair", type=Path, default=ROOT / "build" / "demo-pair", help="(default %(default)s)")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder to write to")
    options = parser.parse_args()
    names = options.client or list(PACKAGES)
    BUILD.mkdir(parents=True, exist_ok=True)
    for name in names:
        environment(name)
    with served(options.pair) as url:
        found = [run(name, url, options.pair / "target") for name in names]
    for one in found:
        for result in one["checks"]:
            print(f"{one['client']} {one['version']}: {result['checked']}: {result.get('problem', 'passed')}")
        if not one["checks"]:
            print(f"{one['client']} {one['version']}: its program failed; see the log in {BUILD / 'work'}")
    path = options.results / "clients.json"
    kept = json.loads(path.read_text()) if path.is_file() else {"clients": []}
    merged = {one["client"]: one for one in (*kept["clients"], *found)}
    report = {"command": "python -m scripts.clients", "machine": machine(), "clients": list(merged.values())}
    options.results.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    sys.exit(0 if all(one["passed"] for one in found) else 1)


if __name__ == "__main__":
    main()
