"""Experts that servers say tokens went to: in the forms that they have, and nothing of it believed."""

import base64
import io

import numpy as np
import pytest
import torch

from dtrain.base.errors import UserError
from dtrain.rl.routed import RoutedExpertsReader, to_npy_text
from tests.remote.test_http import engine_of, requests_of

READER = RoutedExpertsReader(num_experts=6, top_k=2, sparse_layers=(0, 2), num_layers=3)


def experts_of(rows, layers=2, top=2):
    """[rows, layers, top], distinct: a function of their sizes."""
    draw = np.random.default_rng(rows).random((rows, layers, 6))
    return draw.argsort(-1)[..., :top]


def npy(array):
    file = io.BytesIO()
    np.save(file, array)
    return base64.b64encode(file.getvalue()).decode()


def raw(array):
    return base64.b64encode(array.astype("<i4").tobytes()).decode()


FORMS = {
    "vLLM": lambda tokens: npy(experts_of(tokens - 1).astype("<i4")),
    "a row for the last token too": lambda tokens: npy(np.r_[experts_of(tokens - 1), experts_of(1)].astype("u1")),
    "every layer": lambda tokens: npy(np.insert(experts_of(tokens - 1), 1, 0, axis=1).astype("<u4")),
    "vLLM 0.21": lambda tokens: (experts_of(tokens - 1)[:3].tolist(), experts_of(tokens - 1)[3:].tolist() or None),
    "SGLang": lambda tokens: raw(np.insert(experts_of(tokens - 1), 1, 0, axis=1)),
}


@pytest.mark.parametrize("form", FORMS)
def test_experts_are_read(form, vllm, sglang):
    server = sglang if form == "SGLang" else vllm
    server.routed = FORMS[form]
    for one in engine_of(server, routed=READER).generate(requests_of(2, 2)):
        assert one.routed.dtype == torch.int16 and (one.routed[-1] == -1).all()
        assert np.array_equal(one.routed[:-1], np.sort(experts_of(9), -1))
    assert all("return_routed_experts" in body for _, body in sglang.calls)


def test_what_dtrain_writes_numpy_reads():
    routed = torch.from_numpy(experts_of(5)).to(torch.int16)[:-1]
    written = np.load(io.BytesIO(base64.b64decode(to_npy_text(routed))))
    assert written.dtype == np.int16 and np.array_equal(written, routed)


def test_a_token_that_a_server_does_not_know_routes_itself():
    experts = experts_of(4).astype("<i4")
    experts[1] = experts[2, 0] = -1
    read = READER.read(npy(experts), 5)
    assert (read[[1, 2, 4]] == -1).all() and np.array_equal(read[[0, 3]], np.sort(experts[[0, 3]], -1))


def changed(place, value):
    def text(tokens):
        array = experts_of(tokens - 1)
        array[place] = value
        return npy(array)

    return text


BAD = {
    "none": (None, "no routed experts. Start the server with --enable-return-routed-experts"),
    "another model": (lambda tokens: npy(experts_of(tokens - 1, top=3)), r"\[9, 2, 3\], not \[9, 2, 2\]"),
    "other layers": (lambda tokens: npy(experts_of(tokens - 1, layers=4)), r"\[9, 4, 2\], not \[9, 2, 2\]"),
    "too few tokens": (lambda tokens: npy(experts_of(tokens - 2)), r"\[8, 2, 2\], not \[9, 2, 2\]"),
    "beyond": (changed((1, 1, 0), 6), "to 6, but the model's are from 0 to 5"),
    "below": (changed((1, 1, 0), -2), "are from -2"),
    "half known": (changed((1, 1, 0), -1), "are from -1"),
    "twice": (changed((1, 1), 4), "the same routed expert twice for a token"),
    "a number": (lambda tokens: 7, "cannot be read"),
    "a ragged list": (lambda tokens: [[[1, 2], [3]]], "cannot be read"),
    "parts that do not fit": (lambda tokens: (experts_of(3).tolist(), [[[1, 2]]]), r"\[3, 2, 2\] and \[1, 1, 2\]"),
    "no base64": (lambda tokens: "?", "cannot be read"),
    "torn": (lambda tokens: npy(experts_of(tokens - 1))[:-8], "cannot be read"),
    "a head alone": (lambda tokens: base64.b64encode(b"\x93NUMPY").decode(), "cannot be read"),
    "floats": (lambda tokens: npy(experts_of(tokens - 1).astype(float)), "cannot be read.*<f8"),
    "an object": (lambda tokens: base64.b64encode(b"\x93NUMPY\x01\x00\x08\x00__x__()\n").decode(), "cannot be read"),
    "SGLang's of other sizes": (lambda tokens: raw(experts_of(tokens - 1)[:, :, :1]), "18 numbers for 10 tokens"),
}


@pytest.mark.parametrize("case", BAD)
def test_experts_that_cannot_be_are_refused_in_the_servers_name(case, vllm):
    vllm.routed = FORMS["vLLM"]
    engine = engine_of(vllm, routed=READER, retries=0)
    vllm.routed, words = BAD[case]
    with pytest.raises(UserError, match=words) as caught:
        engine.generate(requests_of(1, 1))
    assert vllm.url in str(caught.value)
    with pytest.raises(UserError, match="Servers must report routed experts for grpo.router_replay=true"):
        engine_of(vllm, routed=READER)
