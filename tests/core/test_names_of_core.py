"""What a method's file imports in one line."""

import ast
import inspect

import pytest

import lightning_fed
from lightning_fed import core


def test_each_name_is_said_once_for_type_checkers_and_once_for_python() -> None:
    checked = {
        alias.name: node.module
        for node in ast.walk(ast.parse(inspect.getsource(core)))
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("lightning_fed.")
        for alias in node.names
    }
    homes = {name: f"lightning_fed.{home}" for home, names in core._HOMES.items() for name in names}
    assert homes == checked
    assert sorted(homes) == sorted(core.__all__)
    for name in core.__all__:
        assert getattr(core, name) is not None
    assert core.FederatedModule is lightning_fed.FederatedModule


def test_a_name_that_is_not_there_is_none() -> None:
    with pytest.raises(AttributeError, match="no attribute 'WorkerSpec'"):
        core.WorkerSpec  # noqa: B018
