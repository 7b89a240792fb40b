"""What a stranger might send to stop a server, byte by byte: each is answered, or its connection closed."""

from __future__ import annotations

SIZE = 4 * 2**20 - 1024
"""Bytes of a body that a server takes by default, nearly."""


def bodies(model: str, size: int = SIZE) -> dict[str, bytes]:
    """Bodies of about so many bytes for either route, by name, each refused with a status from 400 to 499."""
    named = b'{"model": "%b", ' % model.encode()
    head, chat = named + b'"prompt": ', named + b'"messages": '

    def many(item: bytes, count: int = size) -> bytes:
        return b",".join([item] * (count // (len(item) + 1)))

    def keys(count: int) -> bytes:
        return b",".join(b'"k%d":1' % index for index in range(count // 12))

    few = min(size, 200_000)  # as many values as a server reads
    return {
        "numbers that are no tokens": head + b"[" + many(b"1.5") + b"]}",
        "fewer of them": head + b"[" + many(b"1.5", few // 2) + b"]}",
        "a wrong number behind many tokens": head + b"[" + many(b"1", few // 3) + b",1.5]}",
        "many empty prompts": head + b"[" + many(b"[]", few // 3) + b"]}",
        "fewer objects": head + b"[" + many(b"{}", few // 3) + b"]}",
        "fewer messages": chat + b"[" + many(b"1", few // 3) + b"]}",
        "messages without anything": chat + b"[" + many(b"{}", few // 3) + b"]}",
        "tools without anything": chat + b'[], "tools": [' + many(b"{}", few // 3) + b"]}",
        "a function of many parameters": chat + b'[], "tools": [{"type": "function", "function": '
        b'{"name": "f", "parameters": {"properties": {' + keys(few) + b"}}}}]}",
        "fewer unknown fields": b"{" + keys(few) + b"}",
        "a large bias": head + b'"S", "logit_bias": {' + keys(few) + b"}}",
        "brackets": head + b"[" * size,
        "a long prompt": head + b'"' + b"word " * (size // 5) + b'"}',
        "a prompt of spaces": head + b'"' + b" " * size + b'"}',
        "a prompt of escapes": head + b'"' + b"\\u00e9" * (size // 6) + b'"}',
        "a number of many digits": head + b"9" * size + b"}",
        "long stop strings": head + b'"S", "stop": [' + many(b'"%b"' % (b"ab" * 512), 16 * 1028) + b"]}",
    }


def heads(model: str, size: int) -> dict[str, tuple[bytes, bytes, bytes]]:
    """Heads and trailers without an end: what begins them, what is repeated to about `size` bytes, what ends them."""
    ask = b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\n"
    chunked = ask + b"transfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n"
    health = b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n"
    waiting = ask + b"content-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
    body = b'{"model": "%b", "prompt": "S", "max_tokens": 150, "ignore_eos": true, "stream": true}' % model.encode()
    asked = waiting % (len(body), body)
    field, long = b"name: value\r\n", b"x" * 1024

    def filled(begin: bytes, part: bytes) -> tuple[bytes, bytes, bytes]:
        return begin, part * (size // len(part)), b"\r\n\r\n"

    return {
        "many headers": filled(ask, field),
        "a long header behind a request": filled(asked + b"GET /health HTTP/1.1\r\nname: ", long),
        "a long trailer": filled(chunked + b"name: ", long),
        "requests behind a request": filled(asked, health),
    }
