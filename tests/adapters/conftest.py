"""Fixture of the tests of adapters."""

import pytest

from tests.adapters.by_peft import save_adapter, save_base


@pytest.fixture
def made(tmp_path):
    """A qwen3, and an adapter that PEFT has saved."""
    save_adapter(save_base(tmp_path / "base", "qwen3"), tmp_path / "adapter")
    return tmp_path
