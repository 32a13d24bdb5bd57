"""Generation with models of the transformers library: transformers' own `generate` is the oracle."""

import json

import pytest
import torch
import transformers as hf

from dtrain.base.errors import UserError
from dtrain.checkpoint.huggingface.pretrained import from_pretrained
from dtrain.inference.engine import Engine, score_prompts
from dtrain.inference.generate import generate, generate_text
from dtrain.inference.request import Request, SamplingParams
from dtrain.models import build, read_config
from dtrain.models.common.flops import flops_per_token
from tests.models.library_configs import VOCAB, tiny_config
from tests.tiny import write_model

# Windows are shorter than most prompts, and all prompts come to more than one slot of keys.
WINDOW = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
KINDS = {
    "cohere2": WINDOW,
    "exaone4": WINDOW,  # its full layers have the attribute `sliding_window` too
    "gemma2": {**WINDOW, "attn_logit_softcapping": None},  # a buffer scales its embeddings
    "gpt_oss": WINDOW,  # sinks
    "deepseek_v3": {},  # heads of values are smaller than those of keys; experts
    "olmoe": {},
    "gpt_neox": {"attention_dropout": 0.0, "hidden_dropout": 0.0},
}
LENGTHS = (3, 11, 1, 40, 11)
NEW_TOKENS = 30


def written(directory, kind, dtype=torch.float64, **changes):
    """Write a tiny model with weights and a tokenizer, and return transformers' model."""
    write_model(directory)
    special = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": None}
    config = tiny_config(kind, initializer_range=0.3, max_position_embeddings=128, **{**special, **changes})
    torch.manual_seed(5)
    slow = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = hf.AutoModelForCausalLM.from_config(config, **slow).to(dtype).eval()
    model.save_pretrained(directory)
    return model


def prompts():
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(2, VOCAB, (length,), generator=generator).tolist() for length in LENGTHS]


def greedy(model, prompt, num_tokens):
    ids = torch.tensor([prompt])
    settings = hf.GenerationConfig(max_new_tokens=num_tokens, do_sample=False, pad_token_id=0)
    return model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=settings)[
        0, len(prompt) :
    ].tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_tokens_are_those_of_transformers(tmp_path, kind):
    oracle = written(tmp_path, kind, **KINDS[kind])
    model = from_pretrained(tmp_path, torch.float64, "cpu", implementation="transformers")
    completions = generate(model, prompts(), max_new_tokens=NEW_TOKENS, eos_ids=[1])
    expected = [greedy(oracle, prompt, NEW_TOKENS) for prompt in prompts()]
    assert completions == expected
    assert len({tuple(tokens) for tokens in expected}) > 2


def test_logprobs_are_those_of_the_forward_in_training(tmp_path):
    """In float32. Samples of one prompt share its keys."""
    written(tmp_path, "cohere2", torch.float32, **WINDOW)
    model = from_pretrained(tmp_path, torch.float32, "cpu")
    sampling = SamplingParams(NEW_TOKENS, temperature=1.0)
    requests = [Request(prompt, sampling, 3, index) for index, prompt in enumerate(prompts() * 2)]
    for request, completion in zip(requests, Engine(model).generate(requests), strict=True):
        row = [*request.prompt, *completion.ids]
        (scores,) = score_prompts(model, [row], 1)
        assert completion.logprobs == pytest.approx(scores.logprobs[len(request.prompt) - 1 :], abs=2e-6)


@pytest.mark.parametrize("kind", ["lfm2", "falcon_h1", "diffllama"])
def test_models_with_other_states_than_keys_and_values_are_refused(tmp_path, kind):
    """A convolution in place of attention, Mamba beside attention, and two attentions in a layer."""
    changes = {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2} if kind == "lfm2" else {}
    name = type(written(tmp_path, kind, torch.float32, **changes)).__name__
    with pytest.raises(UserError, match=f"{name} of the transformers library: .*(no attention|a state besides)"):
        list(generate_text(tmp_path, ["w5"], raw=True, max_new_tokens=2, dtype="float32", device="cpu"))


def test_text_with_and_without_a_template(tmp_path):
    oracle = written(tmp_path, "cohere2", torch.float32, **WINDOW)
    options = {"max_new_tokens": 6, "dtype": "float32", "device": "cpu"}
    template = "{% for message in messages %}w3 {{ message['content'] }} {% endfor %}w4 "
    file = tmp_path / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "chat_template": template}))
    (raw,) = generate_text(tmp_path, ["w9 w8 w7 w6 w5"], raw=True, **options)
    (answer,) = generate_text(tmp_path, ["w9 w8"], **options)
    for text, prompt in ((raw, [9, 8, 7, 6, 5]), (answer, [3, 9, 8, 4])):
        tokens = greedy(oracle, prompt, 6)
        assert text.split() == [f"w{token}" for token in tokens if token > 1]


@pytest.mark.parametrize("family", ["qwen3-moe", "gpt-oss", "deepseek-v3"])
def test_flops_of_a_mixture_are_those_of_the_native_model(tmp_path, family):
    """Only the experts that compute a token count."""
    directory = write_model(tmp_path / family, family)
    flops = []
    for implementation in ("native", "transformers"):
        config = read_config(directory, implementation=implementation)
        flops.append(flops_per_token(build(config, torch.float32, "meta"), 100))
    assert flops[1] == pytest.approx(flops[0], rel=1e-9)
