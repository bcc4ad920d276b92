"""How much host memory this process may still take: the machine's, or its container's if that is less."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from kvtier.errors import ConfigError


def available_host_bytes(root: str | os.PathLike[str] = "/") -> int:
    """Bytes of host memory that can still be taken without swapping or meeting a container's limit.

    The least of `MemAvailable` and, for the cgroup of this process and each one above it that has a memory limit
    (version 2 or 1), the limit less what is in use. File pages that the kernel would drop first (`inactive_file`)
    do not count as in use: else a container that has just read a checkpoint would seem full.

    Args:
        root: Where `proc` and the cgroup mounts are looked for; for tests.

    Returns:
        The bytes, 0 or more.

    Raises:
        ConfigError: The kernel does not say how much is available, so `node_budget_bytes` has to be given.
    """
    root = Path(root)
    available = _mem_available_bytes(root)
    for limit, used in _cgroup_limits(root):
        available = min(available, limit - used)
    return max(available, 0)


def _mem_available_bytes(root: Path) -> int:
    try:
        for line in (root / "proc/meminfo").read_text().splitlines():
            name, _, value = line.partition(":")
            if name == "MemAvailable":
                return int(value.split()[0]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    raise ConfigError(
        "node_budget_bytes", None, "has to be given: /proc/meminfo does not say how much memory is available"
    )


def _cgroup_limits(root: Path) -> Iterator[tuple[int, int]]:
    """Yields (limit, bytes in use) of every memory-limited cgroup that this process is in."""
    paths = _cgroup_paths(root)
    for kind, mount_root, mount_point in _cgroup_mounts(root):
        path = paths.get(kind)
        if path is None:
            continue
        mounted = root / mount_point.relative_to("/")
        # The mount may show only a part of the tree (a container's), and then the path may lie outside of it.
        inside = path.relative_to(mount_root) if path.is_relative_to(mount_root) else PurePosixPath()
        for directory in (mounted / inside, *(mounted / parent for parent in inside.parents)):
            yield from _limits_v2(directory) if kind == "cgroup2" else _limits_v1(directory)


def _cgroup_paths(root: Path) -> dict[str, PurePosixPath]:
    """Reads /proc/self/cgroup: the path of this process in the tree of either version."""
    paths: dict[str, PurePosixPath] = {}
    for line in _lines(root / "proc/self/cgroup"):
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            paths["cgroup2"] = PurePosixPath(path)
        elif "memory" in controllers.split(","):
            paths["cgroup"] = PurePosixPath(path)
    return paths


def _cgroup_mounts(root: Path) -> Iterator[tuple[str, PurePosixPath, PurePosixPath]]:
    """Reads /proc/self/mountinfo: (version as file system type, root inside that file system, mount point)."""
    for line in _lines(root / "proc/self/mountinfo"):
        left, _, right = line.partition(" - ")
        fields, types = left.split(), right.split()
        if len(fields) < 5 or len(types) < 3:
            continue
        kind, options = types[0], types[2].split(",")
        if kind == "cgroup2" or (kind == "cgroup" and "memory" in options):
            yield kind, PurePosixPath(_unescape(fields[3])), PurePosixPath(_unescape(fields[4]))


def _unescape(path: str) -> str:
    """Undoes the octal escapes that mountinfo uses for white space and backslashes."""
    for code, character in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        path = path.replace(code, character)
    return path


def _limits_v2(directory: Path) -> Iterator[tuple[int, int]]:
    used = _number(directory / "memory.current")
    if used is None:
        return
    used -= _statistic(directory, "inactive_file")
    for name in ("memory.max", "memory.high"):  # beyond `high` the kernel slows the process down to a crawl
        limit = _number(directory / name)
        if limit is not None:
            yield limit, used


def _limits_v1(directory: Path) -> Iterator[tuple[int, int]]:
    limit = _number(directory / "memory.limit_in_bytes")
    used = _number(directory / "memory.usage_in_bytes")
    if limit is not None and used is not None:
        yield limit, used - _statistic(directory, "total_inactive_file")


def _statistic(directory: Path, name: str) -> int:
    for line in _lines(directory / "memory.stat"):
        key, _, value = line.partition(" ")
        if key == name and value.isdecimal():
            return int(value)
    return 0


def _number(file: Path) -> int | None:
    """The number in a cgroup file; None if there is no such file, or it says `max`."""
    text = "".join(_lines(file)[:1]).strip()
    return int(text) if text.isdecimal() else None


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        return []
