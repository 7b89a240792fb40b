"""How answers call functions: the grammar that keeps calls to the functions' schemas, and what reads calls off a text.

The model writes its calls in the form that its chat template shows it. The grammar keeps it to that form, to the names
of the functions and to the schemas of their arguments. Where it is free to call, it allows all text until a call
begins.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from tokenizers import Tokenizer

from mtad.errors import InvalidInput
from mtad.params import DecodingParams
from runtime.constraints.follower import language
from runtime.constraints.trial_process import WHITE_SPACE
from runtime.server.messages import Function, NamedTool
from runtime.server.schema import ChatCompletionRequest


@dataclass(frozen=True)
class Form:
    """How a model writes a call: `before`, a JSON object of name and arguments, `after`.

    Attributes:
        sign: regular expression; a chat template that it is found in teaches this form.
        before, after: around each call. Without `before`, a call is a whole answer.
        between: between two calls; None where an answer has one call at most.
        key: of the arguments.
    """

    sign: str
    before: str
    after: str
    between: str | None
    key: str

    @property
    def opening(self) -> str:
        """What a call begins with, up to its function's name."""
        return f'{self.before}{{"name": "'

    @property
    def mark(self) -> str:
        """What tells a call from other text."""
        return self.before.strip() or self.opening


HERMES = Form(r"<tool_call>(\\n|[^<\w])*\{\s*\\?['\"](name|arg)", "<tool_call>\n", "\n</tool_call>", "\n", "arguments")
LLAMA = Form(r'\{"name": function name, "parameters"', "", "", None, "parameters")
FORMS = (HERMES, LLAMA)
"""Hermes's, which Qwen 2.5 and 3 have too (GLM's, with the same tag, is another), and Llama 3's."""
COMPOSED = frozenset({"$ref", "allOf", "anyOf", "oneOf", "patternProperties"})
"""Keywords of schemas that name properties elsewhere. Other arguments are those of `properties` where it is there, each
once: llguidance lets a property that is not listed repeat."""


@dataclass(frozen=True)
class Calling:
    """How one request's answers may call functions.

    Attributes:
        several: whether it may have more than one.
    """

    form: Form
    functions: Sequence[Function]
    forced: bool
    several: bool

    @classmethod
    def of(cls, chat: ChatCompletionRequest, template: str) -> Calling | None:
        """What a request asks for; None if nothing may be called.

        Raises:
            InvalidInput: the template has no form that is known, or the choice is not among the tools.
        """
        form = next((form for form in FORMS if re.search(form.sign, template)), None)
        choice, functions = chat.tool_choice, [tool.function for tool in chat.tools]
        names = [function.name for function in functions]
        if choice == "none" or (not functions and choice == "auto"):
            return None
        if len(names) > len(set(names)):
            raise InvalidInput("tools", names, "two functions have one name; rename one")
        name = choice.function.name if isinstance(choice, NamedTool) else choice
        if isinstance(choice, NamedTool):
            functions = [function for function in functions if function.name == name]
        if not functions:
            raise InvalidInput("tool_choice", name, "give tools" if name == choice else "give it among the tools")
        if form is None and choice == "auto":
            problem = "the chat template shows no form of calls that is known here, which are Hermes's and Llama 3's"
            remedy = 'start the server with another --chat-template, or give tool_choice "required" or a function'
            raise InvalidInput("tools", names, f"{problem}; {remedy}")
        several = chat.parallel_tool_calls and not isinstance(choice, NamedTool)
        return cls(form or LLAMA, functions, choice != "auto", several)

    def constrain(self, params: DecodingParams, tokenizer: Tokenizer, eos: Sequence[int]) -> DecodingParams:
        """Decoding parameters under which answers follow `grammar`.

        Raises:
            InvalidInput: they have a language of their own.
        """
        if params.constrained:
            field, text = language(params)
            raise InvalidInput(field, text, "calls have a grammar of their own; leave this out, or the tools")
        marks, added = self.form.before + self.form.after, tokenizer.get_added_tokens_decoder().values()
        special = any(one.special and one.content in marks for one in added)
        skips = params.skip_special_tokens and not special  # else a call could not be told by its marks
        return replace(params, grammar=self.grammar(tokenizer, eos), skip_special_tokens=skips)

    def grammar(self, tokenizer: Tokenizer, eos: Sequence[int]) -> str:
        """The grammar of the answers, in llguidance's Lark syntax.

        Args:
            tokenizer: the pair's. What is one of its added tokens is only ever written as that token.
        """
        form, added = self.form, {token.content: id for id, token in tokenizer.get_added_tokens_decoder().items()}
        marks = added.keys() & set(re.findall(r"<\S+>", form.before + form.after))

        def literal(text: str) -> str:
            parts = re.split(r"(<\S+>)", text)
            return " ".join(part if part in marks else json.dumps(part) for part in parts if part)

        rules, calls = ["call: " + " | ".join(f"call_{at}" for at in range(len(self.functions)))], "call"
        for at, function in enumerate(self.functions):
            options = {"whitespace_pattern": WHITE_SPACE, "lenient": not function.strict}
            listed = "properties" in function.parameters and COMPOSED.isdisjoint(function.parameters)
            closed = {"additionalProperties": False} if listed else {}
            schema = json.dumps({"x-guidance": options} | closed | function.parameters)
            named = json.dumps(f'{function.name}", "{form.key}": ')
            rules.append(f"call_{at}: {named} arguments_{at} {literal('}' + form.after)}")
            rules.append(f"arguments_{at}: %json {schema}")
        if self.several and form.between is not None:
            rules.append(f"more: {literal(form.between + form.opening)} call")
            calls = "call more*"
        if self.forced:
            return "\n".join([f"start: {literal(form.opening)} {calls}", *rules])
        mark = re.escape(form.mark).replace("/", r"\/")
        anywhere, text = ("(?s:.*)", "TEXT ") if form.before else ("", "")
        rules.append(f"TEXT: /(?s:.*)/ & ~/{anywhere}{mark}(?s:.*)/")
        # where the mark is no token, it ends the text before it at once
        rules.append(f"opening{'[lazy]' if text and not marks else ''}: {text}{literal(form.opening)}")
        others = ",".join(str(id) for name, id in added.items() if text and id not in eos and name not in marks)
        if others:  # they are no text to llguidance
            rules.append(f"other: TEXT <[{others}]>")
        return "\n".join([f"start: {'other* ' if others else ''}(TEXT | opening {calls})", *rules])


