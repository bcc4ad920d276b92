"""Faults to put into the twin on purpose: how they are collected, and how a method is wrapped."""

from __future__ import annotations

from collections.abc import Callable

import pytest

Fault = Callable[[pytest.MonkeyPatch], None]


def collected_in(faults: dict[str, Fault]) -> Callable[[Fault], Fault]:
    """A decorator that enters a function, which puts in one fault, under its name."""

    def enter(put_in: Fault) -> Fault:
        faults[put_in.__name__] = put_in
        return put_in

    return enter


def around(patch: pytest.MonkeyPatch, owner: type, name: str) -> Callable[..., None]:
    """Replaces a method by a function that gets the original as its first argument."""

    def install(function: Callable[..., object]) -> None:
        original = getattr(owner, name)
        patch.setattr(owner, name, lambda self, *args, **options: function(original, self, *args, **options))

    return install
