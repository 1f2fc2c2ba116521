"""What a method's file imports in one line."""

import ast
import inspect
from importlib import import_module

import pytest

import lightning_fed
from lightning_fed import core


def test_each_name_is_that_of_its_home() -> None:
    checked = {
        alias.name: str(node.module)
        for node in ast.walk(ast.parse(inspect.getsource(core)))
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("lightning_fed.")
        for alias in node.names
    }
    assert sorted(checked) == sorted(core.__all__)
    assert {f"lightning_fed.{home}" for home in core._HOMES} == set(checked.values())
    for name, home in checked.items():
        assert getattr(core, name) is getattr(import_module(home), name)
    assert core.FederatedModule is lightning_fed.FederatedModule


def test_a_name_that_is_not_there_is_none() -> None:
    with pytest.raises(AttributeError, match="no attribute 'WorkerSpec'"):
        core.WorkerSpec  # noqa: B018
