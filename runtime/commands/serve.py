"""`mtad serve`: a pair of engines behind an OpenAI-compatible HTTP server."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from dataclasses import replace
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING

from mtad.errors import InvalidInput
from runtime.commands.entry import Parser, command
from runtime.commands.options import add_options, given_options
from runtime.commands.pair_source import add_pair, find_pair
from runtime.config import RuntimeConfig

if TYPE_CHECKING:
    import socket

    from runtime.server.options import ServerOptions

log = logging.getLogger(__name__)

KEY_VARIABLE = "MTAD_API_KEY"
PORT = 8000


def parser() -> argparse.ArgumentParser:
    """The options of `mtad serve`."""
    described = Parser(
        prog="mtad serve",
        usage="%(prog)s PAIR [options]",
        description="Serve a pair of engines over HTTP, compatible with OpenAI's completions and chat completions. "
        "Parameters that a request leaves out come from the pair's tuned defaults, not from OpenAI's.",
        epilog=f"API keys also come from the variable {KEY_VARIABLE}. SIGTERM drains: accepted requests end, new ones "
        "get 503, then the server stops; a second signal cancels what still runs.",
    )
    add_pair(described)
    described.add_argument("--host", default="127.0.0.1", help="address to listen on (default %(default)s: this host)")
    described.add_argument(
        "--port", type=int, default=PORT, help="port to listen on; 0 picks a free one (default %(default)s)"
    )
    described.add_argument("--model", help="name the pair is served under (default: the folder's)")
    described.add_argument("--chat-template", type=Path, help="file with a Jinja chat template, for chat completions")
    keys = described.add_argument_group("authentication and limits")
    keys.add_argument("--api-key", action="append", default=[], help="a key requests may carry; may be repeated")
    keys.add_argument("--api-key-file", type=Path, help="file with one key per line")
    keys.add_argument("--max-body", default="4MiB", help="largest request body (default %(default)s)")
    keys.add_argument(
        "--body-seconds",
        type=float,
        default=30,
        help="timeout for receiving a request, in seconds (default %(default)s)",
    )
    keys.add_argument(
        "--send-seconds",
        type=float,
        default=30,
        help="timeout for a client that does not read what it is sent, in seconds (default %(default)s)",
    )
    keys.add_argument(
        "--request-seconds",
        type=float,
        default=600,
        help="timeout for a request, waiting included, in seconds (default %(default)s)",
    )
    keys.add_argument(
        "--drain-seconds",
        type=float,
        default=60,
        help="how long accepted requests may go on after SIGTERM, in seconds (default %(default)s)",
    )
    keys.add_argument(
        "--max-connections",
        type=int,
        default=4096,
        help="connections open at a time; fewer if the process may not open so many files (default %(default)s)",
    )
    keys.add_argument(
        "--max-choices",
        type=int,
        default=128,
        help="choices per request, prompts times n (default %(default)s)",
    )
    keys.add_argument("--allow-priority", action="store_true", help="requests may carry a priority")
    keys.add_argument(
        "--allowed-host",
        action="append",
        default=[],
        help="a name under which clients reach this server, needed only without API keys; may be repeated",
    )
    add_options(described.add_argument_group("runtime"), RuntimeConfig)
    group = described.add_argument_group("several replicas, on Ray; see docs/deployment.md")
    group.add_argument("--replicas", type=int, help="processes with an engine each (default: one, in this process)")
    group.add_argument(
        "--max-replicas", type=int, help="most replicas, started while requests wait (default: --replicas)"
    )
    group.add_argument(
        "--replica-cpus",
        type=float,
        default=1,
        help="CPU cores that Ray reserves for each replica (default %(default)s)",
    )
    group.add_argument(
        "--replica-gpus", type=float, default=0, help="GPUs that Ray gives each replica (default %(default)s)"
    )
    group.add_argument("--ray-address", help="address of a running Ray cluster (default: starts one on this machine)")
    watch = described.add_argument_group("observability")
    watch.add_argument("--trace", action="store_true", help="OpenTelemetry spans; needs opentelemetry-api")
    watch.add_argument(
        "--log-level",
        choices=("debug", "info", "warning", "error"),
        default="info",
        help="least severe messages that are logged (default %(default)s)",
    )
    watch.add_argument("--access-log", action="store_true", help="log one line per request")
    return described


@command
def main() -> None:
    """Entry point of `mtad serve`."""
    options = parser().parse_args()
    if not 0 <= options.port < 2**16:
        raise InvalidInput("port", options.port, "give 0 to 65535")
    config = RuntimeConfig(**given_options(options, RuntimeConfig))
    folder = find_pair(options)
    keys = read_keys(options.api_key, options.api_key_file, os.environ.get(KEY_VARIABLE))
    logging.basicConfig(level=options.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        import prometheus_client  # noqa: F401
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise InvalidInput("serve", error.name, "not installed; pip install 'mtad[serve]'") from None

    import torch

    from engines.memory import parse_bytes
    from engines.pytorch.hook import quiet_transformers
    from runtime.async_llm import AsyncLLM
    from runtime.server.app import create_app
    from runtime.server.chat import read_template
    from runtime.server.options import ServerOptions
    from runtime.server.uvicorn_server import bind, serve

    quiet_transformers()
    torch.set_num_threads(1)  # the loop's own tensors are small; the cores belong to the engines
    settings = ServerOptions(  # bad options are refused before the engines are opened
        model=options.model or folder.resolve().name,
        api_keys=keys,
        max_body_bytes=parse_bytes(options.max_body),
        body_seconds=options.body_seconds,
        send_seconds=options.send_seconds,
        request_seconds=options.request_seconds,
        drain_seconds=options.drain_seconds,
        max_connections=options.max_connections,
        max_choices=options.max_choices,
        allow_priority=options.allow_priority,
        allowed_hosts=(options.host, *options.allowed_host),
        trace=options.trace,
    )
    if options.max_replicas is not None and options.replicas is None:
        raise InvalidInput("max-replicas", options.max_replicas, "only with --replicas, the least of them")
    if config.tensor_parallel > 1:
        from engines.parallel.engine import follow_if_told

        follow_if_told()  # one process listens
    bound = bind(options.host, options.port)
    if not keys and not is_loopback(options.host):
        log.warning("%s is open to other machines, and no API key is asked for (--api-key)", options.host)
    if options.replicas is not None:
        if config.tensor_parallel != 1:
            raise InvalidInput("tensor-parallel", config.tensor_parallel, "not together with --replicas")
        _serve_cluster(folder, options, settings, config, bound)
        return
    engine = AsyncLLM(folder, config)
    if options.chat_template:
        template = read_template(options.chat_template, engine.llm.pair.tokenizer)
        settings = ServerOptions(**{**vars(settings), "chat_template": template})
    app = create_app(engine, settings)
    serve(app, engine, bound, settings, options.log_level, options.access_log)
    if engine.cause is not None:
        sys.exit(f"mtad serve: failed: the engine stopped: {engine.cause}")


def _serve_cluster(
    folder: Path, options: argparse.Namespace, settings: ServerOptions, config: RuntimeConfig, bound: socket.socket
) -> None:
    """Serve with several replicas; the engines are theirs."""
    if options.ray_address is None and "RAY_ADDRESS" not in os.environ:
        # a Ray of this machine's own listens on the loopback address only; it reads this when it is imported
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    from engines.folder import read_spec
    from runtime.cluster.options import ClusterOptions
    from runtime.cluster.run import serve_cluster
    from runtime.pair import open_tokenizer
    from runtime.server.chat import read_template

    sizes = options.replicas, options.max_replicas, options.replica_cpus, options.replica_gpus
    cluster = ClusterOptions(*sizes, options.ray_address)
    read_spec(folder / "target")  # a folder that is no pair is refused before anything is started
    if options.chat_template:
        tokenizer = open_tokenizer(folder / "target")
        settings = replace(settings, chat_template=read_template(options.chat_template, tokenizer))
    serve_cluster(folder, config, settings, cluster, bound, options.log_level, options.access_log)


def read_keys(given: list[str], file: Path | None, variable: str | None) -> tuple[str, ...]:
    """API keys from all three places.

    Raises:
        InvalidInput: the file cannot be read, or holds no key.
    """
    found = [*given, *([variable] if variable else [])]
    if file is not None:
        try:
            lines = [line.strip() for line in file.read_text(encoding="utf-8").splitlines()]
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidInput("api-key-file", str(file), f"cannot be read: {error}") from None
        keys = [line for line in lines if line and not line.startswith("#")]
        if not keys:
            raise InvalidInput("api-key-file", str(file), "holds no key; give one per line")
        found += keys
    return tuple(found)


def is_loopback(host: str) -> bool:
    """Whether only this machine can connect."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
