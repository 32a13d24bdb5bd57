"""Servers that speak vLLM's and SGLang's protocols, one of each for a test."""

import pytest

from tests.remote.fakes import FakeSglang, FakeVllm


@pytest.fixture
def vllm():
    fake = FakeVllm()
    yield fake
    fake.close()


@pytest.fixture
def sglang():
    fake = FakeSglang()
    yield fake
    fake.close()
