"""Calls of functions: the grammar they follow, and how they are read off a text."""

from __future__ import annotations

import re

import pytest
from llguidance import LLTokenizer
from tokenizers import Tokenizer

from mtad.params import DecodingParams
from runtime.constraints.trial_process import compile_grammar
from runtime.server.calling import FORMS, HERMES, LLAMA, Calling, CallReader, Form
from runtime.server.messages import Function
from tests.support.checkpoints import byte_tokenizer

UNIT = {"properties": {"unit": {"enum": ["C", "F"]}}, "required": ["unit"], "additionalProperties": False}
FUNCTIONS = [Function.model_validate({"name": name, "parameters": UNIT}) for name in ("weather", "heat")]
SAID = 'Let me <tool see. {"name": '
ONE, TWO = '{"name": "weather", "arguments": {"unit": "C"}}', '{"name": "heat", "arguments": {"unit":"F"}}'
OTHER = ONE.replace("arguments", "parameters")
LONG = '{"unit": ' + "1" * 5000 + "}"
CALLS = [("weather", '{"unit": "C"}'), ("heat", '{"unit":"F"}')]


def calling(form: Form, forced: bool = False, several: bool = True) -> Calling:
    return Calling(form, FUNCTIONS, forced, several)


@pytest.mark.parametrize(
    ("form", "text", "said", "expected"),
    [
        (HERMES, SAID, SAID, []),
        (HERMES, f"{SAID}\n<tool_call>\n{ONE}\n</tool_call>", f"{SAID}\n", CALLS[:1]),
        (HERMES, f"<tool_call>\n{ONE}\n</tool_call>\n<tool_call>\n{TWO}\n</tool_call>", "", CALLS),
        (HERMES, f'<tool_call>\n{{"name": "heat", "arguments": {LONG}}}\n</tool_call>', "", [("heat", LONG)]),
        (HERMES, f"<tool_call>\n{ONE[:-5]}", "", [("weather", '{"unit": ')]),
        (HERMES, '<tool_call>\n{"name', '<tool_call>\n{"name', []),
        (LLAMA, OTHER, "", CALLS[:1]),
        (LLAMA, '{"name": "Alice"}', '{"name": "Alice"}', []),
        (LLAMA, f"So: {OTHER}, no?", f"So: {OTHER}, no?", []),
    ],
)
def test_a_text_is_read_the_same_in_whatever_pieces_it_comes(
    form: Form, text: str, said: str, expected: list[tuple[str, str]]
) -> None:
    for size in (1, 2, 7, len(text)):
        reader, told, found = CallReader(calling(form)), "", dict[int, list[str]]()
        for at in range(0, len(text), size):
            more, calls = reader.read(text[at : at + size], at + size >= len(text))
            assert said.startswith(told := told + more), "what was told stays"
            for one in calls:
                assert ("id" in one) == (one["index"] not in found), "the first delta of a call has its id"
                name, arguments = found.setdefault(one["index"], [one["function"].get("name"), ""])
                found[one["index"]] = [name, arguments + one["function"]["arguments"]]
        assert told == said
        assert [tuple(one) for one in found.values()] == expected


def test_of_a_call_that_has_to_be_made_nothing_is_said_also_where_its_head_is_cut_off() -> None:
    assert CallReader(calling(HERMES, forced=True)).read('<tool_call>\n{"name', True) == ("", [])


def test_special_tokens_are_part_of_the_text_only_where_calls_are_told_by_them() -> None:
    tokenizer, params = byte_tokenizer("<tool_call>", "</tool_call>"), DecodingParams()
    assert calling(HERMES).constrain(params, tokenizer, [0]).skip_special_tokens
    tokenizer.add_special_tokens(["<tool_call>"])
    assert not calling(HERMES).constrain(params, tokenizer, [0]).skip_special_tokens


