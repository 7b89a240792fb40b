"""The one error a user's input can cause (it names the field, the value and the remedy), and how commands report it."""

from __future__ import annotations

import contextlib
import os
import reprlib
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 300


def shown(value: object) -> str:
    """A value as errors show it: 300 characters at most, and without looking at all of a large one."""
    text = _SHORT.repr(value)
    return text if len(text) <= 300 else f"{text[:300]}…"


def first_line(error: object) -> str:
    """The first line that the text of an exception, or of a library, has; the exception's name where it has none."""
    return next(filter(None, map(str.strip, str(error).splitlines())), type(error).__name__)


def no_folder(path: object) -> str:
    """What is wrong with a path that is no folder."""
    return "a file, not a folder" if os.path.exists(str(path)) else "no such folder"


class InvalidInput(ValueError):
    """A value given by a user is not usable.

    Raised before any work is done. Commands print it as one line and exit with code 2.

    Args:
        field: name of the option, request field or file that is wrong.
        value: the value that was given; None where there is none.
        problem: what is wrong with it, and what to give instead.
    """

    def __init__(self, field: str, value: object, problem: str) -> None:
        self.field, self.value, self.problem = field, value, problem
        super().__init__(f"{field}: {problem}" if value is None else f"{field} = {shown(value)}: {problem}")


@contextlib.contextmanager
def refused_as(field: str, value: object, problem: str) -> Iterator[None]:
    """Turn any exception of a library raised inside into an `InvalidInput`: `problem`, then its text, in one line.

    An `InvalidInput` passes unchanged. The panics of libraries in Rust, which are no `Exception`, count as well.
    """
    try:
        yield
    except InvalidInput:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise InvalidInput(field, value, f"{problem}: {' '.join(str(error).split())}") from error


def imported(module: str, field: str, value: object, remedy: str) -> ModuleType:
    """A library's module, for what is imported when it is first needed.

    Raises:
        InvalidInput: it, or a library of its own, cannot be loaded; `remedy` says what to do.
    """
    try:
        return import_module(module)
    except (ImportError, OSError) as error:
        raise InvalidInput(field, value, f"{module} cannot be imported ({error}); {remedy}") from error


def read_text(field: str, path: Path) -> str:
    """The text of a file that an option names.

    Raises:
        InvalidInput: it cannot be read, or is not UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput(field, str(path), f"cannot be read: {getattr(error, 'strerror', error)}") from None


class CapacityExceeded(InvalidInput):
    """A request can never fit the engines it was sent to."""


class Failed(RuntimeError):
    """Something broke that no other value would mend. Commands print it as one line and exit with code 1."""


class VerificationFailed(Failed):
    """An engine does not compute what its checkpoint computes."""
