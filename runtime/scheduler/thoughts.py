"""Thoughts: the parts of a text between two tags, which a reasoning model writes before its answer. No torch."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

TAGS = (
    ("<think>", "</think>"),  # Qwen3, DeepSeek-R1 and many others
    ("<|channel|>analysis<|message|>", "<|end|><|start|>assistant<|channel|>final<|message|>"),  # GPT-OSS
    ("<|channel>thought\n", "<channel|>"),  # Gemma 4, as transformers 5.23.0 has them in cli/serving/utils.py
)
"""Tags that are known by the tokens of a vocabulary."""

BLANK = 8
"""Tokens of white space that a prompt may have behind a tag at its end."""


def known_tags(tokenizer: Any) -> tuple[str, str] | None:
    """The tags of a tokenizer of transformers: by its response template, or by its added tokens; None if unknown."""
    fields = (getattr(tokenizer, "response_template", None) or {}).get("fields", {})
    for name in ("reasoning_content", "thinking"):
        tags = fields.get(name, {}).get("open"), fields.get(name, {}).get("close")
        if all(isinstance(tag, str) for tag in tags):
            return tags
    added = tokenizer.get_added_vocab().keys()
    return next((tags for tags in TAGS if added >= set(re.findall(r"<[^<>]+>", "".join(tags)))), None)


def ends_with(prompt: Sequence[int], tag: Sequence[int], tokenizer: Any) -> bool:
    """Whether a prompt ends with a tag, perhaps with white space behind it."""
    for end in range(len(prompt), max(0, len(prompt) - BLANK), -1):
        if list(prompt[max(0, end - len(tag)) : end]) == list(tag):
            return not tokenizer.decode(list(prompt[end:])).strip()
    return False


@dataclass
class Thoughts:
    """Which tokens of one text are thoughts, followed as they come.

    Inside a thought only the closing tag is looked for, and outside only the opening one: tags do not nest. A tag is
    the tokens that the tokenizer makes of it.

    Attributes:
        opening, closing: the tags' token ids.
        inside: whether the next token belongs to a thought.
        budget: tokens of a thought at most, without its closing tag.
        may_open, opens_once: what `runtime.constraints.constraint.Constraint.begin` takes and gives.
        length: tokens of the thought so far.
        switches: where tags lie in the text, as token numbers from and to; every second one opens a thought.
    """

    opening: list[int]
    closing: list[int]
    inside: bool
    budget: int | None = None
    may_open: bool = False
    opens_once: bool = False
    length: int = 0
    switches: list[tuple[int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._inside_first = self.inside

    @property
    def tag(self) -> list[int]:
        """The tag that ends the part that the next token belongs to."""
        return self.closing if self.inside else self.opening

    def read(self, text: Sequence[int], tokens: list[int], cut: bool) -> tuple[list[int], bool]:
        """Follow what a block adds to a text.

        Args:
            cut: keep nothing behind a tag.

        Returns:
            the tokens that are kept, and whether the last of them stands in the place of another: where a thought has
            as many tokens as it may, its closing tag does.
        """
        before = min(len(text), max(len(self.opening), len(self.closing)))  # of a long text, its end says enough
        whole, base = [*text[len(text) - before :], *tokens], len(text) - before
        for end in range(before + 1, len(whole) + 1):
            forced, free = False, self.switches[-1][1] if self.switches else 0
            if self.inside and self.budget is not None and self.length >= self.budget:
                wanted = self.closing[self.begun(whole[max(0, free - base) : end - 1])]
                forced, whole[end - 1] = whole[end - 1] != wanted, wanted
            self.length += self.inside
            start = end - len(self.tag)
            switched = base + start >= free and whole[start:end] == self.tag
            switched = switched and (self.inside or not self.opens_once or base + start == 0)
            if switched:
                self.switches.append((base + start, base + end))
                self.inside, self.length = not self.inside, 0
            if forced or (switched and cut):
                return whole[before:end], forced
        return tokens, False

    def begun(self, text: Sequence[int]) -> int:
        """Tokens at a text's end that may be the beginning of a tag."""
        tag = self.tag
        return next((n for n in range(min(len(tag) - 1, len(text)), 0, -1) if list(text[-n:]) == tag[:n]), 0)

    def split(self, text: str, offsets: Sequence[int], start: int = 0, end: int | None = None) -> tuple[str, str]:
        """What of a text, between two characters, are thoughts, and what is the answer; tags are neither.

        Args:
            offsets: characters before each token.
        """
        parts, inside, at = ["", ""], self._inside_first, 0
        places = [tuple(offsets[n] if n < len(offsets) else len(text) for n in tag) for tag in self.switches]
        end = len(text) if end is None else end
        for low, high in [*places, (end, end)]:
            parts[inside] += text[max(at, start) : min(low, end)]
            at, inside = high, not inside
        return parts[1], parts[0]
