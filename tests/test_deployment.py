"""The manifest and the images of docs/deployment.md are consistent, with each other and with the code."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from mtad.errors import InvalidInput
from mtad.params import DecodingParams
from runtime.commands import serve
from runtime.decoder.host_runner import compile_rules
from runtime.scheduler.request import Request
from runtime.scheduler.scheduler import Scheduler
from runtime.triton.options import TritonOptions
from runtime.triton.repository import config
from runtime.triton.tensors import INPUTS
from tests.support.commands import Run
from tests.support.paths import ROOT

DOCS = ROOT / "docs"


@pytest.fixture(scope="module")
def manifest() -> dict[str, Any]:
    return {one["kind"]: one for one in yaml.safe_load_all((DOCS / "kubernetes.yaml").read_text())}


def test_every_selector_of_the_manifest_finds_the_pods(manifest: dict[str, Any]) -> None:
    labels = manifest["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert manifest["Deployment"]["spec"]["selector"]["matchLabels"] == labels
    assert manifest["Service"]["spec"]["selector"] == labels
    assert manifest["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"] == labels
    target = manifest["HorizontalPodAutoscaler"]["spec"]["scaleTargetRef"]
    assert (target["kind"], target["name"]) == ("Deployment", manifest["Deployment"]["metadata"]["name"])


def test_ports_volumes_and_times_of_the_manifest_fit_together(manifest: dict[str, Any]) -> None:
    pod = manifest["Deployment"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    ports = {one["name"]: one["containerPort"] for one in container["ports"]}
    assert {one["targetPort"]: one["port"] for one in manifest["Service"]["spec"]["ports"]} == ports
    assert all(container[probe]["httpGet"]["port"] in ports for probe in ("startupProbe", "readinessProbe"))
    assert {one["name"] for one in container["volumeMounts"]} == {one["name"] for one in pod["volumes"]}
    (seconds,) = [one.partition("=")[2] for one in container["args"] if one.startswith("--exit-timeout-secs")]
    command, before = container["lifecycle"]["preStop"]["exec"]["command"]
    assert command == "sleep"
    assert int(seconds) >= TritonOptions.request_seconds, "a request that was accepted ends"
    assert pod["terminationGracePeriodSeconds"] > int(seconds) + int(before)


def test_clients_cannot_give_the_pod_models_of_their_own(manifest: dict[str, Any]) -> None:
    """Which Triton runs as it runs: files of a model may come in the request (its `extension_model_repository.md`)."""
    (container,) = manifest["Deployment"]["spec"]["template"]["spec"]["containers"]
    assert not any("model-control-mode" in argument for argument in container["args"])


def test_the_liveness_probe_is_a_request_of_the_model(manifest: dict[str, Any]) -> None:
    (container,) = manifest["Deployment"]["spec"]["template"]["spec"]["containers"]
    text = " ".join(container["livenessProbe"]["exec"]["command"])
    found = re.search(r"--data '(.*?)'", text)
    assert found
    expected = re.search(r'grep --quiet "(.*?)"', text)
    request = Request(0, [1], DecodingParams(max_tokens=yaml.safe_load(found[1])["max_tokens"]), seed=0)
    with pytest.raises(InvalidInput, match=expected[1] if expected else "nothing"):
        Scheduler(rows=1, capacity=4096).check(request)
    assert set(yaml.safe_load(found[1])) <= {tensor.name for tensor in INPUTS}
    (model,) = set(re.findall(r"/v2/models/(\w+)", (DOCS / "kubernetes.yaml").read_text()))
    assert f'name: "{model}"' in config(model)


def test_the_pods_model_runs_on_its_gpu(manifest: dict[str, Any], run: Run, tmp_path: Path) -> None:
    """The page's command, as far as it goes without Docker: the pair is the demo pair, the image is described."""
    page = (DOCS / "deployment.md").read_text()
    found = re.search(r"^mtad triton llama-pair models (.*?) +#", page, re.MULTILINE)
    assert found
    (tmp_path / "pair").mkdir()
    (tmp_path / "pair" / "pair.json").write_text("{}")
    assert run("triton", tmp_path / "pair", tmp_path / "models", *found[1].split()).code == 0
    options = yaml.safe_load((tmp_path / "models" / "mtad" / "1" / "model.yaml").read_text())
    assert (options["device"], options["rows"], options["pair"]) == ("cuda", 16, "pair")
    (container,) = manifest["Deployment"]["spec"]["template"]["spec"]["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "1"
    assert f"--tag {container['image']} " in (DOCS / "triton.Dockerfile").read_text()


@pytest.mark.parametrize("name", ["Dockerfile", "docs/triton.Dockerfile"])
def test_an_image_for_a_gpu_has_what_triton_compiles_with(name: str) -> None:
    assert "install -y --no-install-recommends gcc libc6-dev" in (ROOT / name).read_text()


def test_what_the_image_copies_installs_and_starts_exists() -> None:
    lines = (ROOT / "Dockerfile").read_text().replace("\\\n", "").splitlines()
    steps = [line.split(maxsplit=1) for line in lines if line and not line.startswith("#")]
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = [path for kind, rest in steps if kind == "COPY" for path in rest.split()[:-1]]
    assert set(copied) == allowed, "nothing else is sent to Docker"
    assert all((ROOT / path).exists() for path in copied)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = project["tool"]["setuptools"]["packages"]["find"]["include"]
    assert {name.removesuffix("*") for name in packages} <= set(copied)
    assert {project["project"]["readme"], *project["project"]["license-files"], "constraints.txt"} <= set(copied)
    installs, compiles = [rest for kind, rest in steps if kind == "RUN"]
    assert '".[$EXTRAS]"' in installs
    extras = next(rest for kind, rest in steps if rest.startswith("EXTRAS=")).removeprefix("EXTRAS=").split(",")
    assert "serve" in extras
    assert compile_rules.__name__ in compiles
    assert set(extras) <= project["project"]["optional-dependencies"].keys()
    given = {kind: json.loads(rest) for kind, rest in steps if kind in ("ENTRYPOINT", "CMD")}
    command, subcommand = given["ENTRYPOINT"]
    assert command in project["project"]["scripts"]
    assert subcommand == "serve"
    options = serve.parser().parse_args(given["CMD"])
    exposed, health = (next(rest for kind, rest in steps if kind == name) for name in ("EXPOSE", "HEALTHCHECK"))
    assert f"127.0.0.1:{options.port}/ping" in health
    assert int(exposed) == options.port
    (python,) = [rest for kind, rest in steps if kind == "FROM"]
    assert python.removeprefix("python:").startswith(project["tool"]["mypy"]["python_version"])
