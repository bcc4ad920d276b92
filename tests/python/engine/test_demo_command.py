"""The command line: options, errors of one line, exit statuses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import kvtier
import pytest
import torch
from kvtier import cli
from tiny_models import tiny_model

SMALL = [
    "--documents",
    "4",
    "--document-tokens",
    "40",
    "--answer-tokens",
    "2",
    "--gpu-documents",
    "1",
    "--cpu-documents",
    "4",
]


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `kvtier demo` settles for its own process must not reach the other tests."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")


def status(*arguments: str) -> int:
    """The exit status of this process if it were the program."""
    try:
        return cli.main(list(arguments))
    except SystemExit as end:
        return int(end.code or 0)


def test_the_program(tmp_path: Path) -> None:
    """As a user starts it: an own process, figures on standard output, nothing left running."""
    path = tmp_path / "figures.json"
    command = [sys.executable, "-m", "kvtier.cli", "demo", *SMALL, "--in-flight", "2", "--json", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "two tiers" in done.stdout
    assert "no reuse" in done.stderr  # the progress bars
    assert json.loads(path.read_text())["outputs_identical"] is True


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert status("--version") == 0
    assert capsys.readouterr().out == f"kvtier {kvtier.__version__}\n"


@pytest.mark.parametrize("arguments", [["--help"], ["demo", "--help"]])
def test_help(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert status(*arguments) == 0
    assert "demo" in capsys.readouterr().out


def test_a_checkpoint_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny_model("qwen3", torch.float32).network.save_pretrained(tmp_path / "model")
    assert status("demo", *SMALL, "--model", str(tmp_path / "model"), "--order", "tile", "--seed", "5") == 0
    assert "tokens identical in all three modes: yes" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "COMMAND"),
        (["dance"], "dance"),
        (["demo", "--documents", "0"], "--documents = 0: 1 .."),
        (["demo", "--documents", "-4"], "--documents = -4: 1 .."),
        (["demo", "--documents", "many"], "--documents: invalid int value: 'many'"),
        (["demo", "--documents"], "--documents"),
        (["demo", "--document-tokens", "0"], "--document-tokens = 0: 1 .."),
        (["demo", "--document-tokens", "131072"], "--document-tokens = 131072: at most 131064"),
        (["demo", "--answer-tokens", "0"], "--answer-tokens = 0: 1 .."),
        (["demo", "--gpu-documents", "0"], "--gpu-documents = 0: 1 .."),
        (["demo", "--gpu-documents", "16000000"], "--gpu-documents = 16000000: at most"),
        (["demo", "--gpu-documents", str(10**30)], f"--gpu-documents = {10**30}: 1 .."),
        (["demo", "--cpu-documents", "-1"], "--cpu-documents = -1: 1 .."),
        (["demo", "--cpu-documents", "16000000"], "--cpu-documents = 16000000: at most"),
        (["demo", "--in-flight", "0"], "--in-flight = 0: 1 .."),
        (["demo", "--seed", "-1"], "--seed = -1: 0 .."),
        (["demo", "--order", "sideways"], "sideways"),
        (["demo", "--device", "warp"], "device = warp"),
        (["demo", "--device", "cuda:77"], "device = cuda:77"),
        (["demo", "--model", "/does/not/exist"], "model = /does/not/exist: not a folder"),
        (["demo", "--json", "/does/not/exist/figures.json"], "--json = /does/not/exist/figures.json"),
        (["demo", "--json", "/"], "--json = /"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_options_end_with_two_and_one_line(
    arguments: list[str], says: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert status(*arguments) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert says in err
    assert err.count("\n") == 1


def test_a_malformed_checkpoint_is_one_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "model"
    tiny_model("qwen2", torch.float32).network.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": 50}))
    assert status("demo", "--model", str(folder)) == 2
    err = capfd.readouterr().err
    assert err.startswith(f"kvtier: error: model = {folder}: ")
    assert err.count("\n") == 1


def test_without_torch_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "DEMO_NEEDS", ("torch", "no_such_module"))
    assert status("demo") == 2
    assert capfd.readouterr().err == "kvtier: the demo needs no_such_module: pip install 'kvtier[demo]'\n"


def test_the_command_line_does_not_import_torch_before_it_must() -> None:
    code = "import sys, kvtier.cli; kvtier.cli._parser(); sys.exit(bool({'torch', 'numpy', 'rich'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


@pytest.mark.parametrize(("cores", "threads"), [(1, "1"), (2, "1"), (4, "3"), (64, "4")])
def test_a_core_is_left_to_the_copies(cores: int, threads: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli.os, "sched_getaffinity", lambda _: set(range(cores)))
    monkeypatch.delenv("OMP_NUM_THREADS")
    cli.leave_a_core_to_the_copies()
    assert cli.os.environ["OMP_NUM_THREADS"] == threads
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    cli.leave_a_core_to_the_copies()
    assert cli.os.environ["OMP_NUM_THREADS"] == "7"
