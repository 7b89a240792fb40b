"""Several replicas in processes of their own on a local Ray: nothing that was accepted is lost."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest

from mtad import LLM, DecodingParams
from runtime.server.options import ServerOptions
from tests.support.held import Hold
from tests.support.live_server import Process, call
from tests.support.waiting import PATIENCE, STARTING, until  # with `STARTING`, a busy gateway is asked less often

PROMPTS = ["def largest(values):\n", "SELECT name FROM singer", "class Stack:\n", "import", "# naïve 日本\n", "for"]


class Cluster:
    """`mtad serve --replicas 2` in a process of its own, on a Ray and a copy of a pair of its own."""

    def __init__(self, pair: Path, folder: Path) -> None:
        self.hold, self.pair = Hold(folder), folder / "pair"
        shutil.copytree(pair, folder / "first")
        self.pair.symlink_to("first")
        sizes = ("--replicas", "2", "--max-replicas", "3", "--replica-cpus", "0.1", "--rows", "4", "--threads", "1")
        self.process = Process(
            *(str(self.pair), *sizes, "--stall-seconds", "15", "--model", "demo", "--provider", "cpu"),
            MTAD_API_KEY="secret",
            RAY_DEDUP_LOGS="0",
            **self.hold.environment,
        )

    def wait(self) -> None:
        self.port = int(self.process.url().rpartition(":")[2])

    def lead_to(self, export: str) -> None:
        """Have the pair's link lead elsewhere."""
        link = self.pair.with_name("link")
        link.symlink_to(export)
        link.replace(self.pair)

    def call(self, method: str, path: str, body: Any = None, key: str = "secret") -> tuple[int, dict[str, str], Any]:
        return call(self, method, path, body, authorization=f"Bearer {key}")

    def complete(self, prompt: str, **values: Any) -> tuple[int, Any]:
        status, _, answer = self.call("POST", "/v1/completions", {"model": "demo", "prompt": prompt, **values})
        return status, answer

    @property
    def metrics(self) -> str:
        return str(self.call("GET", "/metrics")[2].decode())

    def begin(self, prompt: str, **values: Any) -> HTTPConnection:
        """Send a request, and leave its answer to be read."""
        connection = HTTPConnection("127.0.0.1", self.port, timeout=2 * PATIENCE)
        headers = {"authorization": "Bearer secret", "content-type": "application/json"}
        body = {"model": "demo", "prompt": prompt, **values}
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        return connection

    def figure(self, name: str, labels: str = "") -> float:
        """Sum of a metric over replicas and labels; of those whose first label is this one."""
        pattern = rf"^{name}(?:{{{labels}[^}}]*}})? (\S+)$"
        return sum(float(value) for value in re.findall(pattern, self.metrics, re.MULTILINE))

    def replicas(self) -> dict[str, tuple[int, int]]:
        """Process and generation of each that is ready to be killed."""
        found = re.findall(r"^mtad_replica\{(.*)\} 1", self.metrics, re.MULTILINE)
        labels = [dict(re.findall(r'(\w+)="([^"]*)"', one)) for one in found]
        return {one["replica"]: (int(one["pid"]), int(one["generation"])) for one in labels}

    def processes(self) -> dict[int, str]:
        """Commands of its process, and of all that this one and others of them have started."""
        ours = {self.process.process.pid: ""}
        for _ in range(4):  # processes of processes
            for folder in Path("/proc").glob("[0-9]*"):
                with contextlib.suppress(OSError, IndexError):
                    if int((folder / "stat").read_text().rpartition(")")[2].split()[1]) in ours:
                        ours[int(folder.name)] = (folder / "cmdline").read_text()
        return ours

    @property
    def accepted(self) -> float:
        """Requests that run or wait, as the replicas last reported."""
        return self.figure("mtad_requests_running") + self.figure("mtad_queue_length")

    @property
    def health(self) -> dict[str, Any]:
        return dict(self.call("GET", "/health")[2])

    @property
    def ready(self) -> int:
        return int(self.health.get("replicas", 0))


