"""How a conversation is written: the special tokens in front of turns, and the template that puts them there."""

from __future__ import annotations

END = "<|endoftext|>"
SYSTEM, USER, ASSISTANT = "<|system|>", "<|user|>", "<|assistant|>"
SPECIAL = (END, SYSTEM, USER, ASSISTANT)
"""Tokens 0 to 3 of the demo's vocabulary."""

TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] not in ('system', 'user', 'assistant') %}"
    "{{ raise_exception('roles are system, user and assistant') }}"
    "{% endif %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def turn(role: str, content: str) -> str:
    """One message as the template writes it; the end token behind an answer is the trainer's."""
    return f"<|{role}|>{content}"
