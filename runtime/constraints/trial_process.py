"""The process in which grammars are tried out, started as a script: it imports nothing but llguidance.

Standard input has a JSON object per line: the settings, then grammars. A child is forked for each grammar: it is the
one that runs out of stack, memory or time, and the next one is there within a millisecond. A line on standard output
answers each: what is wrong with it and the memory it took, or the signal that ended its child. When standard input is
closed, the process ends, so that it does not outlive its parent.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from typing import TYPE_CHECKING, Any

if sys.platform != "win32":
    import resource
if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

STACK = 2**20
"""Bytes of a trial's stack. The parent's threads have 2 or 8 MiB, so what compiles here compiles there."""
MEMORY = 192 * 2**20
"""Bytes of memory that a trial may take beyond what the process begins with."""
LIMITS: Any = {"step_max_items": 10_000, "step_lexer_fuel": 50_000, "max_lexer_states": 50_000, "verbose_errors": False}
"""llguidance's own limits of the work for one mask, above what schemas of a few hundred properties and vocabularies of
128,000 tokens were seen to need. A mask then takes some 10 ms at most."""
WHITE_SPACE = " ?"
"""White space between the parts of a JSON text: without a limit, a weak model may write it up to max_tokens."""


def compile_grammar(field: str, text: str, tokenizer: LLTokenizer) -> tuple[LLMatcher | None, list[str]]:
    """A matcher at the start of a language, and what is wrong with it, parts that would be ignored included."""
    from llguidance import LLMatcher, LLParserLimits

    try:
        if field == "json_schema":
            schema = json.loads(text)  # its messages say where a mistake is
            options: Any = {"whitespace_pattern": WHITE_SPACE} if isinstance(schema, dict) else None
            grammar = LLMatcher.grammar_from_json_schema(text, defaults=options)
        elif field == "regex":
            grammar = LLMatcher.grammar_from_regex(text)
        else:
            grammar = LLMatcher.grammar_from_lark(text)
    except (ValueError, RecursionError) as error:
        return None, [str(error)]
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=LLParserLimits(**LIMITS))
    if matcher.is_error():
        return matcher, [matcher.get_error()]
    # a schema inside a grammar says itself where it may be ignored (`lenient`)
    return matcher, [] if field == "grammar" else matcher.get_grammar_warnings()


def serve() -> None:
    """Answer the grammars of standard input, one after another."""
    from llguidance import LLTokenizer

    settings = json.loads(sys.stdin.readline())
    tokenizer = LLTokenizer(settings["tokenizer"], n_vocab=settings["vocab_size"], eos_token=settings["eos"])
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_STACK, (STACK, STACK))
    if sys.platform == "linux":
        with open("/proc/self/statm", encoding="ascii") as file:
            size = int(file.read().split()[0]) * resource.getpagesize() + MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (size, size))
        if settings["gives_way"]:  # a low priority is not enough: the engine's threads would still line up behind it
            with contextlib.suppress(OSError):  # a sandbox may not have it
                os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    for line in sys.stdin:
        if not (child := os.fork()):
            try_out(**json.loads(line), seconds=settings["seconds"], tokenizer=tokenizer)
        _, status = os.waitpid(child, 0)
        if status:
            print(json.dumps({"died": os.waitstatus_to_exitcode(status)}), flush=True)


def try_out(field: str, text: str, seconds: float, tokenizer: LLTokenizer) -> None:
    """Do with a grammar what its requests do first, print what was found, and end this process."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
        compile_grammar("regex", "a", tokenizer)  # memory that all grammars share is none of this one's
        signal.setitimer(signal.ITIMER_PROF, seconds)  # of the processor; its signal ends the process
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        matcher, problems = compile_grammar(field, text, tokenizer)
        if matcher is not None and not problems:
            matcher.deep_copy().compute_bitmask()
        taken = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps({"problems": [problem[:1000] for problem in problems], "bytes": taken * 1024}), flush=True)
        os._exit(0)
    finally:
        os._exit(1)


if __name__ == "__main__":
    serve()
