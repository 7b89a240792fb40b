"""Existing clients against `mtad serve`, each in an environment of its own, and whether each got what it must.

    python -m scripts.clients                        all of them
    python -m scripts.clients openai langchain       only these; the results keep the others'

Each is a file of `requirements/`, whose first line is the client itself, and a function of `checks.py`. The exit code
is 1 if a client did not get what it must; its output is in build/clients/work.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from runtime.commands.entry import Parser, command
from scripts.clients import checks
from scripts.clients.served import BUILD, MODEL, REQUIREMENTS, Server, environment, served
from scripts.paths import RESULTS, ROOT
from scripts.results import Rows, save, table

CLIENTS = sorted(path.stem for path in REQUIREMENTS.glob("*.txt"))


def run(name: str, server: Server, tokenizer: Path) -> list[str]:
    """One client's package and version, what is checked, and the problem or `passed`."""
    folder = BUILD / "work" / name
    folder.mkdir(parents=True, exist_ok=True)
    env = os.environ | {"HF_HOME": str(folder / "hf"), "HF_HUB_OFFLINE": "1", "TIKTOKEN_CACHE_DIR": str(folder)}
    asked = [str(environment(name)), "-m", "scripts.clients.checks", name, server.url, MODEL, str(tokenizer)]
    with (folder / "log.txt").open("w+") as log:
        ended = subprocess.run([*asked, str(folder)], cwd=ROOT, env=env, check=False, stdout=log, stderr=log)
        log.seek(0)
        problem = log.read().splitlines()[-1][:500] if ended.returncode else ""
    package = (REQUIREMENTS / f"{name}.txt").read_text().split()[0].split("==")
    return [*package, (getattr(checks, name).__doc__ or "").rstrip("."), problem or "passed"]


def tables(figures: dict[str, list[str]]) -> dict[str, Rows]:
    """The clients, what is checked of them, and whether it passed."""
    return {"clients": [["client", "version", "what is checked", "result"], *figures.values()]}


@command
def main() -> None:
    parser = Parser(prog="scripts.clients", description="Existing clients against mtad serve.")
    parser.add_argument("client", nargs="*", choices=[[], *CLIENTS], help="(default: all)")
    parser.add_argument("--pair", type=Path, default=ROOT / "build" / "demo-pair", help="(default %(default)s)")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder to write to")
    options = parser.parse_args()
    names, path = options.client or CLIENTS, options.results / "clients.json"
    for name in names:
        environment(name)
    found = json.loads(path.read_text())["figures"] if path.is_file() else {}
    with served(options.pair, "--rows", "16") as server:
        found |= {name: run(name, server, (options.pair / "target").absolute()) for name in names}
    save(path, "scripts.clients.__main__", dict(sorted(found.items())))
    print(table(tables(found)["clients"]))
    sys.exit(any(found[name][-1] != "passed" for name in names))


if __name__ == "__main__":
    main()
