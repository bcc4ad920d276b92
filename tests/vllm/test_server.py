"""The OpenAI server with the flag, as docs/vllm.md says: real requests, `/metrics`, a quick end that leaves nothing."""

import json
import os
import pathlib
import random
import signal
import socket
import subprocess
import sys
import time
from importlib.metadata import entry_points

import pytest

FLAG = {
    "kv_connector": "KvtierConnector",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
    "kv_connector_extra_config": {"host_gib": 0.05},
}
if not [point for point in entry_points(group="vllm.general_plugins") if point.name == "kvtier"]:
    # From a source tree; the wheel's plugin makes the name known.
    FLAG["kv_connector_module_path"] = "kvtier.connectors.vllm"
START_S, END_S = 180, 20


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def processes_of(group):
    """Processes of a process group that have not ended."""
    found = []
    for entry in pathlib.Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                state, _, its_group = (entry / "stat").read_text().rpartition(")")[2].split()[:3]
            except OSError:
                continue
            if int(its_group) == group and state != "Z":
                found.append(int(entry.name))
    return found


@pytest.fixture(scope="module")
def server(model_dir, tmp_path_factory):
    """A server and its client; the server has a process group of its own."""
    import openai

    port = free_port()
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model_dir, "--port", str(port)]
    command += ["--host", "127.0.0.1", "--served-model-name", "tiny", "--dtype", "float32", "--enforce-eager"]
    command += ["--max-model-len", "512", "--block-size", "32", "--num-gpu-blocks-override", "24"]
    command += ["--skip-tokenizer-init", "--kv-transfer-config", json.dumps(FLAG)]
    log = tmp_path_factory.mktemp("server") / "log"
    environment = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_CPU_OMP_THREADS_BIND": "0"}
    before = set(os.listdir("/dev/shm"))
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env=environment, start_new_session=True)
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=60)
    try:
        deadline = time.monotonic() + START_S
        while True:
            assert process.poll() is None, log.read_text()[-4000:]
            assert time.monotonic() < deadline, log.read_text()[-4000:]
            try:
                client.models.list()
                break
            except openai.APIConnectionError:
                time.sleep(0.5)
        yield process, client, before
    finally:
        if process.poll() is None or processes_of(process.pid):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(END_S)


def metrics_of(client):
    import httpx

    text = httpx.get(str(client.base_url).replace("/v1/", "/metrics"), timeout=30).text
    samples = [line.rsplit(" ", 1) for line in text.splitlines() if line.startswith("vllm:kvtier_")]
    return {name.partition("{")[0]: float(value) for name, value in samples}


def test_requests_come_back_from_host_memory_and_metrics_say_so(server):
    _, client, _ = server
    rng = random.Random(40)
    documents = [[rng.randrange(3, 500) for _ in range(290)] for _ in range(6)]

    def ask(document):
        extra = {"return_token_ids": True, "ignore_eos": True, "detokenize": False}
        answer = client.completions.create(model="tiny", prompt=document, max_tokens=4, temperature=0, extra_body=extra)
        return answer.choices[0].token_ids

    first = [ask(document) for document in documents]
    assert all(len(tokens) == 4 for tokens in first)
    assert [ask(document) for document in documents] == first
    # Statistics go with the output of a step; that of the last load is told with the next.
    ask([5] * 40)
    metrics = metrics_of(client)
    # The pool holds two of the documents.
    assert metrics["vllm:kvtier_loaded_blocks_total"] >= 0.95 * 6 * 9
    assert metrics["vllm:kvtier_host_hit_tokens_total"] >= 0.95 * 6 * 288
    assert metrics["vllm:kvtier_load_seconds_total"] > 0
    assert metrics["vllm:kvtier_load_failed_blocks_total"] == 0
    assert metrics["vllm:kvtier_is_without_tier"] == 0


def test_the_server_ends_within_seconds_and_leaves_nothing(server):
    process, client, before = server
    assert metrics_of(client)
    start = time.monotonic()
    process.terminate()
    process.wait(END_S)
    while processes_of(process.pid):
        assert time.monotonic() < start + END_S, "a process of the server is left"
        time.sleep(0.1)
    assert not set(os.listdir("/dev/shm")) - before
