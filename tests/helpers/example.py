"""The example of docs/methods.md as a method of the registry.

`pytest -p example` with this folder on the path has it there before tests are collected: a suite with a new method.
"""

import importlib.util
import re
import sys
import tempfile
from pathlib import Path

import pytest

from stella.methods import METHODS, Method

DOCS = (Path(__file__).parents[2] / "docs" / "methods.md").read_text(encoding="utf-8")
[EXAMPLE] = re.findall(r"```python\n(.+?)```", DOCS, re.S)
[(EXAMPLE_NAME, EXAMPLE_CLASS)] = re.findall(r'^    "(\w+)": "\1\.(\w+)",$', DOCS, re.M)


def example(folder: Path) -> type[Method]:
    """From a file, as the page tells its reader."""
    file = folder / f"{EXAMPLE_NAME}.py"
    file.write_text(EXAMPLE, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(EXAMPLE_NAME, file)
    assert spec is not None and spec.loader is not None
    sys.modules[EXAMPLE_NAME] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found: type[Method] = getattr(module, EXAMPLE_CLASS)
    return found


def pytest_configure(config: pytest.Config) -> None:
    folder = tempfile.TemporaryDirectory()
    config.add_cleanup(folder.cleanup)
    METHODS[EXAMPLE_NAME] = example(Path(folder.name))