_JSON = json.JSONDecoder(parse_int=str)  # of which only the end is used: Python refuses an int of over 4,300 digits


class CallReader:
    """Tells what an answer says from what it calls, as its text comes.

    Args:
        calling: of the request; the text follows its grammar, and may break off anywhere.

    Attributes:
        calls: how many calls have begun.
        inside: whether the last one has not ended.
    """

    def __init__(self, calling: Calling) -> None:
        self._form, self._forced, self.calls = calling.form, calling.forced, 0
        names = "|".join(function.name for function in calling.functions)
        head = re.compile(f'{re.escape(self._form.opening)}({names})", "{self._form.key}": ')
        self._find = head.search if self._form.before else head.match
        self._text = ""  # the arguments of the call that is read, or what may yet turn out to be one
        self.inside = self._said = False
        self._shown = 0  # characters of these arguments

    def read(self, text: str, ended: bool) -> tuple[str, list[dict[str, Any]]]:
        """What more of the text adds to what is said, and to the calls, in OpenAI's shape of deltas.

        Args:
            ended: whether it is the last of it.
        """
        self._text += text
        said, calls = "", list[dict[str, Any]]()
        while True:
            if self.inside:
                end = self._end()
                if piece := self._text[self._shown : end]:
                    if not calls or calls[-1]["index"] != self.calls - 1:
                        calls.append({"index": self.calls - 1, "function": {"arguments": ""}})
                    calls[-1]["function"]["arguments"] += piece
                if end is None:
                    self._shown = len(self._text)
                    return said, calls
                self._text, self._shown, self.inside = self._text[end:], 0, False
            found = self._find(self._text) if self._form.before or not self._said else None
            if found is None:
                break
            said += "" if self.calls else self._text[: found.start()]
            function = {"name": found[1], "arguments": ""}
            id = f"{random.getrandbits(36):09x}"  # templates of Mistral's take nine characters
            calls.append({"index": self.calls, "id": id, "type": "function", "function": function})
            self._text, self.inside, self.calls = self._text[found.end() :], True, self.calls + 1
        if not (self.calls or self._forced):  # where a call has begun, or has to, nothing is said
            plain = len(self._text) if ended else self._plain()
            said, self._text = said + self._text[:plain], self._text[plain:]
            self._said |= bool(said)
        return said, calls

    def _end(self) -> int | None:
        """Where the arguments end; None if they go on."""
        if "}" not in self._text[self._shown :]:
            return None
        try:
            return _JSON.raw_decode(self._text)[1]
        except (ValueError, RecursionError):
            return None

    def _plain(self) -> int:
        """Characters of the text that do not belong to a call, whatever follows."""
        text, mark = self._text, self._form.mark
        at = text.find(mark)
        if at < 0:
            ends = range(max(0, len(text) - len(mark) + 1), len(text))
            at = next((at for at in ends if mark.startswith(text[at:])), len(text))
        return at if self._form.before or (at == 0 and not self._said) else len(text)
