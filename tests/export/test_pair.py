"""Exports that are interrupted or come again: what is built, what stays, and that nothing half done opens."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from engines.base import EngineSpec
from engines.folder import read_spec
from export.options import ExportOptions
from export.pair import export_pair
from export.plan import build_hash
from mtad.errors import Failed, InvalidInput
from runtime.pair import open_pair

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["export.pair"])
SPEC = EngineSpec("LlamaForCausalLM", 2, 2, 16, 300, "float32", 4, 256, (0,), "torch", "a", {"torch": "2"})


@pytest.fixture
def other(write_checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> str:
    """Another auxiliary."""
    return str(write_checkpoint(tmp_path_factory.mktemp("other") / "auxiliary", seed=9, num_hidden_layers=1))


class TestInterruption:
    @pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError("no space")])
    def test_an_error_between_the_two_renames_gives_the_pair_its_name_back(
        self,
        export: Callable[..., bool],
        exported: Path,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        error: BaseException,
    ) -> None:
        rename = Path.rename

        def fail_on_the_second(path: Path, to: Path) -> Path:
            if to == exported and "incomplete" in path.name:
                raise error
            return rename(path, to)

        with monkeypatch.context() as patch:
            patch.setattr("pathlib.Path.rename", fail_on_the_second)
            with pytest.raises(Failed if isinstance(error, OSError) else type(error)):
                export(defaults={"draft_len": 2}, overwrite=True)
        assert open_pair(exported).defaults.draft_len == "auto"
        assert export(defaults={"draft_len": 2}, overwrite=True)
        assert not list(tmp_path.glob(".*"))


def export_and_die(folder: Path, checkpoints: tuple[Path, Path], stage: str, file: str) -> None:
    """Export; killed where it is about to write a file whose name has `file` in it, in that stage."""
    stages = [""]

    def stop(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and arguments[2] & os.O_WRONLY and stages[-1].endswith(stage) and file in str(arguments[0]):
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(stop)
    options: dict[str, Any] = {"rows": 2, "capacity": 128, "format": "torch"}
    export_pair(folder, ExportOptions(*map(str, checkpoints), **options), True, stages.append)


@pytest.mark.slow
class TestKilled:
    """An export in a process of its own, killed at moments from its start to its end."""

    @pytest.mark.parametrize(
        ("stage", "file"),
        [
            ("target: export", "/target/tokenizer_config.json"),
            ("auxiliary: export", "/auxiliary/config.json"),
            ("auxiliary: verify", "/target/.engine.json"),
            ("auxiliary: verify", "/.pair.json"),
        ],
    )
    def test_no_pair_opens_and_the_next_export_is_whole(
        self, export: Callable[..., bool], checkpoints: tuple[Path, Path], tmp_path: Path, stage: str, file: str
    ) -> None:
        process = CONTEXT.Process(target=export_and_die, args=(tmp_path / "pair", checkpoints, stage, file))
        process.start()
        process.join()
        assert process.exitcode == -signal.SIGKILL
        assert not (tmp_path / "pair").exists()
        for path in tmp_path.rglob("*/"):
            with pytest.raises(InvalidInput):
                open_pair(path)
        assert export()
        open_pair(tmp_path / "pair")


class TestAgain:
    def test_only_the_engine_that_changes_is_built(
        self, export: Callable[..., bool], exported: Path, other: str, tmp_path: Path, stages: list[str]
    ) -> None:
        model = exported / "target" / "model.safetensors"
        before, target = model.stat().st_ino, read_spec(exported / "target")
        assert export(auxiliary=other, overwrite=True)
        assert stages == ["checking", "0 %, target: unchanged", "0 %, auxiliary: export", "50 %, auxiliary: verify"]
        assert (model.stat().st_ino, read_spec(model.parent)) == (before, target)
        assert [path.name for path in tmp_path.iterdir()] == ["pair"]
        open_pair(exported)

    def test_other_defaults_build_nothing(
        self, export: Callable[..., bool], exported: Path, tmp_path: Path, stages: list[str]
    ) -> None:
        assert export(defaults={"draft_len": 2}, overwrite=True)
        assert stages == ["checking", "0 %, target: unchanged", "0 %, auxiliary: unchanged"]
        assert open_pair(exported).defaults.draft_len == 2

    def test_where_links_cannot_be_made_files_are_copied(
        self, export: Callable[..., bool], exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refuse(*args: object) -> None:
            raise OSError("not supported")

        monkeypatch.setattr("os.link", refuse)
        assert export(defaults={"draft_len": 2}, overwrite=True)
        open_pair(exported)

    def test_another_exporter_builds_again_and_says_so(
        self, export: Callable[..., bool], exported: Path, monkeypatch: pytest.MonkeyPatch, stages: list[str]
    ) -> None:
        monkeypatch.setattr("export.plan.exporter_version", lambda: "another")
        with pytest.raises(InvalidInput, match="target: exporter or tokenizer; auxiliary: exporter or tokenizer"):
            export()
        assert export(overwrite=True)
        parts, named = zip(*(stage.split(" %, ") for stage in stages[1:]), strict=True)
        assert list(named) == [f"{name}: {step}" for name in ("target", "auxiliary") for step in ("export", "verify")]
        done = [int(part) for part in parts]
        assert done[0] == 0
        assert sorted(set(done)) == done, "what is done of it grows"
        assert done[-1] < 100

    def test_another_place_of_the_same_checkpoint_is_up_to_date(
        self, export: Callable[..., bool], exported: Path, checkpoints: tuple[Path, Path], tmp_path: Path
    ) -> None:
        (tmp_path / "link").symlink_to(checkpoints[0])
        assert not export(target=str(tmp_path / "link"))
        assert read_spec(exported / "target").source == str(checkpoints[0])


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
