"""The process in which grammars are tried out, started as a script: it imports nothing but llguidance.

It prepares the tokenizer once and then forks a child for each grammar. The child is the one that runs out of stack,
memory or time; whatever it left behind is gone with it, and the next child is there within a millisecond.

Its standard input is a socket. Each message on it carries another socket, and on that comes what is asked: on the
first one the settings, on each other one a grammar. A child's answer goes back the same way: its problems, and how much
memory it took; or, from this process, the signal that ended it. Who closes such a socket early ends the child, and when
standard input is closed, the parent is gone and everything ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

STACK = 2**20
"""Bytes of a child's stack. The parent's threads have 2 or 8 MiB, so what got by here gets by there."""
MEMORY = 192 * 2**20
"""Bytes of memory a child may take beyond what it begins with."""
SMALL_SECONDS = 0.02
"""Of the processor. Grammars of a few hundred rules take less, and do not wait on a busy machine; others give way."""
LIMITS: dict[str, Any] = {
    "step_max_items": 10_000,
    "step_lexer_fuel": 50_000,
    "max_lexer_states": 50_000,
    "verbose_errors": False,
}
"""llguidance's own limits, of its parser's and lexer's work for one mask; below its defaults, above what schemas of a
few hundred properties and vocabularies of 128,000 tokens were seen to need. A mask then takes some 10 ms at most."""


WHITE_SPACE = " ?"
"""Between the parts of a JSON text: one space at most, unless a schema's `x-guidance` says otherwise.

Without a limit, a weak model may write white space up to max_tokens."""


def compile_grammar(field: str, text: str, tokenizer: LLTokenizer) -> tuple[LLMatcher | None, list[str]]:
    """A matcher at the start of a language, and what is wrong with it, parts that would be ignored included."""
    from llguidance import LLMatcher, LLParserLimits

    # llguidance takes options beside an object only
    options: Any = {"whitespace_pattern": WHITE_SPACE} if text.lstrip().startswith("{") else None
    kinds: dict[str, Callable[[str], str]] = {
        "json_schema": partial(LLMatcher.grammar_from_json_schema, defaults=options),
        "regex": LLMatcher.grammar_from_regex,
        "grammar": LLMatcher.grammar_from_lark,
    }
    try:
        grammar = kinds[field](text)
    except ValueError as error:
        return None, [str(error)]
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=LLParserLimits(**LIMITS))
    if matcher.is_error():
        return matcher, [matcher.get_error()]
    # a schema inside a grammar says itself where it may be ignored (`lenient`)
    return matcher, [] if field == "grammar" else matcher.get_grammar_warnings()


def serve(control: socket.socket) -> None:
    """Fork children until the parent is gone."""
    from llguidance import LLTokenizer

    first = _received(control)
    if first is None:
        return
    with first:
        settings = json.loads(_read(first))
    tokenizer = LLTokenizer(settings["tokenizer"], n_vocab=settings["vocab_size"], eos_token=settings["eos"])
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    poller, children = select.poll(), dict[int, socket.socket]()
    poller.register(control, select.POLLIN)
    poller.register(woken, select.POLLIN)
    while True:
        for descriptor, _ in poller.poll():
            if descriptor == control.fileno():
                connection = _received(control)
                if connection is None:
                    for child in children:
                        os.kill(child, signal.SIGKILL)
                    return
                child = os.fork()
                if not child:
                    for other in (control, *children.values()):  # each is to close with the child it belongs to
                        other.close()
                    _try(connection, tokenizer)
                children[child] = connection
                poller.register(connection, 0)  # wakes when its other end is closed
            elif descriptor == woken:
                os.read(woken, 4096)
            else:
                poller.unregister(descriptor)
                os.kill(next(pid for pid, one in children.items() if one.fileno() == descriptor), signal.SIGKILL)
        while children:
            child, status = os.waitpid(-1, os.WNOHANG)
            if not child:
                break
            connection = children.pop(child)
            with contextlib.suppress(KeyError):
                poller.unregister(connection)
            if status:
                with contextlib.suppress(OSError):
                    connection.sendall(json.dumps({"died": os.waitstatus_to_exitcode(status)}).encode())
            connection.close()


def _try(connection: socket.socket, tokenizer: LLTokenizer) -> None:
    """Compile one grammar and use it, with little of everything; does not return."""
    import resource  # not on Windows, where this module is imported all the same

    code = 1
    try:
        asked = json.loads(_read(connection))
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        if sys.platform == "linux":  # others do not keep to it
            with open("/proc/self/statm", encoding="ascii") as file:
                size = int(file.read().split()[0]) * resource.getpagesize() + STACK + MEMORY
            resource.setrlimit(resource.RLIMIT_AS, (size, size))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.setitimer(signal.ITIMER_PROF, asked["seconds"])  # of the processor; its signal ends the process
        threading.stack_size(STACK)
        answer: dict[str, Any] = {}
        thread = threading.Thread(target=_use, args=(asked["field"], asked["text"], tokenizer, answer))
        thread.start()
        while thread.is_alive() and time.process_time() < SMALL_SECONDS:
            thread.join(0.005)
        if thread.is_alive():
            _give_way(thread)
            thread.join(asked["wait"])
        if thread.is_alive():
            os.kill(os.getpid(), signal.SIGPROF)  # as if it had taken the processor's time
        signal.setitimer(signal.ITIMER_PROF, 0)
        if answer:
            connection.sendall(json.dumps(answer).encode())
            code = 0
    finally:
        os._exit(code)


def _give_way(thread: threading.Thread) -> None:
    """From now on it runs where nothing else would: who sends a large grammar waits for it, and nobody else.

    A low priority is not enough on Linux: the engine's threads still line up behind it while another core is free.
    """
    if sys.platform == "linux":
        try:
            os.sched_setscheduler(thread.native_id or 0, os.SCHED_IDLE, os.sched_param(0))
            return
        except OSError:  # it has just ended, or a sandbox does not have this
            pass
    os.nice(19)


def _use(field: str, text: str, tokenizer: LLTokenizer, answer: dict[str, Any]) -> None:
    """Do with a grammar what its requests do first, to the end of its life."""
    compile_grammar("regex", "a", tokenizer)  # touches what all grammars do, which is none of this one's memory
    before = _peak()
    try:
        if field == "json_schema":
            json.loads(text)  # its messages say where a mistake is
        matcher, problems = compile_grammar(field, text, tokenizer)
    except (ValueError, RecursionError) as error:
        matcher, problems = None, [str(error)]
    if matcher is not None and not problems:
        matcher.deep_copy().compute_bitmask()
    answer |= {"problems": [problem[:1000] for problem in problems], "bytes": _peak() - before}
    del matcher


def _peak() -> int:
    """The most memory this process has had, in bytes."""
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _received(control: socket.socket) -> socket.socket | None:
    """The socket of the next message; None if there is none any more."""
    _, descriptors, _, _ = socket.recv_fds(control, 1, 1)
    return socket.socket(fileno=descriptors[0]) if descriptors else None


def _read(connection: socket.socket) -> bytes:
    with connection.makefile("rb") as file:
        return file.read()


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM):  # it ends with its parent, not with its parent's group
        signal.signal(number, signal.SIG_IGN)
    with socket.socket(fileno=os.dup(0)) as standard_input:
        serve(standard_input)
