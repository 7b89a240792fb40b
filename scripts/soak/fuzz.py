"""Made-up requests against a server: is one of them ever answered with 500, or with nothing?

    python -m scripts.soak.fuzz                                     10,000 requests from the OpenAPI document,
                                                                    5,000 sets of decoding parameters
    python -m scripts.soak.fuzz --cases 200 --parameters 100        a short form
    python -m scripts.soak.fuzz --cases 500 --parameters 250 --seed 7 --add
                                                                    a piece, added to the pieces that are there

schemathesis makes up requests from the server's OpenAPI document, right and wrong ones. Sets of parameters combine
fields of `DecodingParams`, a few in each, with values at, beside and far beyond their limits. Writes fuzz.json; the
exit code is 1 if anything was answered with 500, or not at all. `--add` adds the answers to those of fuzz.json, which
names the seeds it is made of; a seed that is there already is refused.
"""

from __future__ import annotations

import json
import math
import random
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error

from mtad.errors import InvalidInput
from mtad.methods import METHODS
from mtad.params import DecodingParams
from runtime.commands.entry import Parser, command
from runtime.server.schema import PARAMETERS
from scripts.clients.served import MODEL, served
from scripts.machine import machine
from scripts.paths import RESULTS, ROOT
from scripts.soak.figures import finish

PATIENCE = 120.0
"""Seconds after which an answer is taken to never come."""
THREADS = 8

PARTS = ("parameters", "positive", "negative")
"""What is sent: sets of parameters, requests as the OpenAPI document wants them, wrong ones."""

Statuses = dict[str, Counter[int]]

_FITTING: dict[type, list[Any]] = {bool: [True, False], int: [1, 2, 4, 8], float: [0.0, 0.5, 0.9, 1.0, 2.0]}
_NUMBERS = [
    0,
    1,
    -1,
    2,
    20,
    21,
    0.5,
    -0.5,
    1.5,
    1e-300,
    1e-46,
    1e-37,
    1e37,
    1e38,
    1e308,
    2**31,
    2**63 - 1,
    2**63,
    10**30,
]
_OTHERS: list[Any] = [
    None,
    True,
    False,
    "",
    "1",
    "a",
    [],
    [0],
    [1, 2],
    ["a"],
    {},
    {"0": 1.0},
    {"a": 1},
    [[]],
    "\ud83d\ude00" * 5,
]
_OWN: dict[str, list[Any]] = {
    "method": [*METHODS, "none"],
    "speculation": ["fixed", "adaptive", "none"],
    "stop": ["a", ["a", "b"], ["a"] * 17, "x" * 5000],
    "logit_bias": [{"1": 5.0}, {"1": 1e308}, {"-1": 1}, {"9" * 5000: 1.0}, {"1": -100.0, "2": 100}],
    "branching": [[2, 1], [1] * 8, [9, 9, 9], [0]],
    "regex": ["[a-z]+", "(", "(a*)*b", "a{1000}", "\\d+"],
    "grammar": ["start: /a+/", "start: x", "start: e\ne: e e | /a/"],
    "json_schema": ['{"type": "object"}', '{"$ref": "#"}', "{", {"type": "integer"}, {"enum": []}],
    "stop_token_ids": [[1], [5000], [1] * 2000],
    "n": [1, 2, 128, 129],
}
"""Values that fit a field, and that nearly do."""


def parameter_sets(count: int, number: int) -> Iterator[dict[str, Any]]:
    """So many bodies for `/v1/completions`, made from a seed."""
    chance = random.Random(number)
    for _ in range(count):
        body: dict[str, Any] = {"model": MODEL, "prompt": "S"}
        for name in chance.sample(PARAMETERS, chance.choice((1, 2, 2, 3, 5))):
            fitting = _OWN.get(name) or _FITTING.get(type(getattr(DecodingParams, name, None)), [None])
            some = chance.choices([fitting, _NUMBERS, _OTHERS], (8, 2, 1))[0]
            body[name] = chance.choice(some)
        longest = body.setdefault("max_tokens", 4)
        if isinstance(longest, int) and 8 < longest < 2**31:
            body["max_tokens"] = 8
        body["stream"] = chance.random() < 0.3
        yield body


def send(url: str, body: dict[str, Any]) -> tuple[int, str]:
    """Status of a body's answer, 0 if there is none, and the answer; an error in a stream counts as 500."""
    address = urlsplit(url)
    connection = HTTPConnection(address.hostname or "", address.port, timeout=PATIENCE)
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
        response = connection.getresponse()
        text = response.read().decode()
    except OSError as error:
        return 0, f"{type(error).__name__}: {error}"
    finally:
        connection.close()
    return (500 if response.status == 200 and 'data: {"error"' in text else response.status), text


