"""`mtad`: one command, whose subcommands are the toolkit's table of contents."""

from __future__ import annotations

import difflib
import os
import signal
import sys
from importlib import import_module
from io import TextIOWrapper

from mtad import __version__

COMMANDS = {
    "export": ("runtime.commands.export", "compile a target and an auxiliary model, or a target alone, into engines"),
    "generate": ("runtime.commands.generate", "decode prompts with a pair"),
    "chat": ("runtime.commands.chat", "hold a conversation in the terminal"),
    "serve": ("runtime.commands.serve", "serve a pair over HTTP, compatible with OpenAI's API"),
    "triton": ("runtime.commands.triton", "write a model directory for Triton Inference Server"),
    "tune": ("runtime.commands.tune", "choose decoding parameters on your own prompts"),
    "check": ("runtime.commands.check", "compare an engine with its checkpoint or another engine"),
    "inspect": ("runtime.commands.inspect", "show what an engine or pair folder holds"),
}
"""Each subcommand's module, imported when it is called, and what it does."""

HELP = """usage: mtad COMMAND ...

Multi-token assisted decoding: an auxiliary model drafts, the target verifies many tokens per pass.

{}

mtad COMMAND --help describes a command; mtad --version prints the version."""


def main() -> None:
    """Entry point of `mtad`. A reader that goes away, such as `head`, ends it quietly.

    A library that is being imported when Ctrl-C comes makes an error of its own of it, which nobody is shown.
    """
    interrupted = list[int]()

    def interrupt(number: int, frame: object) -> None:
        interrupted.append(number)
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, interrupt)
    sys.stdin = sys.stdin or open(os.devnull)  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # what an encoding lacks is no error
    try:
        try:
            _run()
        finally:
            print(end="", flush=True)
    except (Exception, KeyboardInterrupt) as error:
        if not (interrupted or isinstance(error, OSError)):
            raise
        if isinstance(error, OSError) and sys.stdout:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left goes nowhere
        if isinstance(error, BrokenPipeError):
            sys.exit(141)
        print("mtad: interrupted" if interrupted else f"mtad: failed: {error}", file=sys.stderr)
        sys.exit(130 if interrupted else 1)


def _run() -> None:
    name, *arguments = sys.argv[1:] or ["--help"]
    if name in ("-h", "--help"):
        print(HELP.format("\n".join(f"  {name:10} {words}" for name, (_, words) in COMMANDS.items())))
    elif name == "--version":
        print(f"mtad {__version__}")
    elif name in COMMANDS:
        sys.argv = [f"mtad {name}", *arguments]
        import_module(COMMANDS[name][0]).main()
    else:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"did you mean {near[0]}?" if near else "see mtad --help"
        print(f"mtad: error: {name!r} is not a command; {hint}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
