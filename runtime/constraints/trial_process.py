"""The process in which grammars are tried out, or chat templates run, started as a script that imports little.

Standard input has a JSON object per line: the settings, then trials. A child is forked for each trial: it is the one
that runs out of stack, memory or time, and the next one is there within a millisecond. A line on standard output
answers each: what was found and the memory it took, or the signal that ended its child. When standard input is closed,
the process ends, so that it does not outlive its parent.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

QUICK_SECONDS, SECONDS = 0.05, 2.0
"""Processor time that a trial may take. Grammars of a few hundred rules and chats take less than the first. What is
slower is tried again, behind others of its kind, so that nothing quick waits for it; a grammar only where no other
thread would run, since each client may bring its own."""
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


class Compiler:
    """Compiles grammars; does with each what its requests do first."""

    def __init__(self, tokenizer: str, vocab_size: int, eos: list[int]) -> None:
        from llguidance import LLTokenizer

        self._tokenizer = LLTokenizer(tokenizer, n_vocab=vocab_size, eos_token=eos)

    def prepare(self) -> None:
        """Memory that all grammars share is none of the next one's."""
        self.run("regex", "a")

    def run(self, field: str, text: str) -> dict[str, Any]:
        matcher, problems = compile_grammar(field, text, self._tokenizer)
        if matcher is not None and not problems:
            matcher.deep_copy().compute_bitmask()
        return {"problems": [problem[:1000] for problem in problems]}


class Renderer:
    """Renders chats: `text` is a JSON object of messages, tools, further variables, and which of the templates."""

    def __init__(self, templates: list[str], special_tokens: dict[str, Any]) -> None:
        import transformers.utils.chat_template_utils  # noqa: F401 # a second, which is none of a trial's

        self._templates, self._special = templates, special_tokens

    def prepare(self) -> None:
        """What is compiled is kept by transformers."""
        for template in range(len(self._templates)):
            self.run("", json.dumps({"messages": [], "tools": None, "variables": {}, "template": template}))

    def run(self, field: str, text: str) -> dict[str, Any]:
        from transformers.utils.chat_template_utils import render_jinja_template

        chat = json.loads(text)
        given = {**chat["variables"], "tools": chat["tools"] or None, "add_generation_prompt": True, **self._special}
        try:
            found = render_jinja_template([chat["messages"]], chat_template=self._templates[chat["template"]], **given)
        except Exception as error:  # whatever goes wrong in a template: it divides by zero, it calls itself
            return {"problems": [f"{str(error) or type(error).__name__}"[:1000]]}
        return {"text": found[0][0], "problems": []}


def serve() -> None:
    """Answer the trials of standard input, one after another."""
    os.nice(19)  # threads of the engine wait for each other: one that lines up here holds all of them up
    settings = json.loads(sys.stdin.readline())
    seconds, gives_way = settings.pop("seconds"), settings.pop("gives_way")
    work, prepared = Renderer(**settings) if "templates" in settings else Compiler(**settings), False
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_STACK, (STACK, STACK))
    if sys.platform == "linux":
        with open("/proc/self/statm", encoding="ascii") as file:
            size = int(file.read().split()[0]) * resource.getpagesize() + MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (size, size))
        if gives_way:  # a low priority is not enough: the engine's threads would still line up behind it
            with contextlib.suppress(OSError):  # a sandbox may not have it
                os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    for line in sys.stdin:
        if not (child := os.fork()):
            try_out(work, json.loads(line), seconds)
        _, status = os.waitpid(child, 0)
        if status:
            print(json.dumps({"died": os.waitstatus_to_exitcode(status)}), flush=True)
        elif not prepared:  # it did well in a child, and those from now on begin with it
            work.prepare()
            prepared = True


def try_out(work: Compiler | Renderer, trial: dict[str, str], seconds: float) -> None:
    """Run a trial, print what was found, and end this process."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
        signal.setitimer(signal.ITIMER_PROF, SECONDS)  # of the processor; its signal ends the process
        work.prepare()
        signal.setitimer(signal.ITIMER_PROF, seconds)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        found = work.run(**trial)
        taken = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps({**found, "bytes": taken * 1024}), flush=True)
        os._exit(0)
    finally:
        os._exit(1)


if __name__ == "__main__":
    serve()
