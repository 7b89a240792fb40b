"""`mtad serve`: a pair of engines behind an OpenAI-compatible HTTP server."""

from __future__ import annotations

import argparse
import logging
import os
import secrets
import sys
from dataclasses import replace
from ipaddress import ip_address
from pathlib import Path

from engines.memory import parse_bytes
from mtad.errors import InvalidInput, imported, read_text
from runtime.commands.entry import Parser, add_options, command, given_options
from runtime.commands.pair_source import add_pair, find_pair
from runtime.commands.terminal import waiting
from runtime.config import RuntimeConfig, use_torch
from runtime.server.options import ClusterOptions, ServerOptions

log = logging.getLogger(__name__)

KEY_VARIABLE = "MTAD_API_KEY"
LIMIT_FIELDS = ("body_seconds", "request_seconds", "drain_seconds", "max_choices", "allow_priority", "allowed_host")
"""Fields of `ServerOptions` among the options for authentication and limits."""


def parser() -> argparse.ArgumentParser:
    """The options of `mtad serve`."""
    about = """Serve a pair of engines over HTTP, compatible with OpenAI's completions and chat completions. Parameters
    that a request leaves out come from the pair's tuned defaults, not from OpenAI's."""
    ending = f"""API keys also come from the variable {KEY_VARIABLE}. SIGTERM drains: accepted requests end, new ones
    get 503, then the server stops; a second signal cancels what still runs."""
    usage = "%(prog)s PAIR [options]"
    described = Parser(brief=True, prog="mtad serve", usage=usage, description=about, epilog=ending)
    add_pair(described)
    described.add_argument("--host", default="127.0.0.1", help="address to listen on (default %(default)s: this host)")
    described.add_argument("--port", type=int, default=8000, help="0 picks a free one (default %(default)s)")
    described.add_argument("--model", help="name the pair is served under (default: the folder's)")
    described.add_argument("--chat-template", type=Path, help="file with a Jinja chat template, for chat completions")
    keys = described.add_argument_group("authentication and limits")
    keys.add_argument("--api-key", action="append", default=[], help="a key requests may carry; may be repeated")
    keys.add_argument("--api-key-file", type=Path, help="file with one key per line")
    keys.add_argument("--max-body", default="4MiB", help="largest request body (default %(default)s)")
    add_options(keys, ServerOptions, only=LIMIT_FIELDS)
    add_options(described.add_argument_group("where it runs"), RuntimeConfig)
    add_options(described.add_argument_group("several replicas, on Ray; see docs/deployment.md"), ClusterOptions)
    watch = described.add_argument_group("observability")
    levels = ("debug", "info", "warning", "error")
    least = "least severe messages that are logged (default %(default)s)"
    watch.add_argument("--log-level", choices=levels, default="info", help=least)
    watch.add_argument("--access-log", action="store_true", help="log one line per request")
    return described


@command
def main() -> None:
    """Entry point of `mtad serve`."""
    options = parser().parse_args()
    if not 0 <= options.port < 2**16:
        raise InvalidInput("port", options.port, "give 0 to 65535")
    config = RuntimeConfig(**given_options(options, RuntimeConfig))
    keys = read_keys(options.api_key, options.api_key_file, os.environ.get(KEY_VARIABLE))
    logging.basicConfig(level=options.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    for module in ("prometheus_client", "starlette", "uvicorn"):
        imported(module, "serve", module, "the extra serve installs it")

    replicas = given_options(options, ClusterOptions)
    if replicas and "replicas" not in replicas:
        raise InvalidInput(*next(iter(replicas.items())), "only with --replicas")
    cluster = ClusterOptions(**replicas) if replicas else None
    limits = given_options(options, ServerOptions, LIMIT_FIELDS)
    folder = find_pair(options)
    settings = ServerOptions(  # whatever is wrong is refused before an engine is opened or a process started
        model=options.model or Path(os.path.abspath(folder)).name,  # of a link, which an update leads elsewhere
        api_keys=keys,
        max_body_bytes=parse_bytes(options.max_body, "max-body"),
        **limits | {"allowed_host": (options.host, *limits.get("allowed_host", ()))},
    )
    if config.tensor_parallel > 1:
        if cluster:
            raise InvalidInput("tensor-parallel", config.tensor_parallel, "not together with --replicas")
        from engines.parallel.engine import follow_if_launched

        follow_if_launched()  # one process listens
    from runtime.server.uvicorn_server import bind, serve

    bound = bind(options.host, options.port)

    with waiting("loading PyTorch and transformers"):
        from runtime.async_llm import AsyncLLM
        from runtime.llm import LLM
        from runtime.pair import open_tokenizer
        from runtime.server.app import create_app
        from runtime.server.chat import read_template
        from runtime.server.service import Service

        use_torch()
    if not keys and not ip_address(bound.getsockname()[0]).is_loopback:
        log.warning("%s is open to other machines, and no API key is asked for (--api-key)", options.host)
    if options.chat_template:
        template = read_template(options.chat_template, open_tokenizer(folder / "target"))
        settings = replace(settings, chat_template=template)
    logs = {"log_level": options.log_level, "access_log": options.access_log}
    if cluster:
        if "RAY_ADDRESS" not in os.environ:
            # a Ray of this machine's own listens on the loopback address only, without its head process it ends this
            # one after fifteen seconds, and its token is in no file; engines run at the priority of the command, and
            # not behind all else on the machine; it reads all this when it is imported
            os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
            os.environ.setdefault("RAY_gcs_rpc_server_reconnect_timeout_s", "15")
            os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
            os.environ.setdefault("RAY_worker_niceness", "0")
        from runtime.cluster.run import serve_cluster

        serve_cluster(folder, config, settings, cluster, bound, **logs)
        return
    engine = AsyncLLM(LLM(folder, config))
    serve(create_app(Service(engine, settings)), engine, bound, settings.drain_seconds, **logs)
    if engine.cause is not None:
        sys.exit(f"mtad serve: failed: the engine stopped: {engine.cause}")


def read_keys(given: list[str], file: Path | None, variable: str | None) -> tuple[str, ...]:
    """API keys from all three places.

    Raises:
        InvalidInput: the file cannot be read, or holds no key.
    """
    found = [*given, *([] if variable is None else [variable])]
    if file is not None:
        lines = [line.strip() for line in read_text("api-key-file", file).splitlines()]
        keys = [line for line in lines if line and not line.startswith("#")]
        if not keys:
            raise InvalidInput("api-key-file", str(file), "holds no key; give one per line")
        found += keys
    return tuple(found)
