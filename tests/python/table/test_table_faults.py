"""Teeth: faults put into the twin on purpose, each of which the scenarios or the oracle must notice."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable

import pytest
import test_table_scenarios_1_to_7
import test_table_scenarios_8_to_11
from faults_in_blocks import FAULTS as FAULTS_IN_BLOCKS
from faults_in_copies import FAULTS as FAULTS_IN_COPIES
from kvtier.reference import ReferenceBlockTable
from random_driver import RandomDriver
from table_harness import Harness

SCENARIOS = [
    test
    for module in (test_table_scenarios_1_to_7, test_table_scenarios_8_to_11)
    for name, test in inspect.getmembers(module, inspect.isfunction)
    if name.startswith("test_s") and list(inspect.signature(test).parameters) == ["make"]
]
SCENARIOS += [
    functools.partial(test_table_scenarios_8_to_11.test_s08_generated_blocks_reach_the_host, lag=lag) for lag in (1, 9)
]
SCENARIOS += [
    functools.partial(test_table_scenarios_8_to_11.test_s10_identity_is_part_of_the_key, stored=name)
    for name in ("none", "salt x", "media 1 at 4", "a bc")
]
FAULTS = FAULTS_IN_BLOCKS | FAULTS_IN_COPIES
MODES = ("early", "late")


def first_complaint(**checks: bool) -> str | None:
    """What the scenarios and a few random runs complain about."""
    for mode in MODES:

        def make(gpu_blocks, cpu_blocks, block_size=4, mode=mode, **options):
            table = ReferenceBlockTable(gpu_blocks, cpu_blocks, block_size, **options)
            return Harness(table, mode, **options, **checks)

        for scenario in SCENARIOS:
            complaint = complaint_of(functools.partial(scenario, make))
            if complaint is not None:
                return complaint
    for seed in range(30):
        options = {"ranks": 1 + seed % 2, "max_store_blocks_per_step": (None, None, 2)[seed % 3]}
        table = ReferenceBlockTable((4, 6, 8, 12)[seed % 4], (8, 12, 4, 16)[seed // 2 % 4], 1 + seed % 3, **options)
        driver = RandomDriver(table, MODES[seed % 2], seed, **options, **checks)
        complaint = complaint_of(functools.partial(driver.run, 200))
        if complaint is not None:
            return complaint
    return None


def complaint_of(run: Callable[[], None]) -> str | None:
    try:
        run()
    except AssertionError as error:
        return str(error)
    return None


@pytest.mark.parametrize("checks", [{"audit": False}, {"audit": False, "gauges": False}])
def test_without_a_fault_nobody_complains(checks):
    assert len(SCENARIOS) >= 20
    assert len(FAULTS) >= 38
    assert first_complaint(**checks) is None


@pytest.mark.parametrize("name", list(FAULTS))
def test_a_fault_is_noticed(monkeypatch, name):
    """The table's own `audit()` is not asked: it may well be blind to the table's fault."""
    FAULTS[name](monkeypatch)
    assert first_complaint(audit=False) is not None


@pytest.mark.parametrize("name", list(FAULTS))
def test_a_wrong_block_is_noticed_in_memory(monkeypatch, name):
    """Neither `audit()` nor `stats()` is believed: wrong ids, events and contents must give the fault away."""
    FAULTS[name](monkeypatch)
    assert first_complaint(audit=False, gauges=False) is not None
