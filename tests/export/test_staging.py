"""Exports that are interrupted or come again: what is built, what is kept, and that nothing half done opens."""

from __future__ import annotations

import ast
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock
from transformers import AutoTokenizer

from engines import open_engine
from engines.base import EngineSpec
from engines.folder import read_spec
from export.build_hash import WRITES_NO_ENGINE, build_hash, code_of, engine_sources, hash_of
from export.options import ExportOptions
from export.pair import export_pair
from export.staging import FINISHED, staging_folder
from mtad.errors import InvalidInput, VerificationFailed
from runtime.pair import open_pair
from scripts.paths import ROOT
from tests.support.forked import run_script

OPTIONS: dict[str, Any] = {"rows": 2, "capacity": 128, "format": "torch"}
SPEC = EngineSpec("LlamaForCausalLM", 2, 2, 16, 300, "float32", 4, 256, (0,), "torch", "a", {"torch": "2"})
HASHES = {"target": "1" * 64, "auxiliary": "2" * 64}


@pytest.fixture
def stages() -> list[str]:
    """What the last exports did."""
    return []


@pytest.fixture
def export(checkpoints: tuple[Path, Path], tmp_path: Path, stages: list[str]) -> Callable[..., bool]:
    """Export the pair to `tmp_path`/pair; keywords override."""

    def run(overwrite: bool = False, **changes: Any) -> bool:
        target, auxiliary = map(str, checkpoints)
        stages.clear()
        asked = ExportOptions(**{**OPTIONS, "target": target, "auxiliary": auxiliary, **changes})
        return export_pair(tmp_path / "pair", asked, overwrite, stages.append)

    return run


