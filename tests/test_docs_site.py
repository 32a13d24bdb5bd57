"""The documentation site is built from pages and docstrings, without network, and its links lead somewhere."""

import os
import subprocess
import sys

import pytest

from tests.pages import ROOT


@pytest.mark.slow
@pytest.mark.processes
def test_the_site_has_the_pages_and_the_reference(tmp_path):
    # No server listens at this port: a request for anything beyond this machine fails.
    environ = {**os.environ, "http_proxy": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9"}
    done = subprocess.run(
        [sys.executable, ROOT / "tools" / "docs_site.py", "--out", tmp_path],
        capture_output=True,
        text=True,
        env=environ,
    )
    assert done.returncode == 0, done.stderr
    site = tmp_path / "site"
    assert "Train your own model" in (site / "index.html").read_text()
    for tutorial in (ROOT / "docs" / "tutorials").glob("*.md"):
        assert (site / "docs" / "tutorials" / tutorial.stem / "index.html").is_file()
    # A function with its sections, and an example that is shown as code.
    blocks = (site / "reference" / "dtrain" / "attention" / "blocks" / "index.html").read_text()
    assert "merge_by_log_sum_exp" in blocks and "Parameters:" in blocks and "&gt;&gt;&gt;" in blocks