@pytest.fixture(scope="module")
def cluster(demo_pair: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """One group of replicas; what tests kill comes back."""
    running = Cluster(demo_pair, tmp_path_factory.mktemp("cluster"))
    try:
        running.wait()
        yield running
        running.process.process.send_signal(signal.SIGTERM)
        assert running.process.process.wait(240) == 0, running.process.log[-4000:]
    finally:
        running.process.process.kill()
        running.process.process.wait(10)


def expected(llm: LLM, prompt: str, **values: Any) -> str:
    return llm.generate(prompt, DecodingParams.from_dict(values, llm.pair.defaults))[0].text


def test_nothing_of_a_ray_of_its_own_listens_to_other_machines(cluster: Cluster) -> None:
    owners = {}
    for process, command in cluster.processes().items():
        for file in Path(f"/proc/{process}/fd").glob("*"):
            with contextlib.suppress(OSError):
                owners[os.readlink(file)] = command
    listening = [
        (line.split()[1].rpartition(":")[0][-8:], owners[f"socket:[{line.split()[9]}]"])
        for name in ("tcp", "tcp6")
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]
        if line.split()[3] == "0A" and f"socket:[{line.split()[9]}]" in owners
    ]
    assert len(listening) > 4
    open_to_others = [owner for address, owner in listening if address != "0100007F"]  # 127.0.0.1
    assert all(owner.startswith("ray::ServeReplica") for owner in open_to_others), "one each, that asks for Ray's token"
    assert "Token authentication is enabled" in cluster.process.log
    replicas = [process for process, _ in cluster.replicas().values()]
    assert all(b"\0RAY_AUTH_TOKEN=" in Path(f"/proc/{one}/environ").read_bytes() for one in replicas), "in no file"


def test_both_replicas_answer_what_one_engine_gives(demo: LLM, cluster: Cluster) -> None:
    until(lambda: cluster.ready == 2, STARTING)
    asked = [(PROMPTS[index % 6], {"seed": index, "max_tokens": 40}) for index in range(16)]
    with ThreadPoolExecutor(16) as pool:
        with cluster.hold(4 * PATIENCE):
            coming = [pool.submit(cluster.complete, prompt, **values) for prompt, values in asked]
            until(lambda: cluster.accepted == 16, STARTING)
        answers = [one.result() for one in coming]
    for (prompt, values), (status, answer) in zip(asked, answers, strict=True):
        assert status == 200, answer
        assert answer["choices"][0]["text"] == expected(demo, prompt, **values)
    until(lambda: cluster.figure("mtad_requests_total") >= 16, STARTING)
    shown = re.compile(r'^mtad_requests_total\{reason="length",replica="\w+"\} (\S+)$', re.MULTILINE)
    served = shown.findall(cluster.metrics)
    assert len(served) == 2
    assert all(float(one) > 0 for one in served), "one replica did everything"


def test_prompts_that_begin_alike_go_where_their_prefix_is(cluster: Cluster) -> None:
    beginnings = ["".join(f"def f{index}_{other}(x): return {other}\n" for index in range(24)) for other in range(4)]
    for beginning in beginnings:
        reused = []
        for index in range(4):
            _, answer = cluster.complete(f"{beginning}def g{index}", max_tokens=2, ignore_eos=True)
            reused.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
        assert reused[0] == 0
        assert all(tokens >= 64 for tokens in reused[1:]), f"another replica was asked: {reused}"


def test_a_body_of_the_longest_length_reaches_a_replica(cluster: Cluster) -> None:
    """Between processes it is longer than what gRPC takes by default."""
    room = ServerOptions("demo").max_body_bytes - len('{"model": "demo", "prompt": ""}')
    status, answer = cluster.complete("a" * room)
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")


def test_a_client_that_leaves_frees_its_row(cluster: Cluster) -> None:
    before = cluster.figure("mtad_requests_total", 'reason="cancelled",')
    with cluster.hold(0.2):
        connection = cluster.begin("def", max_tokens=900, ignore_eos=True, method="sample", stream=True)
        connection.getresponse().read(10)
        connection.close()
        until(lambda: cluster.figure("mtad_requests_total", 'reason="cancelled",') == before + 1, STARTING)
    until(lambda: cluster.figure("mtad_requests_running") == 0, STARTING)