@pytest.fixture
def other(write_checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> str:
    """Another auxiliary."""
    return str(write_checkpoint(tmp_path_factory.mktemp("other") / "auxiliary", seed=9, num_hidden_layers=1))


def hidden(folder: Path) -> list[Path]:
    """What exports left in a folder."""
    return [path for path in folder.iterdir() if path.name.startswith(".")]


def openable(folder: Path) -> list[Path]:
    """Every engine and pair under a folder that opens, whatever its name."""
    found = []
    for path in [folder, *(path for path in folder.rglob("*") if path.is_dir())]:
        for function in (open_engine, open_pair):
            try:
                function(path)
            except InvalidInput:
                continue
            found.append(path)
    return found


@pytest.fixture
def interrupted(export: Callable[..., bool], monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Export until the auxiliary is to be verified."""

    def run(error: BaseException, **changes: Any) -> None:
        calls: list[None] = []

        def fail_on_the_second(*args: object) -> None:
            calls.append(None)
            if len(calls) == 2:
                raise error

        with monkeypatch.context() as patch:
            patch.setattr("export.engine.verify", fail_on_the_second)
            with pytest.raises(type(error)):
                export(**changes)

    return run


class TestInterruption:
    @pytest.mark.parametrize("error", [KeyboardInterrupt(), VerificationFailed("wrong"), InvalidInput("a", 1, "b")])
    def test_the_next_export_takes_the_finished_target_and_leaves_nothing(
        self,
        export: Callable[..., bool],
        interrupted: Callable[..., None],
        tmp_path: Path,
        stages: list[str],
        error: BaseException,
    ) -> None:
        interrupted(error)
        (left,) = hidden(tmp_path)
        assert {path.name for path in left.iterdir() if path.is_dir()} == {"target"}
        assert openable(tmp_path) == []
        assert export()
        assert stages == ["checking", "target: finished before", "auxiliary: export", "auxiliary: verify"]
        assert [path.name for path in tmp_path.iterdir()] == ["pair"]
        assert {path.name for path in (tmp_path / "pair" / "target").iterdir()}.isdisjoint({FINISHED})
        open_pair(tmp_path / "pair")

    def test_the_error_says_what_was_kept_and_where(
        self, export: Callable[..., bool], interrupted: Callable[..., None], tmp_path: Path
    ) -> None:
        caught = []
        for error in (VerificationFailed("wrong"), InvalidInput("a", 1, "b")):
            try:
                with staging_folder(tmp_path / "pair", HASHES) as work:
                    work.begin("target")
                    work.finish("target", replace(SPEC, build_hash=HASHES["target"]))
                    raise error
            except (VerificationFailed, InvalidInput) as raised:
                caught.append(str(raised))
        for text in caught:
            assert "the finished target is kept" in text
            assert str(tmp_path / ".pair.incomplete-") in text

    def test_what_another_export_needs_not_is_removed(
        self, export: Callable[..., bool], interrupted: Callable[..., None], tmp_path: Path, stages: list[str]
    ) -> None:
        interrupted(KeyboardInterrupt())
        assert export(capacity=192)
        assert stages[1] == "target: export"
        assert [path.name for path in tmp_path.iterdir()] == ["pair"]

    def test_a_failure_before_anything_is_finished_leaves_nothing(
        self, export: Callable[..., bool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(*args: object) -> None:
            raise VerificationFailed("wrong")

        monkeypatch.setattr("export.engine.verify", fail)
        with pytest.raises(VerificationFailed):
            export()
        assert list(tmp_path.iterdir()) == []

    def test_an_export_that_runs_keeps_its_folder(self, export: Callable[..., bool], tmp_path: Path) -> None:
        running = tmp_path / ".pair.incomplete-running"
        (running / "target").mkdir(parents=True)
        with FileLock(running / "lock"):
            assert export()
            assert (running / "target").is_dir()
        assert not export()  # up to date: nothing is looked for
        assert export(rows=3, overwrite=True)
        assert not running.exists()

    @pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError("no space")])
    def test_an_error_between_the_two_renames_gives_the_pair_its_name_back(
        self, export: Callable[..., bool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
    ) -> None:
        export()
        rename = Path.rename

        def fail_on_the_second(path: Path, to: Path) -> Path:
            if to == tmp_path / "pair" and path.name == "pair":
                raise error
            return rename(path, to)

        with monkeypatch.context() as patch:
            patch.setattr("pathlib.Path.rename", fail_on_the_second)
            with pytest.raises(type(error)):
                export(defaults={"draft_len": 2}, overwrite=True)
        assert open_pair(tmp_path / "pair").defaults.draft_len == 4
        assert export(defaults={"draft_len": 2}, overwrite=True)
        assert hidden(tmp_path) == []

    def test_a_pair_taken_away_between_two_renames_comes_back(
        self, export: Callable[..., bool], tmp_path: Path
    ) -> None:
        export()
        left = tmp_path / ".pair.incomplete-killed"
        left.mkdir()
        (tmp_path / "pair").rename(left / "previous")
        with staging_folder(tmp_path / "pair", HASHES):
            open_pair(tmp_path / "pair")
        assert hidden(tmp_path) == []


@pytest.mark.slow
class TestKilled:
    """An export in a process of its own, killed at moments from its start to its end."""

    SCRIPT = """
import os, signal, sys
from pathlib import Path
from export.pair import export_pair
from export.options import ExportOptions

folder, target, auxiliary, *moment = sys.argv[1:]
stage = ""

def note(begun):
    global stage
    stage = begun

def stop(event, arguments):
    if event == "open" and arguments[2] & os.O_WRONLY and stage == moment[0] and moment[1] in str(arguments[0]):
        os.kill(os.getpid(), signal.SIGKILL)

sys.addaudithook(stop)
export_pair(Path(folder), ExportOptions(target, auxiliary, rows=2, capacity=128, format="torch"), True, note)
"""
    """Killed where it is about to write a file whose name begins so, in the stage that is given."""

    @pytest.mark.parametrize(
        ("stage", "file"),
        [
            ("target: export", "/target/tokenizer_config.json"),
            ("target: verify", "/target/.finished.json"),
            ("auxiliary: export", "/auxiliary/config.json"),
            ("auxiliary: export", "/auxiliary/tokenizer_config.json"),
            ("auxiliary: verify", "/auxiliary/.finished.json"),
            ("auxiliary: verify", "/pair/.pair.json"),
        ],
    )
    def test_nothing_opens_and_the_next_export_goes_on(
        self,
        export: Callable[..., bool],
        checkpoints: tuple[Path, Path],
        tmp_path: Path,
        stages: list[str],
        stage: str,
        file: str,
    ) -> None:
        assert run_script(self.SCRIPT, tmp_path / "pair", *checkpoints, stage, file) == -signal.SIGKILL
        assert len(hidden(tmp_path)) == 1
        assert openable(tmp_path) == []
        assert export()
        assert stages[1] == ("target: export" if stage.startswith("target") else "target: finished before")
        assert [path.name for path in tmp_path.iterdir()] == ["pair"]
        assert set(openable(tmp_path)) == {tmp_path / "pair", *(tmp_path / "pair").glob("*/")}


class TestAgain:
    def test_only_the_engine_that_changes_is_built(
        self, export: Callable[..., bool], other: str, tmp_path: Path, stages: list[str]
    ) -> None:
        export()
        model = tmp_path / "pair" / "target" / "model.safetensors"
        before, target = model.stat().st_ino, read_spec(tmp_path / "pair" / "target")
        assert export(auxiliary=other, overwrite=True)
        assert stages == ["checking", "target: unchanged", "auxiliary: export", "auxiliary: verify"]
        assert (model.stat().st_ino, read_spec(model.parent)) == (before, target)
        assert [path.name for path in tmp_path.iterdir()] == ["pair"]
        open_pair(tmp_path / "pair")

    def test_other_defaults_build_nothing(self, export: Callable[..., bool], tmp_path: Path, stages: list[str]) -> None:
        export()
        assert export(defaults={"draft_len": 2}, overwrite=True)
        assert stages == ["checking", "target: unchanged", "auxiliary: unchanged"]
        assert open_pair(tmp_path / "pair").defaults.draft_len == 2

    def test_where_links_cannot_be_made_files_are_copied(
        self, export: Callable[..., bool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refuse(*args: object) -> None:
            raise OSError("not supported")

        export()
        monkeypatch.setattr("os.link", refuse)
        assert export(defaults={"draft_len": 2}, overwrite=True)
        open_pair(tmp_path / "pair")

    def test_another_exporter_builds_again_and_says_so(
        self, export: Callable[..., bool], monkeypatch: pytest.MonkeyPatch, stages: list[str]
    ) -> None:
        export()
        monkeypatch.setattr("export.build_hash.exporter_hash", lambda: "another")
        with pytest.raises(InvalidInput, match="target: exporter or tokenizer; auxiliary: exporter or tokenizer"):
            export()
        assert export(overwrite=True)
        assert stages[1:] == [f"{name}: {step}" for name in ("target", "auxiliary") for step in ("export", "verify")]

    def test_another_place_of_the_same_checkpoint_is_up_to_date(
        self, export: Callable[..., bool], checkpoints: tuple[Path, Path], tmp_path: Path
    ) -> None:
        export()
        (tmp_path / "link").symlink_to(checkpoints[0])
        assert not export(target=str(tmp_path / "link"))
        assert read_spec(tmp_path / "pair" / "target").source == str(checkpoints[0])

    def test_a_refusal_says_what_is_different(self, export: Callable[..., bool]) -> None:
        export()
        with pytest.raises(InvalidInput, match=r"target: rows; auxiliary: rows; pair.json: defaults"):
            export(rows=3, defaults={"draft_len": 2})


class TestHash:
    def test_it_follows_content_options_versions_and_tokenizer_and_not_the_place(
        self, checkpoints: tuple[Path, Path], tmp_path: Path
    ) -> None:
        tokenizer = AutoTokenizer.from_pretrained(checkpoints[0], local_files_only=True)
        base = build_hash(SPEC, tokenizer)
        assert build_hash(replace(SPEC, source="elsewhere", build_hash="x"), tokenizer) == base
        changes: list[dict[str, Any]] = [
            {"checkpoint_hash": "b"}, {"rows": 5}, {"dtype": "float16"}, {"versions": {"torch": "3"}},
        ]  # fmt: skip
        hashes = {build_hash(replace(SPEC, **change), tokenizer) for change in changes}
        tokenizer.chat_template = "{{ messages }}"
        assert len({base, *hashes, build_hash(SPEC, tokenizer)}) == 6

    def test_comments_docstrings_and_layout_do_not_count_and_code_does(self) -> None:
        plain = "def f(x):\n    return x + 1\n"
        same = '"""Module."""\n# why\n\ndef f(x):\n    """Doc."""\n    return (x +\n        1)\n'
        assert code_of(plain) == code_of(same)
        assert code_of(plain) != code_of(plain.replace("1", "2"))

    @pytest.mark.slow
    def test_it_changes_with_every_module_that_writes_engines(self) -> None:
        sources = engine_sources()
        same, home = hash_of(sources), ROOT / "export"
        for name, text in sources.items():
            assert hash_of({**sources, name: f"{text}\nX = 1\n"}) != same, name
        assert hash_of({**sources, "export/onnx/new.py": "X = 1"}) != same
        for excluded in WRITES_NO_ENGINE:
            assert (home / excluded).exists(), f"{excluded} is no module of export/ any more"
        written = modules_behind("export.engine", "export.tensorrt", "export.tensorrt_llm.build")
        uncounted = {name for name in written if name not in sources}
        assert uncounted == {"export/build_hash.py", "export/staging.py"}, "what writes engines is left out of the hash"


def modules_behind(*roots: str) -> set[str]:
    """Files of `export/` that modules import, directly or through each other, themselves included."""
    home, found, left = ROOT, set[str](), list(roots)
    while left:
        name = left.pop()
        path = home / f"{name.replace('.', '/')}.py"
        if not name.startswith("export.") or not path.is_file() or path.relative_to(home).as_posix() in found:
            continue
        found.add(path.relative_to(home).as_posix())
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module:
                left += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return found
