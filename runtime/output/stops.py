"""Stop strings: where a text ends, and how much of it stays whatever follows, in constant time per character."""

from __future__ import annotations

from functools import lru_cache


class StopStrings:
    """An automaton that finds all of several strings in one pass (Aho and Corasick, doi 10.1145/360825.360855).

    A state stands for the longest end of the text that some string begins with.

    Args:
        strings: none of them empty.
    """

    def __init__(self, strings: tuple[str, ...]) -> None:
        self._next: list[dict[str, int]] = [{}]
        ends = [0]  # of each state, characters of the longest string that ends there; 0 if none does
        self._pending = [0]  # of each state, characters at the text's end that may yet become part of a string
        self._shorter = [0]  # of each state, that of the next shorter end of the text
        begun = dict.fromkeys(dict.fromkeys(strings), 0)
        for depth in range(max(map(len, strings), default=0)):  # level by level: shorter ends are known before
            for string, state in begun.items():
                if depth >= len(string):
                    continue
                character, known = string[depth], self._next[state].get(string[depth])
                if known is None:
                    known = self._next[state][character] = len(self._next)
                    self._next.append({})
                    shorter = self._step(self._shorter[state], character) if state else 0
                    self._shorter.append(shorter)
                    ends.append(ends[shorter])
                    self._pending.append(self._pending[shorter])
                begun[string] = known
                if depth + 1 == len(string):
                    ends[known] = len(string)
                else:
                    self._pending[known] = depth + 1
        self._ends = ends

    def _step(self, state: int, character: str) -> int:
        while character not in self._next[state]:
            if not state:
                return 0
            state = self._shorter[state]
        return self._next[state][character]

    def read(self, state: int, text: str) -> tuple[int, int | None]:
        """Go on from a state with more text.

        Returns:
            the state then, and where the earliest string begins of those that end in `text`, in characters from the
            beginning of `text` (below 0 if it began before); None if none does.
        """
        found: int | None = None
        for at, character in enumerate(text):
            state = self._step(state, character)
            if self._ends[state] and (found is None or at + 1 - self._ends[state] < found):
                found = at + 1 - self._ends[state]
        return state, found

    def pending(self, state: int) -> int:
        """Characters at the end of the text that may yet be the beginning of a string."""
        return self._pending[state]


automaton = lru_cache(maxsize=16)(StopStrings)
"""The automaton of several strings; clients ask for the same ones again."""
