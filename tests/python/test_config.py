from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from kvtier.config import HOST_PAGE_BYTES, TableConfig, available_host_bytes
from kvtier.errors import ConfigError

GIB = 2**30
BUDGET = 64 * GIB


class Machine:
    """A tree that looks like the parts of `/proc` and `/sys` that say how much memory there is."""

    def __init__(self, root: Path, available: int) -> None:
        self.root = root
        self.write("proc/meminfo", f"MemTotal: {2 * available // 1024} kB\nMemAvailable:  {available // 1024} kB\n")
        self.mounts: list[str] = ["22 28 0:20 / /proc rw - proc proc rw"]
        self.paths: list[str] = []

    def write(self, path: str, text: str) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def mount_v2(self, path: str, *, mount_root: str = "/", point: str = "/sys/fs/cgroup") -> None:
        self.mounts.append(f"30 23 0:26 {mount_root} {point} rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate")
        self.paths.append(f"0::{path}")
        self._write_proc()

    def mount_v1(self, path: str, *, mount_root: str = "/", point: str = "/sys/fs/cgroup/memory") -> None:
        self.mounts.append(f"33 30 0:29 / {Path(point).parent}/cpu rw - cgroup cgroup rw,cpu,cpuacct")
        self.mounts.append(f"35 30 0:32 {mount_root} {point} rw,relatime - cgroup cgroup rw,memory")
        self.paths += ["5:cpu,cpuacct:/elsewhere", f"4:memory:{path}"]
        self._write_proc()

    def _write_proc(self) -> None:
        self.write("proc/self/mountinfo", "".join(line + "\n" for line in self.mounts))
        self.write("proc/self/cgroup", "".join(line + "\n" for line in self.paths))

    def group_v2(
        self, path: str, used: int, *, most: str | int = "max", high: str | int = "max", cold: int = 0
    ) -> None:
        self.write(f"{path}/memory.max", f"{most}\n")
        self.write(f"{path}/memory.high", f"{high}\n")
        self.write(f"{path}/memory.current", f"{used}\n")
        self.write(f"{path}/memory.stat", f"anon 7\ninactive_file {cold}\nactive_file 9\n")

    def group_v1(self, path: str, used: int, *, most: int, cold: int = 0) -> None:
        self.write(f"{path}/memory.limit_in_bytes", f"{most}\n")
        self.write(f"{path}/memory.usage_in_bytes", f"{used}\n")
        self.write(f"{path}/memory.stat", f"inactive_file 1\ntotal_inactive_file {cold}\n")


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path, available=100 * GIB)


def test_without_cgroups_the_machine_decides(machine: Machine) -> None:
    assert available_host_bytes(machine.root) == 100 * GIB


def test_v2_limit_of_the_own_group(machine: Machine) -> None:
    machine.mount_v2("/a")
    machine.group_v2("sys/fs/cgroup/a", 3 * GIB, most=16 * GIB)
    assert available_host_bytes(machine.root) == 13 * GIB


@pytest.mark.parametrize("tight", ["sys/fs/cgroup/a", "sys/fs/cgroup/a/b", "sys/fs/cgroup/a/b/c"])
def test_v2_tightest_group_of_the_hierarchy_decides(machine: Machine, tight: str) -> None:
    machine.mount_v2("/a/b/c")
    for path in ("sys/fs/cgroup/a", "sys/fs/cgroup/a/b", "sys/fs/cgroup/a/b/c"):
        machine.group_v2(path, 2 * GIB, most=8 * GIB if path == tight else 50 * GIB)
    machine.group_v2("sys/fs/cgroup/other", 2 * GIB, most=3 * GIB)
    assert available_host_bytes(machine.root) == 6 * GIB


def test_v2_unlimited_group(machine: Machine) -> None:
    machine.mount_v2("/a")
    machine.group_v2("sys/fs/cgroup/a", 3 * GIB)
    assert available_host_bytes(machine.root) == 100 * GIB


def test_v2_throttling_limit_counts(machine: Machine) -> None:
    machine.mount_v2("/a")
    machine.group_v2("sys/fs/cgroup/a", 3 * GIB, most=16 * GIB, high=12 * GIB)
    assert available_host_bytes(machine.root) == 9 * GIB


def test_v2_cold_file_pages_are_not_in_use(machine: Machine) -> None:
    machine.mount_v2("/a")
    machine.group_v2("sys/fs/cgroup/a", 16 * GIB, most=16 * GIB, cold=14 * GIB)
    assert available_host_bytes(machine.root) == 14 * GIB


def test_v2_over_its_limit_is_zero(machine: Machine) -> None:
    machine.mount_v2("/a")
    machine.group_v2("sys/fs/cgroup/a", 17 * GIB, most=16 * GIB)
    assert available_host_bytes(machine.root) == 0


def test_container_sees_its_group_as_the_root_of_the_mount(machine: Machine) -> None:
    machine.mount_v2("/docker/x", mount_root="/docker/x")
    machine.group_v2("sys/fs/cgroup", 1 * GIB, most=4 * GIB)
    assert available_host_bytes(machine.root) == 3 * GIB