def fuzz_parameters(url: str, count: int, number: int) -> tuple[Statuses, list[str]]:
    """Send sets of parameters; what they were answered, and what was wrong."""
    bodies = list(parameter_sets(count, number))
    with ThreadPoolExecutor(THREADS) as pool:
        answers = list(pool.map(lambda body: send(url, body), bodies))
    seen = Counter(status for status, _ in answers)
    wrong = [
        f"{json.dumps(b)[:300]} -> {s} {t[:300]}" for b, (s, t) in zip(bodies, answers, strict=True) if s in (0, 500)
    ]
    return {"parameters": seen}, wrong


def fuzz_schema(url: str, cases: int, number: int, mode: GenerationMode) -> tuple[Statuses, list[str]]:
    """Requests made up from the OpenAPI document; what they were answered, and what was wrong.

    Args:
        url: of the server.
        cases: requests of all operations together; those with a body get nearly all of them.
        number: seed.
        mode: requests as the document wants them, or wrong ones.
    """
    seen, wrong = Statuses(), list[str]()
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
    operations = [cast("Any", found).ok() for found in schema.get_all_operations()]
    if mode is GenerationMode.NEGATIVE:
        operations = [operation for operation in operations if operation.body]  # nothing can be wrong in others
    others = 3 * sum(not operation.body for operation in operations)
    each = math.ceil(max(1, cases - others) / sum(bool(operation.body) for operation in operations))
    for operation in operations:
        seen[operation.label] = Counter()

        @seed(number)
        @settings(
            max_examples=each if operation.body else 3,
            deadline=None,
            database=None,
            phases=(Phase.explicit, Phase.generate),
            suppress_health_check=list(HealthCheck),
        )
        @given(operation.as_strategy(generation_mode=mode), st.integers(0, 9), st.just(operation.label))
        def one(case: Any, chance: int, label: str) -> None:
            if isinstance(case.body, dict) and chance:  # most made-up names are not the model's: go further than that
                case.body["model"] = MODEL
                if isinstance(case.body.get("max_tokens"), int):
                    case.body["max_tokens"] = min(case.body["max_tokens"], 8)
            try:
                response = case.call(timeout=PATIENCE)
                seen[label][response.status_code] += 1
                case.validate_response(response, checks=[not_a_server_error])
            except Exception as error:  # all of them are wanted, not the smallest that fails first
                wrong.append(f"{label}: {type(error).__name__}: {error}"[:600])

        one()
    return seen, wrong


@command
def main() -> None:
    parser = Parser(prog="scripts.soak.fuzz", description="Made-up requests against a server.")
    parser.add_argument("--pair", type=Path, default=ROOT / "build" / "demo-pair", help="(default %(default)s)")
    parser.add_argument("--cases", type=int, default=10_000, help="of schemathesis (default %(default)s)")
    parser.add_argument("--parameters", type=int, default=5_000, help="sets of them (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="(default %(default)s)")
    parser.add_argument("--add", action="store_true", help="add to the fuzz.json that is there, with another seed")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder to write to")
    options = parser.parse_args()
    file = options.results / "fuzz.json"
    before = json.loads(file.read_text("utf-8")) if options.add and file.exists() else {}
    if options.seed in before.get("seeds", []):
        raise InvalidInput("seed", options.seed, f"{file} has it already; give another one")
    ran_on = machine()
    with served(options.pair) as url:
        parts = [fuzz_parameters(url, options.parameters, options.seed)]
        parts += [fuzz_schema(url, math.ceil(options.cases / 2), options.seed, mode) for mode in GenerationMode]
        alive = send(url, {"model": MODEL, "prompt": "S", "max_tokens": 2})[0] == 200
    wrong = before.get("wrong", []) + [words for _, some in parts for words in some]
    answers = {name: seen for name, (seen, _) in zip(PARTS, parts, strict=True)}
    for name, known in before.get("answers", {}).items():
        for label, counts in known.items():
            answers[name].setdefault(label, Counter()).update({int(status): n for status, n in counts.items()})
    total = {name: sum(sum(seen.values(), Counter()).values()) for name, seen in answers.items()}
    report = {
        "machine": ran_on,
        "seeds": [*before.get("seeds", []), options.seed],
        "parameter_sets": total.pop(PARTS[0]),
        "schemathesis_cases": sum(total.values()),
        "schemathesis": schemathesis.__version__,
        "answers": {
            name: {label: dict(sorted(counts.items())) for label, counts in seen.items()}
            for name, seen in answers.items()
        },
        "wrong": wrong[:20],
        "passed": not wrong and alive and before.get("passed", True),
    }
    finish("scripts.soak.fuzz", "fuzz.json", report, options.results)


if __name__ == "__main__":
    main()
