"""What a result depends on besides its configuration: commit, versions, hardware."""

import os
import platform
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

import stella
from stella.files import Line, read_json
from stella.train.device import Runtime


def environment(run: Runtime) -> dict[str, Any]:
    """Facts of this machine and checkout, for environment.json."""
    return {
        **_checkout(),
        "stella": stella.__version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "platform": platform.platform(),
        "processor": platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name(run.device) if run.device.type == "cuda" else None,
        "precision": "float32" if run.autocast_to is None else str(run.autocast_to).removeprefix("torch."),
    }


def provenance(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Commit and hardware out of `environment`, as columns of results. Without a checkout the version."""
    hardware = facts["gpu"] or f"{facts['cores']}-core {facts['processor']}"
    commit = facts["commit"] or (f"version {facts['stella']}" if "stella" in facts else None)
    return {"commit": commit, "changed_files": facts["changed_files"], "hardware": hardware}


def _checkout() -> dict[str, Any]:
    """The commit of this package and the number of changed files; None if unknown."""
    if given := os.environ.get("STELLA_COMMIT"):  # for machines without the .git folder
        return {"commit": given, "changed_files": None}
    if _git("ls-files", "--error-unmatch", Path(__file__).name) is None:  # installed inside another project's checkout
        return {"commit": None, "changed_files": None}
    changed = _git("status", "--porcelain", "--untracked-files=no") or ""
    return {"commit": _git("rev-parse", "HEAD"), "changed_files": len(changed.splitlines())}


def _git(*command: str) -> str | None:
    """The output of git in this folder; None if it fails."""
    here = Path(__file__).parent
    try:
        done = subprocess.run(["git", *command], cwd=here, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def with_earlier(facts: Line, file: Path) -> Line:
    """The environment, with those of earlier parts of this run if commit or machine changed."""
    if not file.exists():
        return facts
    before = read_json(file)
    earlier = before.pop("earlier", [])
    if where(before) != where(facts):
        earlier = [*earlier, before]
    return facts | {"earlier": earlier} if earlier else facts


def where(facts: Line) -> str:
    found = provenance(facts)
    code = f"commit {facts['commit'][:10]}" if facts["commit"] else found["commit"] or "an unknown commit"
    return f"{code} on {found['hardware']}"
