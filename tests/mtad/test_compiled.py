"""What is compiled: the same functions, kept under a name that follows the sources, and not before it is needed."""

from __future__ import annotations

import ast
import multiprocessing
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import mtad
from tests.support.block_digest import digests
from tests.support.waiting import PATIENCE

REPOSITORY, PACKAGE = Path(__file__).parents[2], Path(mtad.__file__).parent
FOLDER = "from mtad.compiled import cache_folder\nprint(cache_folder())\nprint(cache_folder())"


def run(*arguments: object, folder: Path = REPOSITORY, **variables: object) -> subprocess.CompletedProcess[str]:
    """Python in a process of its own."""
    environment = {**os.environ, **{name: str(value) for name, value in variables.items()}}
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, cwd=folder, env=environment, check=True, capture_output=True, text=True)


@pytest.fixture(scope="module")
def blocks() -> list[str]:
    return digests()


def test_compiled_blocks_are_those_of_the_same_functions_uncompiled(blocks: list[str]) -> None:
    """Which NumPy does not let read or write beyond an array."""
    found = run("-m", "tests.support.block_digest", NUMBA_DISABLE_JIT=1)
    assert found.stdout.splitlines() == blocks


def test_blocks_are_the_same_on_two_threads_at_once_and_in_a_fork(blocks: list[str]) -> None:
    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(lambda _: digests(), range(2))) == [blocks, blocks]
    with multiprocessing.get_context("fork").Pool(1) as forked:
        assert forked.apply_async(digests).get(timeout=PATIENCE) == blocks


def copied(folder: Path) -> Path:
    shutil.copytree(PACKAGE, folder / "mtad", ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def cache_of(folder: Path, **variables: object) -> tuple[Path, str]:
    """Where a copy of the package keeps what it compiles, and what it says."""
    found = run("-c", FOLDER, folder=folder, PYTHONPATH=folder, **variables)
    first, second = found.stdout.splitlines()
    assert first == second
    return Path(first), found.stderr


def test_a_change_of_any_source_compiles_anew(tmp_path: Path) -> None:
    folder, cache, found = copied(tmp_path / "package"), tmp_path / "cache", list[Path]()
    for changed in ("rules/scored.py", "methods.py"):
        found.append(cache_of(folder, NUMBA_CACHE_DIR=cache)[0])
        with (folder / "mtad" / changed).open("a") as source:
            source.write("# changed\n")
    last, said = cache_of(folder, NUMBA_CACHE_DIR=cache)
    assert len({*found, last}) == 3
    assert last.parent == cache
    assert said == ""


def test_the_same_sources_elsewhere_take_what_was_compiled(tmp_path: Path) -> None:
    code = "import numpy as np\nfrom mtad.random import hash_word\nhash_word(np.zeros(1, np.uint64))\n"
    code += "print(sum(hash_word.stats.cache_hits.values()))"
    places = copied(tmp_path / "here"), copied(tmp_path / "there")
    ran = [run("-c", code, folder=one, PYTHONPATH=one, NUMBA_CACHE_DIR=tmp_path / "cache") for one in places]
    assert [one.stdout for one in ran] == ["0\n", "1\n"]


def test_a_folder_that_cannot_be_written_is_replaced_by_a_temporary_one_and_that_is_said_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "temporary").mkdir()
    found, said = cache_of(REPOSITORY, NUMBA_CACHE_DIR=tmp_path / "file", TMPDIR=tmp_path / "temporary")
    assert found.parent == tmp_path / "temporary"
    assert said.count("are not kept") == 1
    assert str(tmp_path / "file") in said
    assert not found.exists()  # it goes with the process


def test_the_users_cache_folder_is_where_it_is_kept(tmp_path: Path) -> None:
    found, _ = cache_of(REPOSITORY, NUMBA_CACHE_DIR="", XDG_CACHE_HOME=tmp_path)
    assert found.parent == tmp_path / "mtad" / "compiled"
    assert found.stat().st_mode & 0o077 == 0


def test_no_rule_is_longer_than_40_lines() -> None:
    lengths = {}
    for source in sorted(PACKAGE.glob("rules/*.py")):
        for node in ast.walk(ast.parse(source.read_text())):
            if isinstance(node, ast.FunctionDef):
                lengths[f"{source.stem}.{node.name}"] = (node.end_lineno or 0) - node.lineno + 1
    assert len(lengths) > 20
    assert {name: length for name, length in lengths.items() if length > 40} == {}