def test_group_outside_of_the_mount(machine: Machine) -> None:
    machine.mount_v2("/elsewhere", mount_root="/docker/x")
    machine.group_v2("sys/fs/cgroup", 1 * GIB, most=4 * GIB)
    assert available_host_bytes(machine.root) == 3 * GIB


def test_v2_beside_v1_and_escaped_mount_point(machine: Machine) -> None:
    machine.mount_v2("/a", point="/my\\040groups")
    machine.group_v2("my groups/a", 1 * GIB, most=5 * GIB)
    assert available_host_bytes(machine.root) == 4 * GIB


def test_v1_hierarchy(machine: Machine) -> None:
    machine.mount_v1("/kube/pod")
    machine.group_v1("sys/fs/cgroup/memory", 50 * GIB, most=9223372036854771712)
    machine.group_v1("sys/fs/cgroup/memory/kube", 3 * GIB, most=40 * GIB)
    machine.group_v1("sys/fs/cgroup/memory/kube/pod", 3 * GIB, most=10 * GIB, cold=1 * GIB)
    assert available_host_bytes(machine.root) == 8 * GIB


def test_v1_and_empty_v2_together(machine: Machine) -> None:
    machine.mount_v2("/", point="/sys/fs/cgroup/unified")
    machine.mount_v1("/pod")
    machine.group_v1("sys/fs/cgroup/memory/pod", 3 * GIB, most=10 * GIB)
    assert available_host_bytes(machine.root) == 7 * GIB


def test_garbage_in_cgroup_files_is_ignored(machine: Machine) -> None:
    machine.mount_v2("/a")
    machine.group_v2("sys/fs/cgroup/a", 1, most="lots")
    machine.write("proc/self/mountinfo", "30 23\n\n" + (machine.root / "proc/self/mountinfo").read_text())
    assert available_host_bytes(machine.root) == 100 * GIB


