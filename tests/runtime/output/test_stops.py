"""Stop strings by one automaton: where a text ends, and what of it stays."""

from __future__ import annotations

import random
import time

from runtime.output.stops import StopStrings


def earliest(text: str, added: int, stops: tuple[str, ...]) -> int | None:
    """Where the first of the strings begins that end in the last `added` characters."""
    found = [at for stop in stops if (at := text.find(stop, max(0, len(text) - added - len(stop) + 1))) >= 0]
    return min(found, default=None)


def settled(text: str, stops: tuple[str, ...]) -> int:
    """Leading characters that stay whatever follows."""
    return next(
        (at for at in range(len(text)) if any(stop.startswith(text[at:]) and stop != text[at:] for stop in stops)),
        len(text),
    )


def test_it_finds_what_a_search_for_each_string_finds_and_holds_back_as_much() -> None:
    chance = random.Random(0)

    def word(longest: int) -> str:
        return "".join(chance.choices("ab", k=chance.randint(1, longest)))

    for _ in range(1000):
        stops = tuple(word(6) for _ in range(chance.randint(1, 4)))
        automaton, state, text = StopStrings(stops), 0, ""
        for _ in range(12):
            piece = word(4)
            before, text = len(text), text + piece
            state, found = automaton.read(state, piece)
            assert (None if found is None else before + found) == earliest(text, len(piece), stops)
            assert len(text) - automaton.pending(state) == settled(text, stops)


def test_a_character_costs_the_same_however_many_and_long_the_strings_are() -> None:
    def seconds(stops: tuple[str, ...]) -> float:
        automaton, text, state = StopStrings(stops), "ab" * 5000, 0
        taken = []
        for _ in range(5):
            began = time.perf_counter()
            state, _ = automaton.read(state, text)
            taken.append(time.perf_counter() - began)
        return min(taken)

    long = tuple("ab" * (100 + index) + chr(200 + index) for index in range(16))
    assert seconds(long) < 5 * seconds(("\n",))
