"""The table of attacks, and the strangers who make them."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import random
import signal
import time
from typing import Any, NamedTuple

from scripts.clients.served import Server
from scripts.soak.wire import (
    FEW,
    Send,
    damage,
    endless,
    fields,
    filled,
    get,
    in_chunks,
    kill_board,
    partly,
    raw,
    strike,
)


class Attack(NamedTuple):
    """A line of the table: how each connection sends it, which statuses may come back (0: none), how many at once.

    Those on replicas send no request: 200 means that the replicas are as they were.
    """

    name: str
    send: Send
    answers: tuple[int, ...]
    connections: int = 1
    on_replicas: bool = False


def chain(kind: str, length: int) -> str:
    """A grammar of rules (`r`) or terminals (`T`) that each name the next one."""
    rules = [f'{kind}{at}: "a" {kind}{at + 1}' for at in range(length)]
    return "\n".join([f"start: {kind}0", *rules, f'{kind}{length}: "b"'])


REFERENCES = {f"d{at}": {"$ref": f"#/$defs/d{at + 1}"} for at in range(1000)} | {"d1000": {}}
TERMINALS = [f"T{at}: /xT{at}[a-z]+/" for at in range(20_000)]
CHOICE = "start: " + " | ".join(f"T{at}" for at in range(20_000))
PATTERNS = {f"^p{at}[a-z]*x$": {"type": "integer"} for at in range(700)}
AMBIGUOUS = "start: e\ne: e e | e? e | /(.|\\n)/"
"""Its parser's work for one mask grows with the square of the text so far."""
POST = "POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\n"
LONG = POST + "content-type: application/json\r\ncontent-length: 99\r\n\r\n"
ASKED = LONG + "{}".rjust(99)
TRAILERS = POST + "content-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n"
STREAM: dict[str, Any] = {"stream": True, "ignore_eos": True, "max_tokens": 48}
HEALTH = "GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n"
CHAT = "/v1/chat/completions"
PART = '{"type": "text", "text": "a"}'
OTHER = '"messages": [{"role": "user", "content": [...]}], "model": "other"'
BYTES = '{"model": "demo", "prompt": "' + "a" * 200_000 + '"}'
TINY = [{"role": "user", "content": "a"}] * 1500


def words(at: int) -> list[str]:
    """As many bad words as a request may have, others for each connection."""
    return [f"{(1024 * at + word) % 16**4:04x}" for word in range(1024)]


def forged(at: int, request: bytes) -> bytes:
    """A request that says to come from elsewhere."""
    return request.replace(b"\r\n", f"\r\nx-forwarded-for: 10.0.{at // 256 % 256}.{at % 256}\r\n".encode(), 1)


SLOW = (200, 400, 504)
"""A grammar is served, refused, or not compiled in time: slow ones are compiled when nothing else runs."""