@pytest.mark.parametrize("tokens", [[], ["<tool_call>", "</tool_call>", "<think>"]], ids=["texts", "tokens"])
@pytest.mark.parametrize("form", [HERMES, LLAMA], ids=["hermes", "llama"])
def test_the_grammar_allows_any_text_and_keeps_calls_to_their_schemas(form: Form, tokens: list[str]) -> None:
    tokenizer = byte_tokenizer(*tokens)
    first = form.opening + f'weather", "{form.key}": {{"unit": "C"}}}}{form.after}'
    several = [first + first, f"{first}\n{first}"][form is HERMES :]
    free, forced = calling(form), calling(form, forced=True)
    assert follows(free, tokenizer, "", SAID, first, *([f"{SAID}{first}"] if form is HERMES else []))
    assert follows(forced, tokenizer, first) == follows(calling(form, several=False), tokenizer, first) == 1
    for text in (first.replace("weather", "wether"), first.replace('"C"', '"K"'), first[:-1], f"{first} so"):
        assert not follows(free, tokenizer, text)
        assert not follows(forced, tokenizer, text)
    assert not follows(forced, tokenizer, "")
    assert follows(forced, tokenizer, several[-1]) == (form is HERMES)
    assert not follows(calling(form, several=False), tokenizer, several[-1])
    if tokens and form is HERMES:
        assert follows(free, tokenizer, f"<think>{SAID}")


@pytest.mark.parametrize("twice", ['"unit": "C", "unit": "F"', '"unit": "C", "more": 1, "more": 2'])
def test_no_argument_of_a_call_comes_twice_also_where_the_schema_does_not_say_what_else_there_is(twice: str) -> None:
    properties = {"unit": {"enum": ["C", "F"]}, "more": {"type": "integer"}}
    listed = {"type": "object", "properties": {name: one for name, one in properties.items() if name in twice[:8]}}
    function = Function.model_validate({"name": "weather", "parameters": listed})
    forced = Calling(HERMES, [function], True, False)
    assert follows(forced, byte_tokenizer(), HERMES.opening + f'weather", "arguments": {{"unit": "C"}}}}{HERMES.after}')
    assert not follows(forced, byte_tokenizer(), HERMES.opening + f'weather", "arguments": {{{twice}}}}}{HERMES.after}')


@pytest.mark.parametrize(
    ("given", "free"),
    [
        ({"parameters": {"type": "object"}}, True),
        ({"parameters": {"type": "object", "properties": {}}}, False),
        ({}, False),
    ],
)
def test_a_schema_without_properties_allows_any_argument_and_a_function_without_a_schema_has_none(
    given: dict[str, object], free: bool
) -> None:
    forced = Calling(HERMES, [Function.model_validate({"name": "weather", **given})], True, False)
    for arguments, allowed in (("{}", True), ('{"unit": "C"}', free)):
        call = f'{HERMES.opening}weather", "arguments": {arguments}}}{HERMES.after}'
        assert follows(forced, byte_tokenizer(), call) == allowed


def follows(calling: Calling, tokenizer: Tokenizer, *texts: str) -> bool:
    """Whether all texts are complete under the grammar of calls."""
    made = LLTokenizer(tokenizer.to_str(), eos_token=[256])
    matcher, problems = compile_grammar("grammar", calling.grammar(tokenizer, [256]), made)
    assert matcher is not None
    assert not problems
    for text in texts:
        matcher.reset()
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        if matcher.try_consume_tokens(ids) < len(ids) or not matcher.is_accepting():
            return False
    return True


# how the templates of released models show their form; the tests have no such model
@pytest.mark.parametrize(
    ("template", "form"),
    [
        ('return a json object within <tool_call></tool_call>:\\n<tool_call>\\n{\\"name\\": <function-name>', HERMES),
        ("tags as follows:\n<tool_call>\n{'arguments': <args-dict>, 'name': <function-name>}\n</tool_call>", HERMES),
        ('Respond in the format {"name": function name, "parameters": dictionary of argument name', LLAMA),
        ('<tool_call>\\n" }}\n{{- \'{"name": <function-name>', HERMES),
        ("<tool_call>\n<function=example_function_name>", None),
        ("<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key>", None),
        ("{{ tools | tojson }}", None),
    ],
)
def test_the_form_of_calls_is_read_off_the_template(template: str, form: Form | None) -> None:
    assert next((one for one in FORMS if re.search(one.sign, template)), None) is form