@pytest.mark.parametrize("text", [None, "", "MemTotal: 5 kB\n", "MemAvailable:\n", "MemAvailable: much kB\n"])
def test_unknown_memory_asks_for_a_budget(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        Machine(tmp_path, 0).write("proc/meminfo", text)
    with pytest.raises(ConfigError, match="node_budget_bytes"):
        available_host_bytes(tmp_path)


def test_this_machine_says_something_sensible() -> None:
    total = next(line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemTotal"))
    assert 0 < available_host_bytes() <= int(total.split()[1]) * 1024


def config(**changes: object) -> TableConfig:
    arguments: dict[str, object] = {
        "gpu_blocks": 100,
        "block_size": 16,
        "block_bytes": 2 * 2**20,
        "cpu_bytes": 8 * GIB,
        "local_ranks": 4,
        "node_budget_bytes": BUDGET,
    }
    return TableConfig(**{**arguments, **changes})  # type: ignore[arg-type]


def test_bytes_of_the_node_are_divided_over_its_ranks() -> None:
    plan = config()
    assert plan.cpu_blocks == 1024
    assert plan.gpu_bytes_per_rank == 100 * 2 * 2**20
    assert plan.gpu_bytes_per_node == 4 * 100 * 2 * 2**20
    assert plan.cpu_bytes_per_rank == 2 * GIB
    assert plan.cpu_bytes_per_node == plan.cpu_bytes == 8 * GIB
    assert plan.cpu_block_size == plan.block_size == 16


def test_blocks_are_whole_pages_and_the_rest_is_left_over() -> None:
    plan = config(block_bytes=HOST_PAGE_BYTES + 1, cpu_bytes=4 * (5 * HOST_PAGE_BYTES) + 3)
    assert plan.cpu_block_bytes == 2 * HOST_PAGE_BYTES
    assert plan.cpu_blocks == 2
    assert plan.cpu_bytes_per_node == 4 * 4 * HOST_PAGE_BYTES
    assert plan.gpu_bytes_per_rank == 100 * (HOST_PAGE_BYTES + 1)


def test_blocks_instead_of_bytes() -> None:
    plan = config(cpu_bytes=None, cpu_blocks=1024)
    assert plan == config()


def test_no_cpu_tier() -> None:
    plan = config(cpu_bytes=None, cpu_blocks=0)
    assert plan.cpu_blocks == plan.cpu_bytes == plan.cpu_bytes_per_node == 0


@pytest.mark.parametrize("changes", [{}, {"cpu_bytes": 8 * GIB + 1}, {"cpu_bytes": None, "cpu_blocks": 0}])
def test_a_plan_is_frozen_and_can_be_replaced(changes: dict[str, object]) -> None:
    plan = config(**changes)
    assert dataclasses.replace(plan, gpu_blocks=7) == config(**changes, gpu_blocks=7)
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.gpu_blocks = 8  # type: ignore[misc]


def test_budget_defaults_to_what_is_available(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtier.config.available_host_bytes", lambda: 8 * GIB)
    assert config(node_budget_bytes=None).node_budget_bytes == 8 * GIB
    monkeypatch.setattr("kvtier.config.available_host_bytes", lambda: 8 * GIB - 1)
    with pytest.raises(ConfigError, match=f"cpu_bytes = {8 * GIB}: per node: at most {8 * GIB - 1}"):
        config(node_budget_bytes=None)


MIB2 = 2 * 2**20


@pytest.mark.parametrize(
    ("changes", "argument", "texts"),
    [
        ({"gpu_blocks": 0}, "gpu_blocks", ["= 0", "per rank", "1 .. 16777216"]),
        ({"gpu_blocks": -1}, "gpu_blocks", ["= -1", "per rank"]),
        ({"gpu_blocks": 2**24 + 1}, "gpu_blocks", ["= 16777217", "16777216"]),
        ({"gpu_blocks": 1.5}, "gpu_blocks", ["= 1.5", "integer"]),
        ({"gpu_blocks": True}, "gpu_blocks", ["= True", "integer"]),
        ({"gpu_blocks": "10"}, "gpu_blocks", ["= '10'", "integer"]),
        ({"block_size": 0}, "block_size", ["= 0", "1 .. 65536"]),
        ({"block_size": 65537}, "block_size", ["= 65537", "65536"]),
        ({"block_bytes": 0}, "block_bytes", ["= 0", "per rank"]),
        ({"local_ranks": 0}, "local_ranks", ["= 0", "per node", "1 .. 32"]),
        ({"local_ranks": 33}, "local_ranks", ["= 33", "per node", "1 .. 32"]),
        ({"cpu_block_size": 24}, "cpu_block_size", ["= 24", "not a multiple", "16", "every rank"]),
        ({"cpu_block_size": 8}, "cpu_block_size", ["= 8", "not a multiple", "16"]),
        ({"cpu_block_size": 32}, "cpu_block_size", ["= 32", "differs", "16", "every rank"]),
        ({"cpu_block_size": 0}, "cpu_block_size", ["= 0", "1 .. 65536"]),
        ({"cpu_bytes": 0}, "cpu_bytes", ["= 0", "per node", f"at least {4 * MIB2}", "4 local ranks"]),
        ({"cpu_bytes": -1}, "cpu_bytes", ["= -1", "per node", "at least"]),
        ({"cpu_bytes": 4 * MIB2 - 1}, "cpu_bytes", [f"= {4 * MIB2 - 1}", "per node", f"at least {4 * MIB2}"]),
        ({"cpu_bytes": BUDGET + 1}, "cpu_bytes", [f"= {BUDGET + 1}", "per node", f"at most {BUDGET}"]),
        ({"cpu_bytes": 2.5e9}, "cpu_bytes", ["= 2500000000.0", "integer", "per node"]),
        (
            {"cpu_bytes": (2**24 + 1) * 4096, "block_bytes": 1, "local_ranks": 1, "node_budget_bytes": 2**40},
            "cpu_bytes",
            [f"= {(2**24 + 1) * 4096}", "per node", f"at most {(2**24 + 1) * 4096 - 1}"],
        ),
        ({"cpu_bytes": None}, "cpu_blocks", ["per rank", "cpu_bytes", "per node"]),
        ({"cpu_blocks": 5}, "cpu_blocks", ["= 5", "per rank", "1024", "one of the two"]),
        ({"cpu_bytes": None, "cpu_blocks": -1}, "cpu_blocks", ["= -1", "per rank"]),
        ({"cpu_bytes": None, "cpu_blocks": 2**24 + 1}, "cpu_blocks", ["= 16777217", "per rank"]),
        (
            {"cpu_bytes": None, "cpu_blocks": 8193},
            "cpu_blocks",
            ["= 8193", "per rank", "at most 8192", "4 local ranks", f"node_budget_bytes = {BUDGET} (per node)"],
        ),
        ({"node_budget_bytes": -1}, "node_budget_bytes", ["= -1", "per node"]),
    ],
)
def test_refusals_name_argument_value_limit_and_scope(
    changes: dict[str, object], argument: str, texts: list[str]
) -> None:
    with pytest.raises(ConfigError) as refusal:
        config(**changes)
    assert refusal.value.argument == argument
    for text in texts:
        assert text in str(refusal.value)


def test_limits_themselves_are_accepted() -> None:
    assert config(cpu_bytes=4 * MIB2).cpu_blocks == 1
    assert config(cpu_bytes=BUDGET).cpu_blocks == 8192
    assert config(cpu_bytes=None, cpu_blocks=8192).cpu_bytes == BUDGET
    most = config(cpu_bytes=(2**24 + 1) * 4096 - 1, block_bytes=1, local_ranks=1, node_budget_bytes=2**40)
    assert most.cpu_blocks == 2**24


def test_table_has_the_planned_sizes() -> None:
    table = config(local_ranks=2).table(policy="lru")
    assert (table.gpu_blocks, table.cpu_blocks, table.block_size, table.ranks) == (100, 2048, 16, 2)
    assert config(local_ranks=2).table(ranks=8).ranks == 8
    with pytest.raises(ConfigError, match="policy"):
        config().table(policy="luck")
