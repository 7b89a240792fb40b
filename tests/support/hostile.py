"""What a stranger might send to stop a server: what requests for `/v1/completions` say beside their model."""

from __future__ import annotations

import json
from typing import Any

AMBIGUOUS = "start: e\ne: e e | e? e | /(.|\\n)/"
"""Its parser's work for one mask grows with the square of the text so far."""


def reference_chain(length: int) -> str:
    """A JSON schema whose `$ref` names a definition that is only a `$ref` to the next one."""
    definitions: dict[str, Any] = {f"d{index}": {"$ref": f"#/$defs/d{index + 1}"} for index in range(length)}
    definitions[f"d{length}"] = {"type": "integer"}
    return json.dumps({"$ref": "#/$defs/d0", "$defs": definitions})


def rule_chain(length: int) -> str:
    """A grammar of rules that each name the next one."""
    return "\n".join(["start: r0", *(f'r{index}: "a" r{index + 1}' for index in range(length)), f'r{length}: "b"'])


def terminals(count: int) -> str:
    """A grammar that chooses among so many terminals."""
    names = [f"T{index}" for index in range(count)]
    return "\n".join([f"start: {' | '.join(names)}", *(f"{name}: /x{name}[a-z]+/" for name in names)])


def pattern_properties(count: int) -> str:
    """A JSON schema of so many `patternProperties`, each of which has to be kept apart from all others."""
    patterns = {f"^p{index}[a-z]*x$": {"type": "integer"} for index in range(count)}
    return json.dumps({"type": "object", "patternProperties": patterns})


BODIES: dict[str, dict[str, Any]] = {
    "chained references": {"json_schema": reference_chain(1000)},
    "chained rules": {"grammar": rule_chain(5000)},
    "many terminals": {"grammar": terminals(20_000)},
    "ambiguous grammar": {"grammar": AMBIGUOUS, "max_tokens": 60, "min_tokens": 60},
    "large expression": {"regex": "(.*[a-f0].{400}){3}"},
}
