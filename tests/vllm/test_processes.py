"""Engines in processes of their own: tensor parallel, as a child of MultiConnector, fp8 KV."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

OWN = {
    "kv_connector": "KvtierConnector",
    "kv_connector_module_path": "kvtier.connectors.vllm",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
    "kv_connector_extra_config": {"host_gib": 0.05},
}
MULTI = {"kv_connector": "MultiConnector", "kv_role": "kv_both", "kv_connector_extra_config": {"connectors": [OWN]}}


def run(model_dir, bind="0", **options):
    environment = os.environ | {"VLLM_CPU_OMP_THREADS_BIND": bind, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    script = pathlib.Path(__file__).with_name("two_rounds.py")
    command = [sys.executable, str(script), model_dir, json.dumps(options)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert lines, done.stdout[-2000:]
    return json.loads(lines[0].removeprefix("RESULT "))


@pytest.mark.parametrize(
    ("transfer", "bind", "options"),
    [
        (OWN, "0", {}),
        (OWN, "0|1", {"tensor_parallel_size": 2}),
        (MULTI, "0", {}),
        (OWN, "0", {"kv_cache_dtype": "fp8", "dtype": "bfloat16"}),
    ],
    ids=["alone", "tensor-parallel", "multi-connector", "fp8"],
)
def test_two_rounds(model_dir, transfer, bind, options):
    plain = run(model_dir, bind, **options)
    result = run(model_dir, bind, kv_transfer_config=transfer, **options)
    assert result["tokens"] == plain["tokens"]
    # The pool holds two of the documents: without a second tier the second round finds nothing.
    assert sum(plain["cached"][6:]) == 0
    assert result["cached"][6:] == [288] * 6
    if transfer is OWN:
        assert result["metrics"]["vllm:kvtier_loaded_blocks"] >= 0.95 * 6 * 9
        assert result["metrics"]["vllm:kvtier_load_failed_blocks"] == 0
