"""Which machine a run is on, and what is said where it cannot be as fast as it could."""

import shutil
import subprocess
import sys
from importlib import util
from pathlib import Path
from typing import Any

import pytest
import torch

from stella.errors import ConfigError
from stella.fast import parts
from stella.train import device as module
from stella.train.device import Clock, Later, runtime


@pytest.mark.parametrize("activations", ["narrow", "all"])
def test_a_setting_that_changes_nothing_here_is_told(activations: Any) -> None:
    assert f"train.activations={activations} has no effect" in runtime("cpu", "auto", "off", activations).remark
    assert activations not in runtime("cpu", "auto", "on", activations).remark or parts.missing("cpu")


def test_a_gpu_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="no GPU is available"):
        runtime("cuda")


@pytest.mark.parametrize(
    ("triton", "compiler", "missing"),
    [(None, "/bin/cc", "Triton"), ("there", None, "a C compiler"), ("there", "/bin/cc", None)],
)
def test_what_is_missing_to_compile_is_one_sentence(
    triton: Any, compiler: Any, missing: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(util, "find_spec", lambda name: triton)
    monkeypatch.setattr(shutil, "which", lambda name: compiler)
    parts.missing.cache_clear()
    try:
        for wanted in ("auto", "on"):
            machine = runtime("cuda", "auto", wanted)  # type: ignore[arg-type]
            assert machine.compile == (missing is None)
            assert missing is None or machine.remark.startswith(f"not compiled, and slower: {missing}")
        assert runtime("cuda", "auto", "off").remark == ""
        assert str(machine.device) == "cuda:0" and machine.autocast_to == torch.bfloat16
    finally:
        parts.missing.cache_clear()


def test_a_cpu_compiles_where_there_is_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    for compiler in (None, "/bin/c++"):
        monkeypatch.setattr(shutil, "which", lambda name, found=compiler: found)
        parts.missing.cache_clear()
        try:
            machine = runtime("cpu", "auto", "on")
        finally:
            parts.missing.cache_clear()
        assert machine.compile == bool(compiler)
        assert compiler or machine.remark.startswith("not compiled, and slower: a C++ compiler")


def test_values_arrive_and_times_pass_on_a_cpu() -> None:
    later, clock = Later(torch.tensor([True, False])), Clock(module.torch.device("cpu"))
    assert later.known and later.read() == [True, False]
    start = clock.mark()
    assert clock.ms(start, clock.mark()) >= 0


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="glibc's allocator")
def test_a_step_on_a_cpu_uses_memory_again_that_it_had() -> None:
    """Finetune as in the demo: without it some 25,000 pages of a step are new."""
    code = """
import resource
from stella.bench.steps import advance, make_trainer
from stella.config import resolve
from stella.runs.config import RunConfig, settle
config = settle(resolve(RunConfig, None, ["method=finetune", "stream.batch_size=32", "train.device=cpu"]))
trainer = make_trainer(config)
def new_pages(steps):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    advance(trainer, steps)
    return (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / steps
new_pages(6)
print(new_pages(4))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert float(done.stdout) < 5000


def test_free_ram_is_the_least_of_machine_and_container(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:  9000 kB\nMemAvailable:    5000 kB\n")
    assert module._free_ram(meminfo, tmp_path) == 5000 * 1024
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("900000\n")
    assert module._free_ram(meminfo, tmp_path) == 5000 * 1024
    (tmp_path / "memory.max").write_text("1000000\n")
    assert module._free_ram(meminfo, tmp_path) == 100_000
    (tmp_path / "memory.stat").write_text("anon 5\ninactive_file 300000\n")
    assert module._free_ram(meminfo, tmp_path) == 400_000
    assert module._free_ram(tmp_path / "none", tmp_path / "none") > 2**28
