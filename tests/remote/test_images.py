"""Prompts with images and the client of servers: `dtrain serve` against the native engine, and vLLM's and SGLang's
protocols."""

import base64
import json
import shutil
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from dtrain.adapters.config import AdapterConfig
from dtrain.base.errors import UserError
from dtrain.data.images.processor import ImageTokens, Layout
from dtrain.data.rows.rows import Cursor
from dtrain.data.sources.sources import open_rows
from dtrain.data.text.tokenizer import Tokenizer
from dtrain.inference.chats import ImagePrompt
from dtrain.inference.engine import Engine
from dtrain.inference.generate import load
from dtrain.recipe.rollouts import Sampling
from dtrain.rl.collect import CompletionSampler, read_prompts
from dtrain.rl.remote.dialects import derived_seed
from dtrain.rl.remote.engine import adapter_refusal, check_vision_tower
from tests.data.makers import write_jsonl
from tests.pictures import chat, picture_recipe, question, write_model, write_pictures
from tests.remote.fakes import FakeVllm, drawn
from tests.remote.test_http import engine_of
from tests.serve.serving import make_model, serving


class Drawer:
    """An engine that draws nothing, and takes images in one form or the other."""

    def __init__(self, is_remote: bool):
        self.is_remote = is_remote


def iterate_prompts(root, family):
    """A model's directory, its tokenizer, and rows with one picture, two, none, and one whose bytes are in the row."""
    model, names = write_model(root / "model", family), write_pictures(root)
    inline = "data:image/png;base64," + base64.b64encode((root / names[3]).read_bytes()).decode()
    rows = [chat(*question(number, names)) for number in range(3)] + [chat(inline, "What is it?")]
    recipe = picture_recipe(root, f"model.path={model}", "method=grpo", "data.max_length=200",
                            f"data.train.path={write_jsonl(root / 'rows.jsonl', rows)}")  # fmt: skip
    tokenizer = Tokenizer.from_directory(model)
    rows = open_rows(
        recipe.data, tokenizer=tokenizer, progress=False, print_line=lambda line: None, kind="prompts", epochs=1
    )
    return model, tokenizer, rows


@pytest.fixture(scope="module")
def of_qwen(tmp_path_factory):
    return iterate_prompts(tmp_path_factory.mktemp("qwen"), "qwen3-vl")


@pytest.fixture(scope="module")
def of_gemma(tmp_path_factory):
    return iterate_prompts(tmp_path_factory.mktemp("gemma"), "gemma3")


@pytest.fixture(params=["of_qwen", "of_gemma"])
def made(request):
    return request.getfixturevalue(request.param)


def requests_of(made, is_remote: bool, temperature: float = 0.9, samples: int = 2):
    _, tokenizer, rows = made
    sampling = Sampling(max_new_tokens=5, temperature=temperature)
    sampler = CompletionSampler(Drawer(is_remote), tokenizer, sampling, 200, 3, lambda: False)
    return sampler.build_requests(read_prompts(rows, Cursor(), 4), samples, greedy=temperature == 0)


def native(made, requests):
    loaded = load(made[0], torch.float64, torch.device("cpu"), vision=True)
    return Engine(loaded.model.eval()).generate(requests)


def trainers(requests):
    """What a server reads that has the trainer's template and image processor: prompts by their images."""
    prompts = {tuple(one.image_prompt.uris()): list(one.prompt) for one in requests if one.image_prompt}
    return lambda uris: prompts[tuple(uris)]


def assert_same_draws(completions, expected):
    for completion, other in zip(completions, expected, strict=True):
        assert completion.ids == other.ids
        assert completion.logprobs == pytest.approx(other.logprobs, rel=1e-9)


def test_dtrain_serve_draws_what_the_native_engine_draws(made):
    with serving(made[0]) as (url, _):
        completions = engine_of(url).generate(requests_of(made, True))
    assert_same_draws(completions, native(made, requests_of(made, False)))


def test_a_server_that_has_the_chat_route_alone_reads_the_same_ids(made):
    """As an older vLLM, or one without --enable-scale-out."""
    said = []
    with serving(made[0]) as (url, _):
        completions = engine_of(url, kind="vllm", print_line=said.append).generate(requests_of(made, True, 0, 1))
    assert_same_draws(completions, native(made, requests_of(made, False, 0, 1)))
    is_qwen = requests_of(made, True)[0].image_prompt.short_ids is not None
    assert len(said) == is_qwen and all("there is no /inference/v1/generate here" in line for line in said)


