"""The calls that run under compute-sanitizer, without it."""

from common import runtime

import pytest
import sanitize


def test_all_phases_are_called(capsys):
    sanitize.call_all()
    names = capsys.readouterr().out.splitlines()
    assert {name.split(",")[0].strip() for name in names} == {f"phase {n}" for n in range(1, 6)}
    assert len(names) == 13
    assert sum("without Hopper" in name for name in names) == 3


@pytest.mark.skipif(runtime.DEVICE == "cuda", reason="it may be there")
def test_a_missing_tool_is_no_success(capsys, monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert not sanitize.verdict("memcheck")
    assert "compute-sanitizer" in capsys.readouterr().out
