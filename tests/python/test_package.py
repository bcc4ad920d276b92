from __future__ import annotations

import importlib.metadata
import importlib.resources
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import kvtier
import pytest

REPOSITORY = Path(__file__).parents[2]
CARGO = tomllib.loads((REPOSITORY / "Cargo.toml").read_text())
PYPROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
LOCKS = sorted((REPOSITORY / "requirements").glob("*.lock"))


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.fixture(scope="module")
def wheel() -> Path:
    """The wheel that is installed; `make test` names it."""
    path = os.environ.get("KVTIER_WHEEL")
    if not path:
        pytest.skip("KVTIER_WHEEL names no wheel")
    return (REPOSITORY / path).resolve(strict=True)


def test_import_is_quick_and_brings_neither_torch_nor_numpy() -> None:
    code = (
        "import sys, time; start = time.perf_counter(); import kvtier; seconds = time.perf_counter() - start; "
        "print(seconds, 'torch' in sys.modules, 'numpy' in sys.modules)"
    )
    best = float("inf")
    for _ in range(10):  # the best of several: the machine may be busy
        done = run_python(code)
        assert done.returncode == 0, done.stderr
        seconds, torch, numpy = done.stdout.split()
        assert (torch, numpy) == ("False", "False")
        best = min(best, float(seconds))
        if best <= 0.025:
            break
    assert best <= 0.050


def test_every_public_name_is_there() -> None:
    assert len(kvtier.__all__) == len(set(kvtier.__all__))
    for name in kvtier.__all__:
        assert getattr(kvtier, name) is not None


def test_errors_have_one_root() -> None:
    raised = [getattr(kvtier, name) for name in kvtier.__all__ if name.endswith("Error")]
    assert len(raised) >= 7
    assert all(issubclass(error, kvtier.KvtierError) for error in raised)


def test_version_is_the_crate_version() -> None:
    assert kvtier.__version__ == CARGO["package"]["version"]


def test_types_ship_with_the_package() -> None:
    package = importlib.resources.files(kvtier)
    assert (package / "py.typed").is_file()
    assert "class BlockTable" in (package / "_core.pyi").read_text()


@pytest.mark.parametrize(
    ("build", "setting", "warns"),
    [("debug", "", True), ("debug", "0", True), ("debug", "1", False), ("release", "", False)],
)
def test_unoptimised_core_warns_at_import(build: str, setting: str, warns: bool) -> None:
    code = (
        "import importlib, warnings; warnings.simplefilter('ignore'); import kvtier, kvtier._core; "
        f"kvtier._core.__build__ = {build!r}; warnings.simplefilter('error'); importlib.reload(kvtier)"
    )
    done = run_python(code, KVTIER_ALLOW_DEBUG_BUILD=setting)
    assert ("RuntimeWarning: kvtier's core was compiled without optimisation" in done.stderr) == warns
    assert (done.returncode != 0) == warns, done.stderr


def test_wheel_is_small_and_whole(wheel: Path) -> None:
    assert wheel.stat().st_size <= 4 * 2**20
    assert f"-{kvtier.__version__}-cp311-abi3-" in f"-{wheel.name.removeprefix('kvtier-')}"
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert {"kvtier/__init__.py", "kvtier/_core.abi3.so", "kvtier/_core.pyi", "kvtier/py.typed"} <= set(names)
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
    outside = [name for name in names if not re.match(r"kvtier(-[^/]+\.dist-info)?/", name)]
    assert not outside
    assert not [name for name in names if "__pycache__" in name or "/sboms/" in name]


def test_wheel_has_the_cuda_extension_if_it_was_compiled(wheel: Path) -> None:
    compiled = REPOSITORY / "python/kvtier/libkvtier_cuda.so"
    with zipfile.ZipFile(wheel) as archive:
        shipped = [archive.read(name) for name in archive.namelist() if name == "kvtier/libkvtier_cuda.so"]
    assert shipped == ([compiled.read_bytes()] if compiled.exists() else [])
    assert not any(str(REPOSITORY).encode() in content for content in shipped)


def test_installed_core_is_optimised(wheel: Path) -> None:
    from kvtier import _core

    assert _core.__build__ == "release", wheel


def test_locked_packages_satisfy_the_package_and_its_extra(wheel: Path) -> None:
    from packaging.requirements import Requirement

    wanted = [Requirement(text) for text in importlib.metadata.requires("kvtier") or []]
    assert {"numpy", "torch"} <= {requirement.name for requirement in wanted}
    for requirement in wanted:
        assert requirement.specifier.contains(importlib.metadata.version(requirement.name)), (str(requirement), wheel)


@pytest.mark.parametrize("lock", LOCKS, ids=lambda lock: lock.stem)
def test_lock_pins_everything_and_names_no_index(lock: Path) -> None:
    text = lock.read_text()
    assert "://" not in text
    assert "--index-url" not in text
    entries = re.split(r"\n(?=\S)", re.sub(r"^ *#.*\n", "", text, flags=re.MULTILINE).strip())
    assert entries
    for entry in entries:
        assert re.match(r"[a-z0-9-]+==[0-9][^ ]* ", entry), entry
        assert "--hash=sha256:" in entry, entry


def test_locks_agree_with_each_other_and_with_the_build_system() -> None:
    assert len(LOCKS) >= 4
    versions: dict[str, set[str]] = {}
    for lock in LOCKS:
        for name, version in re.findall(r"^([a-z0-9-]+)==(\S+)", lock.read_text(), flags=re.MULTILINE):
            versions.setdefault(name, set()).add(version)
    assert not {name: found for name, found in versions.items() if len(found) > 1}
    (maturin,) = [text for text in PYPROJECT["build-system"]["requires"] if text.startswith("maturin")]
    assert maturin == f"maturin=={versions['maturin'].pop()}"


def test_python_code_in_the_readme_runs_and_prints_what_it_says() -> None:
    (block,) = re.findall(r"```python\n(.*?)```", (REPOSITORY / "README.md").read_text(), flags=re.DOTALL)
    done = run_python(block)
    assert done.returncode == 0, done.stderr
    assert f"# {done.stdout}" == block.splitlines(keepends=True)[-1]


def test_links_in_the_documents_lead_somewhere() -> None:
    for document in (*REPOSITORY.glob("*.md"), *REPOSITORY.glob("docs/**/*.md")):
        for target in re.findall(r"\]\(([^)#\s]+)", document.read_text()):
            if "://" not in target:
                assert (document.parent / target).exists(), f"{document.name}: {target}"


def test_no_file_names_a_place_on_somebodys_machine() -> None:
    git = shutil.which("git")
    if git is None or not (REPOSITORY / ".git").exists():
        pytest.skip("not a git checkout")
    listing = subprocess.run([git, "ls-files", "-z"], cwd=REPOSITORY, capture_output=True, timeout=60, check=False)
    if listing.returncode != 0:
        pytest.skip(f"git cannot list the files: {listing.stderr.decode(errors='replace').strip()}")
    names = rb"|".join((rb"work/", rb"root/", rb"home/\w", rb"Users/\w", rb"tmp/\w"))  # apart from the leading slash,
    places = re.compile(rb"(?<![\w.])/(?:" + names + rb")")  # so that this file is not found itself
    paths = [REPOSITORY / os.fsdecode(name) for name in listing.stdout.split(b"\0") if name]
    found = [str(path) for path in paths if path.is_file() and places.search(path.read_bytes())]
    assert len(paths) > 10
    assert not found