ATTACKS = [
    Attack("numbers that are no tokens", filled('"prompt": [...]', "1.5"), (413,)),
    Attack("a wrong number behind many tokens", filled('"prompt": [..., 1.5]', "1", FEW // 3), (400,)),
    Attack("empty prompts", filled('"prompt": [...]', "[]", FEW // 3), (400,)),
    Attack("objects", filled('"prompt": [...]', "{}", FEW // 3), (400,)),
    Attack("messages that are numbers", filled('"messages": [...]', "1", FEW // 3), (400,)),
    Attack("messages without anything", filled('"messages": [...]', "{}", FEW // 3), (400,)),
    Attack("tools without anything", filled('"messages": [], "tools": [...]', "{}", FEW // 3), (400,)),
    Attack("unknown fields", filled("...", '"k#":1'), (413,)),
    Attack("fewer unknown fields", filled("...", '"k#":1', FEW), (400,)),
    Attack("a large bias", filled('"prompt": "S", "logit_bias": {...}', '"k#":1', FEW), (400,)),
    Attack("brackets", filled('"prompt": ...', "[", between=""), (413,)),
    Attack("a long prompt", filled('"prompt": "..."', "word", between=" "), (400,)),
    Attack("a prompt of spaces", filled('"prompt": "..."', " ", between=""), (400,)),
    Attack("a prompt of escapes", filled('"prompt": "..."', "\\u00e9", between=""), (400,)),
    Attack("a number of many digits", filled('"prompt": ...', "9", between=""), (400,)),
    Attack("long stop strings", filled('"prompt": "S", "stop": [...]', f'"{"ab" * 512}"', 16_000), (400,)),
    Attack("many headers", endless(POST, "name: value\r\n"), (0, 400)),
    Attack("a long header", endless(POST + "name: ", "x"), (0, 400)),
    Attack("a long address", endless("GET /", "x"), (0, 400)),
    Attack("headers behind a request", endless(ASKED + "GET /health HTTP/1.1\r\n", "name: value\r\n"), (0, 400)),
    Attack("trailers", endless(TRAILERS, "name: value\r\n"), (0, 400)),
    Attack("a long trailer", endless(TRAILERS + "name: ", "x"), (0, 400)),
    Attack("requests behind a request", endless(ASKED, HEALTH), (0, 400)),
    Attack("a body that does not end", raw(lambda _: (LONG + "{").encode()), (408, 503), 64),
    Attack("references in a chain", raw(fields(json_schema={"$ref": "#/$defs/d0", "$defs": REFERENCES})), SLOW),
    Attack("rules in a chain", raw(fields(grammar=chain("r", 5000))), SLOW),
    Attack("terminals in a chain", raw(fields(grammar=chain("T", 20_000))), SLOW),
    Attack("many terminals", raw(fields(grammar="\n".join([CHOICE, *TERMINALS]))), SLOW),
    Attack("pattern properties", raw(fields(json_schema={"patternProperties": PATTERNS})), SLOW),
    Attack("an ambiguous grammar", raw(fields(grammar=AMBIGUOUS, max_tokens=400, min_tokens=400)), SLOW),
    Attack("large expressions", raw(fields(regex=lambda at: f"(.*[a-f].{{{400 + at % 12}}}){{3}}")), SLOW, 12),
    Attack("a language shorter than min_tokens", raw(fields(regex="[ab]{2,3}", min_tokens=30, max_tokens=40)), (400,)),
    Attack("no float32 holds top_p", raw(fields(top_p=1e-300)), (400,)),
    Attack("no float32 holds accept_threshold", raw(fields(method="relaxed", accept_threshold=1e308)), (400,)),
    Attack("a token of 5,000 digits", raw(fields(logit_bias={"9" * 5000: 1.0})), (400,)),
    Attack("more requests than may wait", raw(fields(max_tokens=8)), (200, 429), 96),
    Attack("many bad words", raw(fields(bad_words=words, max_tokens=4)), (200, 429), 100),
    Attack("chats of many messages", raw(fields(CHAT, messages=TINY)), (400,), 64),
    Attack("parts of a chat for another model", filled(OTHER, PART, FEW), (404,), 64),
    # a connection that is closed while more comes may lose its 408
    Attack("a body in chunks of a byte", in_chunks(BYTES), (0, 400, 408), 8),
    Attack("metrics without waiting", get("/metrics", 64), (200,), 16),
    Attack(
        "scores of whole prompts", raw(fields(prompt="the " * 450, prompt_logprobs=20, max_tokens=1)), (200, 429), 12
    ),
    Attack("a template that loops", raw(fields(CHAT, messages=[{"role": "user", "content": "loop"}])), SLOW, 12),
    Attack("a grammar of a bad word", raw(fields(grammar='start: "S"', bad_words=["S"], max_tokens=8)), (200, 400), 8),
    Attack(
        "an odd Accept header",
        get("/metrics", headers="accept: application/openmetrics-text; version=\xff;q=;;,\r\n"),
        (200,),
    ),
    Attack("a long header's name", get("/health", headers=f"{'n' * 60_000}: value\r\n"), (0, 200, 400), 64),
    Attack("forged addresses", raw(lambda at: forged(at, fields(max_tokens=8)(at))), (200, 429), 96),
    Attack("leaves in the middle", partly(fields(**STREAM), 3, 0.0), (200, 429), 8),
    Attack("reads slowly", partly(fields(**STREAM), 8, 0.2), (200, 429), 4),
    Attack("never reads", partly(fields(**STREAM, prompt=["S"] * 8, logprobs=20), 0, 1.0), (0,), 4),
    Attack("says nothing, or half of a head", partly(lambda at: POST[: at % 2 * 20].encode(), 0, 1.0), (0,), 400),
    Attack("a killed replica", strike(signal.SIGKILL), (200,), on_replicas=True),
    Attack("a stopped replica", strike(signal.SIGSTOP), (200,), on_replicas=True),
    Attack("a killed board", kill_board, (200,), on_replicas=True),
    Attack("a damaged folder", damage, (200,), on_replicas=True),
]


MIXTURE = "all of them at once"
REFUSALS = (0, 200, 400, 404, 408, 413, 429, 503, 504)
"""What may come back of a mixture, where attacks wait for each other."""

Made = tuple[str, float, float, list[int]]
"""An attack that was made: its name, when it began and ended (`time.monotonic`), and what came back."""


def strangers(server: Server, attacks: list[str], seconds: float) -> list[Made]:
    """Make the attacks of these names, the first one, then all in ever new orders, for so many seconds.

    The process that makes them has a lower priority: real strangers would not use this machine's processors.
    """
    os.nice(19)
    made, numbers, known = list[Made](), itertools.count(), [one for one in ATTACKS if one.name in attacks]

    async def make(name: str, *attacks: Attack) -> None:
        began = time.monotonic()
        sent = (one.send(server, next(numbers)) for one in attacks for _ in range(one.connections))
        answers = list[int]()
        try:
            found = await asyncio.gather(*sent, return_exceptions=True)
            answers = [0 if isinstance(answer, BaseException) else answer for answer in found]
        finally:  # one that the end interrupts has no answers, but what streams waited meanwhile
            made.append((name, began, time.monotonic(), answers))

    async def attack() -> None:
        await make(known[0].name, known[0])  # however short the time is
        async with asyncio.timeout(seconds):
            while True:
                for one in random.sample(known, len(known)):
                    await make(one.name, one)
                await make(MIXTURE, *(one for one in known if not one.on_replicas))

    with contextlib.suppress(TimeoutError):
        asyncio.run(attack())
    return made
