"""What is recorded about the machine and the code of a run."""

import subprocess
from importlib import metadata
from pathlib import Path

import pytest
from helpers.tables import ROOT

import stella
from stella.runs import environment as module
from stella.runs.environment import environment, provenance, where
from stella.train.device import runtime


def test_a_commit_is_that_of_this_package_or_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Installed below another project, as in its .venv, the package has no commit of its own."""

    def git(*command: str) -> str:
        who = ("-c", "user.name=a", "-c", "user.email=a@b")
        return subprocess.run(["git", *who, *command], cwd=tmp_path, capture_output=True, text=True, check=True).stdout

    def found() -> tuple[str | None, int | None]:
        facts = environment(runtime("cpu"))
        return facts["commit"], facts["changed_files"]

    monkeypatch.delenv("STELLA_COMMIT", raising=False)
    file = tmp_path / "site-packages" / "runtime.py"
    file.parent.mkdir()
    file.write_text("")
    monkeypatch.setattr(module, "__file__", str(file))
    assert found() == (None, None)
    git("init")
    git("commit", "--allow-empty", "-m", "another project")
    assert found() == (None, None)
    git("add", ".")
    git("commit", "-m", "with this file")
    assert found() == (git("rev-parse", "HEAD").strip(), 0)
    file.write_text("changed")
    assert found()[1] == 1
    monkeypatch.setenv("STELLA_COMMIT", "given")
    assert found() == ("given", None)


def test_without_a_checkout_results_name_the_version() -> None:
    facts = {"commit": None, "changed_files": None, "stella": "0.1.0", "gpu": "G"}
    assert provenance(facts)["commit"] == "version 0.1.0" and where(facts) == "version 0.1.0 on G"
    assert where(facts | {"commit": "0123456789ab"}) == "commit 0123456789 on G"
    assert provenance({key: value for key, value in facts.items() if key != "stella"})["commit"] is None


def test_a_source_tree_that_is_not_installed_has_a_version(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", missing)
    assert environment(runtime("cpu"))["stella"] == stella.__version__


def test_the_citation_names_the_version() -> None:
    assert f"\nversion: {stella.__version__}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")