def test_vllm_gets_token_ids_and_the_files_bytes_in_one_call_a_prompt(of_qwen, vllm):
    requests = requests_of(of_qwen, True)
    vllm.reads = trainers(requests)
    completions = engine_of(vllm, concurrency=1).generate(requests)
    for request, completion in zip(requests, completions, strict=True):
        assert completion.ids == drawn(list(request.prompt), derived_seed(request), 5)[0]
    calls = [body for path, body in vllm.calls if path == "/inference/v1/generate" and body]
    assert [len(body["content_parts"]) for body in calls] == [1, 2, 1]
    root, first, inline = of_qwen[0].parent, requests[0], requests[6]
    files = [(root / name).read_bytes() for name in ("0.png", "3.png")]
    for body, request, data in zip((calls[0], calls[2]), (first, inline), files, strict=True):
        uri = body["content_parts"][0]["url"]
        assert uri.startswith("data:image/png;base64,") and base64.b64decode(uri.partition(",")[2]) == data
        token = request.image_prompt.token_id
        assert body["token_ids"].count(token) == 1 < list(request.prompt).count(token)
        assert [i for i in body["token_ids"] if i != token] == [i for i in request.prompt if i != token]
        assert body["sampling_params"]["n"] == 2 and body["sampling_params"]["seed"] == derived_seed(request)


def test_vllm_that_closes_the_route_or_passes_images_over_gets_conversations(of_qwen, vllm):
    requests = requests_of(of_qwen, True, samples=1)
    vllm.reads = trainers(requests)
    expected = engine_of(vllm).generate(requests)
    for vllm.scale_out, vllm.passes_over, word in ((False, False, "Scale-out"), (True, True, "ignores images")):
        vllm.calls, said = [], []
        assert engine_of(vllm, print_line=said.append, concurrency=1).generate(requests) == expected
        chats = [body for path, body in vllm.calls if path == "/v1/chat/completions"]
        assert len(said) == 1 and word in said[0] and [body["n"] for body in chats] == [1, 1, 1]
        paths = [path for path, _ in vllm.calls]
        assert paths.count("/inference/v1/generate") <= 2  # not asked again
        parts = chats[1]["messages"][-1]["content"]
        assert [part["type"] for part in parts] == ["text", "image_url", "text", "image_url", "text"]


def test_a_server_that_is_gone_leaves_prompts_with_images_to_the_other(of_qwen, vllm):
    requests, gone = requests_of(of_qwen, True), FakeVllm()
    vllm.reads = trainers(requests)
    expected = engine_of(vllm).generate(requests)
    engine = engine_of(gone, vllm, retries=0)
    gone.close()
    assert engine.generate(requests) == expected


def test_short_ids_lose_the_tokens_around_an_image_too():
    """As Gemma 4's template writes <|image|>, and its processor <|image>, image tokens and <image|>."""
    tokens = ImageTokens("<|image|>", "<|image>", "<|image|>", "<image|>", 9)
    reader = SimpleNamespace(
        processor=SimpleNamespace(tokens=tokens),
        tokenizer=SimpleNamespace(vocabulary={"<|image>": 7, "<image|>": 8}),
        image_positions=lambda ids: [place for place, token in enumerate(ids) if token == 9],
        token_id=9,
        max_pixels=None,
    )
    records = [SimpleNamespace(layout=Layout(0, 0, (1, 1, 1), count)) for count in (3, 1)]
    prompt = ImagePrompt.of(reader, [4, 7, 9, 9, 9, 8, 7, 9, 8, 5], records, [], None)
    assert prompt.short_ids == [4, 9, 9, 5]


def test_another_prompt_than_the_trainers_is_refused_with_what_differs(of_qwen, vllm):
    requests = requests_of(of_qwen, True)
    first, images = requests[0], requests[0].image_prompt
    place = list(first.prompt).index(images.token_id)
    vllm.reads = lambda uris: [*first.prompt[:place], *[images.token_id] * 5, *first.prompt[place:]]
    for vllm.scale_out, fix in (
        (True, "image processor is the same$"),
        (False, "with the run's chat template .--chat-template"),
    ):
        with pytest.raises(UserError, match=f"its images are 9 tokens there and 4 here. Serve(.|\n)*{fix}"):
            engine_of(vllm).generate([first])
        bounded = replace(first, image_prompt=replace(images, max_pixels=256))
        with pytest.raises(UserError, match=r"image_max_pixels=256 .--mm-processor-kwargs '{\"max_pixels\": 256}'"):
            engine_of(vllm).generate([bounded])
    vllm.reads = lambda uris: [*first.prompt, 7]
    with pytest.raises(UserError, match=f"token {len(first.prompt)} of the prompt is 7 there and no token here. Serve"):
        engine_of(vllm).generate([first])