def test_a_replica_killed_under_load_loses_no_request_and_comes_back_although_an_update_was_refused(
    demo: LLM, cluster: Cluster
) -> None:
    """Six whole answers are given all the same; of two streams, those on other replicas go on."""
    until(lambda: cluster.ready >= 2, STARTING)
    before = cluster.replicas()
    damaged = cluster.pair.with_name("damaged")
    shutil.copytree(cluster.pair, damaged)
    (weights,) = (damaged / "auxiliary").glob("model.onnx*data*")
    weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])
    cluster.lead_to("damaged")
    cluster.process.process.send_signal(signal.SIGHUP)
    until(lambda: "update_refused" in cluster.health, STARTING)
    assert "auxiliary" in cluster.health["update_refused"]
    assert "the old replicas stay" in cluster.process.log
    assert set(before) <= set(cluster.replicas())
    long = {"max_tokens": 500, "method": "sample", "ignore_eos": True, "seed": 9}  # 100 s of held passes
    streams: list[str] = []

    def stream(prompt: str) -> None:
        connection = cluster.begin(prompt, stream=True, **long)
        streams.append(connection.getresponse().read().decode())
        connection.close()

    with ThreadPoolExecutor(8) as pool:
        with cluster.hold(0.2):
            streaming = [pool.submit(stream, prompt) for prompt in PROMPTS[:2]]
            whole = [pool.submit(cluster.complete, prompt, **long) for prompt in PROMPTS]
            until(lambda: cluster.accepted == 8, STARTING)
            pattern = r'^mtad_(?:requests_running|queue_length)\{replica="(\w+)"\} (\S+)$'
            accepted: Counter[str] = Counter()
            for replica, requests in re.findall(pattern, cluster.metrics, re.MULTILINE):
                accepted[replica] += int(float(requests))
            ((busiest, lost),) = accepted.most_common(1)
            victim = cluster.replicas()[busiest][0]
            os.kill(victim, signal.SIGKILL)
        answers = [one.result() for one in whole]
        for one in streaming:
            one.result()
    wanted = demo.generate(PROMPTS, DecodingParams.from_dict(long, demo.pair.defaults))
    assert [status for status, _ in answers] == [200] * 6
    assert [answer["choices"][0]["text"] for _, answer in answers] == [result.text for result in wanted]
    broken = [text for text in streams if '"replica_died"' in text]
    ended = [text for text in streams if text.rstrip().endswith("data: [DONE]")]
    assert len(broken) + len(ended) == 2
    assert all("[DONE]" not in text and text.count("data: ") > 1 for text in broken)
    assert cluster.figure("mtad_gateway_broken_streams_total") == len(broken)
    assert lost >= 3, "of eight on three replicas at most"
    assert cluster.figure("mtad_gateway_retries_total") + len(broken) >= lost
    until(lambda: cluster.ready >= 2 and victim not in {pid for pid, _ in cluster.replicas().values()}, STARTING)
    assert "update_refused" in cluster.health, "the folder is still damaged"


def test_requests_of_a_replica_that_hangs_go_to_another_and_it_comes_back(demo: LLM, cluster: Cluster) -> None:
    until(lambda: cluster.ready >= 2, STARTING)
    values = {"max_tokens": 60, "method": "sample", "ignore_eos": True, "seed": 7}
    with ThreadPoolExecutor(8) as pool:
        with cluster.hold(0.2):
            asking = [pool.submit(cluster.complete, prompt, **values) for prompt in PROMPTS]
            until(lambda: cluster.accepted == len(PROMPTS), STARTING)
            hanging = max(cluster.replicas().values())[0]
            os.kill(hanging, signal.SIGSTOP)
        answers = [one.result() for one in asking]
    assert [status for status, _ in answers] == [200] * len(PROMPTS)
    wanted = [expected(demo, prompt, **values) for prompt in PROMPTS]
    assert [answer["choices"][0]["text"] for _, answer in answers] == wanted
    until(lambda: cluster.ready >= 2 and hanging not in {pid for pid, _ in cluster.replicas().values()}, STARTING)


def test_a_rollout_replaces_every_replica_and_loses_nothing(demo: LLM, cluster: Cluster) -> None:
    """Of a folder that can be used again, where an update was refused before."""
    until(lambda: cluster.ready >= 2, STARTING)
    before = cluster.replicas()
    stop, failed, served = threading.Event(), list[Any](), list[str]()
    wanted = expected(demo, "def", seed=3, max_tokens=24)

    def keep_asking() -> None:
        while not stop.is_set():
            status, answer = cluster.complete("def", seed=3, max_tokens=24)
            if status != 200 or answer["choices"][0]["text"] != wanted:
                failed.append(answer)
            served.append("")
            stop.wait(0.1)

    threads = [threading.Thread(target=keep_asking) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        cluster.lead_to("first")
        cluster.process.process.send_signal(signal.SIGHUP)
        newest = max(generation for _, generation in before.values())

        def replaced() -> bool:
            now = cluster.replicas()
            return len(now) >= 2 and all(generation > newest for _, generation in now.values())

        until(lambda: replaced() and len(served) > 10 and "update_refused" not in cluster.health, STARTING)
    finally:
        stop.set()
        for thread in threads:
            thread.join(2 * PATIENCE)
    assert not failed, failed[:3]
    assert not set(before) & set(cluster.replicas())


def test_waiting_requests_bring_another_replica(cluster: Cluster) -> None:
    until(lambda: cluster.ready == 2, STARTING)
    scaled = threading.Event()

    def keep_asking() -> None:
        while not scaled.is_set():
            assert cluster.complete("def", method="sample", max_tokens=100, ignore_eos=True)[0] == 200

    with ThreadPoolExecutor(24) as pool:
        asking = [pool.submit(keep_asking) for _ in range(24)]
        try:
            with cluster.hold(0.1):  # what is held leaves its core to the new replica
                until(lambda: cluster.ready == 3, STARTING)
        finally:
            scaled.set()
        for one in asking:
            one.result()
