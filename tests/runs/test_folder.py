import subprocess
import sys
from pathlib import Path

import pytest

from stella.errors import StellaError
from stella.files import Lines, read_lines, write_json
from stella.runs.folder import RunFolder

HOLD = """
import sys, time
from stella.runs.folder import RunFolder
with RunFolder(sys.argv[1]).locked():
    print("locked", flush=True)
    time.sleep(60)
"""


def test_a_folder_in_use_is_refused_and_a_dead_process_holds_none(tmp_path: Path) -> None:
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE)
    try:
        assert holder.stdout is not None and holder.stdout.readline() == b"locked\n"
        refusal = rf"is in use by process {holder.pid};"
        with pytest.raises(StellaError, match=refusal), RunFolder(tmp_path).locked():
            pass
    finally:
        holder.kill()
        holder.communicate()
    with RunFolder(tmp_path).locked():
        pass


def test_a_torn_line_is_not_read_and_cut_takes_it_away(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    lines = Lines(folder.metrics)
    lines.write({"kind": "step", "step": 1})
    length = lines.sync()
    lines.write({"kind": "step", "step": 2})
    lines.close()
    with folder.metrics.open("ab") as file:
        file.write(b'{"kind": "st')
    assert [line["step"] for line in read_lines(folder.metrics)] == [1, 2]
    folder.cut(length)
    assert folder.metrics.stat().st_size == length
    lines = Lines(folder.metrics)
    lines.write({"kind": "step", "step": 3})
    lines.close()
    assert [line["step"] for line in read_lines(folder.metrics)] == [1, 3]


def test_a_damaged_line_is_told_with_its_file(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.metrics.write_bytes(b'{"kind": "step"}\n{"kind": "st{"kind": "end"}\n')
    with pytest.raises(StellaError, match=r"line 2 of .*metrics\.jsonl is damaged"):
        _ = folder.end


def test_metrics_shorter_than_the_checkpoint_says_are_refused(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.metrics.write_bytes(b"{}\n")
    with pytest.raises(StellaError, match="has 3 bytes and had 30"):
        folder.cut(30)


def test_only_an_end_line_is_an_end(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    assert folder.end is None
    folder.metrics.write_text('{"kind": "step"}\n')
    assert folder.end is None
    folder.metrics.write_text('{"kind": "step"}\n{"kind": "end", "A": 1.0}\n')
    assert folder.end == {"kind": "end", "A": 1.0}


def test_a_missing_or_damaged_configuration_is_told(tmp_path: Path) -> None:
    with pytest.raises(StellaError, match="the folder of a run"):
        RunFolder(tmp_path).read_config()
    RunFolder(tmp_path).config.write_text("{")
    with pytest.raises(StellaError, match="damaged"):
        RunFolder(tmp_path).read_config()
    write_json(RunFolder(tmp_path).config, {"a": [1, None, "ö"]})
    assert RunFolder(tmp_path).read_config() == {"a": [1, None, "ö"]}
