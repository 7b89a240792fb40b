"""The hidden folder beside a pair in which an export works, and what it leaves for the next one if it does not end.

An engine that is finished and verified is kept, with a `finished.json` in place of its `engine.json`, so that nothing
opens it. The next export of the same pair takes over those whose build hash it wants and removes everything else.
Each export holds a lock in its folder, which the system releases however it ends: what is locked belongs to an export
that runs and is left alone.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from glob import escape
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from engines.base import EngineSpec
from engines.folder import read_json, write_json, write_spec
from mtad.errors import InvalidInput, VerificationFailed

FINISHED = "finished.json"
"""`engine.json` of an engine that is finished, while its pair is not."""


@dataclass(frozen=True)
class StagingFolder:
    """Where one export of a pair works.

    Attributes:
        path: the hidden folder, on the file system of the pair. Engines lie in it under their names.
    """

    path: Path

    def finished(self, name: str) -> bool:
        return (self.path / name / FINISHED).is_file()

    def begin(self, name: str) -> Path:
        folder = self.path / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        return folder

    def finish(self, name: str, spec: EngineSpec) -> None:
        """Say that the engine of this name is finished and verified; its files are on the disk before that is."""
        folder = self.path / name
        for path in folder.rglob("*"):
            if path.is_file():
                with path.open("rb") as file:
                    os.fsync(file.fileno())
        write_spec(folder, spec, FINISHED)

    def take(self, name: str, engine: Path, spec: EngineSpec) -> None:
        """Make a finished engine of one in a pair; it shares its files where the file system has links."""
        folder = self.path / name
        shutil.rmtree(folder, ignore_errors=True)
        ignored = shutil.ignore_patterns("engine.json", FINISHED)
        shutil.copytree(engine, folder, ignore=ignored, copy_function=_link)
        self.finish(name, spec)

    def copy(self, pair: Path, names: list[str], description: dict[str, Any]) -> None:
        """A pair of the finished engines to open while this one is not published; it shares their files."""
        shutil.rmtree(pair, ignore_errors=True)
        for name in names:
            shutil.copytree(self.path / name, pair / name, copy_function=_link)
            (pair / name / FINISHED).rename(pair / name / "engine.json")
        write_json(pair / "pair.json", description)

    def publish(self, folder: Path, names: list[str], description: dict[str, Any]) -> None:
        """Make a pair of finished engines and give it its name, in place of what may be there."""
        pair, previous = self.path / "pair", self.path / "previous"
        shutil.rmtree(pair, ignore_errors=True)
        pair.mkdir()
        write_json(pair / "pair.json", description)
        for name in names:
            (self.path / name).rename(pair / name)
        for name in names:
            (pair / name / FINISHED).rename(pair / name / "engine.json")
        if folder.exists():
            folder.rename(previous)
        pair.rename(folder)


@contextlib.contextmanager
def staging_folder(folder: Path, wanted: Mapping[str, str]) -> Iterator[StagingFolder]:
    """A staging folder for a pair, with the engines that earlier exports have finished of those wanted.

    It is gone when the block ends, unless by an error with finished engines in it, which the error then says.

    Raises:
        InvalidInput: nothing can be written there.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        path, lock = _locked(folder)
    except OSError as error:
        raise InvalidInput("folder", str(folder), f"cannot be written: {error}") from None
    work = StagingFolder(path)
    try:
        _take_over(folder, work, wanted)
        yield work
    except BaseException as error:
        _restore(path, folder)
        kept = [name for name in wanted if work.finished(name)]
        for part in path.iterdir():
            if part.is_dir() and part.name not in kept:
                shutil.rmtree(part, ignore_errors=True)
        if not kept:
            shutil.rmtree(path, ignore_errors=True)
            raise
        note = f"the finished {' and '.join(kept)} is kept for the next export, in {path}"
        if isinstance(error, InvalidInput):
            raise InvalidInput(error.field, error.value, f"{error.problem} ({note})") from error
        if isinstance(error, VerificationFailed):
            raise VerificationFailed(f"{error} ({note})") from error
        raise
    else:
        shutil.rmtree(path, ignore_errors=True)
    finally:
        lock.release()


def _locked(folder: Path) -> tuple[Path, FileLock]:
    while True:
        path = Path(tempfile.mkdtemp(prefix=f".{folder.name}.incomplete-", dir=folder.parent))
        with contextlib.suppress(Timeout, FileNotFoundError):  # an export that began at the same moment removed it
            lock = FileLock(path / "lock")
            lock.acquire(timeout=0)
            if path.is_dir():
                return path, lock


def _take_over(folder: Path, work: StagingFolder, wanted: Mapping[str, str]) -> None:
    """Move wanted engines out of what exports that have ended left; remove the rest."""
    for left in folder.parent.glob(f".{escape(folder.name)}.incomplete-*"):
        if left == work.path:
            continue
        lock = FileLock(left / "lock")
        with contextlib.suppress(Timeout, OSError):  # it runs; or another export was faster
            lock.acquire(timeout=0)
            _restore(left, folder)
            patterns = f"*/{FINISHED}", f"pair/*/{FINISHED}", "pair/*/engine.json"
            for marker in [path for pattern in patterns for path in left.glob(pattern)]:
                name = marker.parent.name
                if name in wanted and not work.finished(name) and _build_hash(marker) == wanted[name]:
                    marker.parent.rename(work.path / name)
                    (work.path / name / marker.name).rename(work.path / name / FINISHED)
            shutil.rmtree(left, ignore_errors=True)
        lock.release()


def _restore(staging: Path, folder: Path) -> None:
    """Give a pair its name back, if an export ended between taking it away and putting another in its place."""
    if (staging / "previous").is_dir() and not folder.exists():
        (staging / "previous").rename(folder)


def _build_hash(description: Path) -> object:
    try:
        return read_json(description.parent, description.name).get("build_hash")
    except InvalidInput:
        return None


def _link(source: str, to: str) -> None:
    try:
        os.link(source, to)
    except OSError:
        shutil.copy2(source, to)
