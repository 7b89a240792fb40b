"""What a stranger might send to stop a server: bodies that the tests and the soak share.

Each is what a request for `/v1/completions` says beside its model. Whatever is answered, it is answered to its sender
alone: other requests keep their pace, and the process lives on.
"""

from __future__ import annotations

import json
from typing import Any

AMBIGUOUS = "start: e\ne: e e | e? e | /(.|\\n)/"
"""Its parser's work for one mask grows with the square of the text so far."""


def attacks() -> dict[str, dict[str, Any]]:
    """Bodies by name: a few fields each; `prompt` and `max_tokens` where the rest is not enough."""
    return {
        "chained references": {"json_schema": reference_chain(1000)},
        "chained rules": {"grammar": rule_chain(5000)},
        "chained terminals": {"grammar": terminal_chain(20_000)},
        "many terminals": {"grammar": terminals(20_000)},
        "pattern properties": {"json_schema": pattern_properties(700)},
        "ambiguous grammar": {"grammar": AMBIGUOUS, "max_tokens": 400, "min_tokens": 400},
        **{f"large expression {index}": {"regex": large_expression(index)} for index in range(12)},
        "no float32 holds top_p": {"top_p": 1e-300},
        "no float32 holds accept_threshold": {"method": "modal", "accept_threshold": 1e308},
        "a token of 5,000 digits": {"logit_bias": {"9" * 5000: 1.0}},
        "a language shorter than min_tokens": {"regex": "[ab]{2,3}", "min_tokens": 30, "max_tokens": 40},
    }


def reference_chain(length: int) -> str:
    """A JSON schema whose `$ref` names a definition that is only a `$ref` to the next one."""
    definitions: dict[str, Any] = {f"d{index}": {"$ref": f"#/$defs/d{index + 1}"} for index in range(length)}
    definitions[f"d{length}"] = {"type": "integer"}
    return json.dumps({"$ref": "#/$defs/d0", "$defs": definitions})


def rule_chain(length: int) -> str:
    """A grammar of rules that each name the next one."""
    rules = [f'r{index}: "a" r{index + 1}' for index in range(length)]
    return "\n".join(["start: r0", *rules, f'r{length}: "b"'])


def terminals(count: int) -> str:
    """A grammar that chooses among so many terminals."""
    names = [f"T{index}" for index in range(count)]
    return "\n".join([f"start: {' | '.join(names)}", *(f"{name}: /x{name}[a-z]+/" for name in names)])


def terminal_chain(length: int) -> str:
    """A grammar of terminals that each name the next one."""
    rules = [f'T{index}: "a" T{index + 1}' for index in range(length)]
    return "\n".join(["start: T0", *rules, f'T{length}: "b"'])


def pattern_properties(count: int) -> str:
    """A JSON schema of so many `patternProperties`, each of which has to be kept apart from all others."""
    patterns = {f"^p{index}[a-z]*x$": {"type": "integer"} for index in range(count)}
    return json.dumps({"type": "object", "patternProperties": patterns})


def large_expression(index: int) -> str:
    """A short regular expression of a large automaton; another one for each index."""
    return f"(.*[a-f{index}].{{{400 + index}}}){{3}}"
