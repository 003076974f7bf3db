from pathlib import Path

import pytest

from stella.errors import StellaError
from stella.files import Lines, read_lines, write_json
from stella.runs.folder import RunFolder


def test_a_folder_in_use_is_refused(tmp_path: Path) -> None:
    """test_files: also by another process, and until that is dead."""
    in_use = pytest.raises(StellaError, match="is in use by process")
    with RunFolder(tmp_path).locked(), in_use, RunFolder(tmp_path).locked():
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
    with pytest.raises(StellaError, match=rf"has {length} bytes and had {length + 1}"):
        folder.cut(length + 1)


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