def test_sglang_gets_token_ids_and_images_and_tells_how_many_tokens_it_read(of_qwen, sglang):
    requests = requests_of(of_qwen, True)[:2]
    sglang.prompt_tokens = len(requests[0].prompt)
    engine_of(sglang).generate(requests)
    (body,) = [body for path, body in sglang.calls if path == "/generate"]
    assert body["input_ids"] == [list(requests[0].image_prompt.short_ids)] * 2
    assert body["image_data"] == [requests[0].image_prompt.uris()] * 2
    sglang.prompt_tokens += 3
    count = len(requests[0].prompt)
    with pytest.raises(UserError, match=f"{count + 3} tokens there, {count} here"):
        engine_of(sglang).generate(requests)


def test_sglang_refuses_models_with_words_around_images(of_gemma, sglang):
    requests = requests_of(of_gemma, True)[:1]
    with pytest.raises(UserError, match="sglang accepts no images of this model. Use vLLM or dtrain serve"):
        engine_of(sglang).generate(requests)


def test_dtrain_serve_refuses_a_prompt_whose_images_have_other_tokens(of_qwen, tmp_path):
    requests = requests_of(of_qwen, True)
    bounded = replace(requests[0], image_prompt=replace(requests[0].image_prompt, max_pixels=64))
    with serving(of_qwen[0]) as (url, _), pytest.raises(UserError, match="4 image tokens, but by this model's .* 1, "):
        engine_of(url).generate([bounded])
    text = make_model(tmp_path, 1)
    with serving(text) as (url, _), pytest.raises(UserError, match="takes no images"):
        engine_of(url, vocab_size=2**20).generate([replace(requests[0], prompt=[5, 6, 7])])


def test_a_template_of_the_servers_own_is_told(of_qwen, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(of_qwen[0], other)
    file = other / "tokenizer_config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps({**config, "chat_template": "{{ 'Please' }}" + config["chat_template"]}))
    with serving(other) as (url, _), pytest.raises(UserError, match="token 0 of the prompt is (.|\n)*chat-template"):
        engine_of(url, kind="vllm").generate(requests_of(of_qwen, True, 0, 1)[:1])


def test_images_that_a_cut_took_from_a_conversation_are_told(of_qwen):
    prompt = requests_of(of_qwen, True)[2].image_prompt
    with pytest.raises(UserError, match="lost 1 of its 2 images(.|\n)*data.too_long=drop"):
        replace(prompt, records=prompt.records[1:]).chat()


def test_calls_in_a_conversation_are_sent_as_openai_s_api_has_them(of_qwen):
    prompt = requests_of(of_qwen, True)[0].image_prompt
    function = {"name": "f", "arguments": {"city": "Oslo"}}
    call = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}
    (sent,) = replace(prompt, messages=[*prompt.messages, call]).chat()[-1]["tool_calls"]
    assert sent == {"type": "function", "function": {"name": "f", "arguments": '{"city": "Oslo"}'}}


def test_an_image_that_has_changed_since_is_told_before_it_is_sent(of_qwen, vllm, tmp_path):
    request = requests_of(of_qwen, True)[0]
    vllm.reads = trainers([request])
    (tmp_path / "0.png").write_bytes(b"another")
    record = replace(request.image_prompt.records[0], path=str(tmp_path / "0.png"))
    with pytest.raises(UserError, match="0.png: the image is not the one that the run began with"):
        engine_of(vllm).generate([replace(request, image_prompt=replace(request.image_prompt, records=[record]))])


def test_an_adapter_of_a_tower_is_sent_to_dtrain_alone(vllm):
    config = AdapterConfig.from_values({"rank": 4})
    vllm.max_lora_rank = 8
    assert adapter_refusal(engine_of(vllm), config) is None
    assert "accepts only adapters of decoders" in adapter_refusal(engine_of(vllm), config, has_tower=True)


def test_a_trained_tower_is_refused_where_features_outlive_weights(vllm, sglang):
    check_vision_tower(engine_of(vllm))
    with pytest.raises(UserError, match="sglang keeps the features of images when its weights change"):
        check_vision_tower(engine_of(sglang))
