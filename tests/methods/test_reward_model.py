"""grpo.reward_model: another family's classifier, with another tokenizer, rates completions; against transformers, and
the same run on every mesh."""

import json

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

from dtrain.base.errors import UserError
from dtrain.commands.plan.hardware import GPUS
from dtrain.commands.plan.plan import make_plan
from tests.methods.comparing import assert_same_run, samples_of
from tests.methods.test_grpo_runs import RICH
from tests.problem_lines import preflight
from tests.running import metrics, run
from tests.tiny import VOCAB, save_weights, tiny_grpo, write_model

TEMPLATE = (
    "{% for m in messages %}{{ m.role ~ ' ' ~ m.content ~ ' w1 ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant ' }}{% endif %}"
)


def number(word):
    """Return the id of a word in the reward model's tokenizer, which numbers words in its own way."""
    return int(word[1:] if word[1:].isdigit() else 52) * 5 % VOCAB


def reward_model(root, labels=1):
    """A gemma3 classifier as transformers writes it, and the model itself in float64."""
    directory = write_model(root / "rates", "gemma3", num_labels=labels)
    config = json.loads((directory / "config.json").read_text())
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": number(f"w{i}") for i in range(VOCAB)}, unk_token="w52"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    config = {**config, "pad_token_id": number("w0")}
    known = transformers.AutoConfig.for_model(config.pop("model_type"), **config)
    torch.manual_seed(5)
    made = transformers.AutoModelForSequenceClassification.from_config(known, dtype=torch.float64).eval()
    with torch.no_grad():
        made.score.weight.mul_(30)
    made.save_pretrained(directory)
    return directory, made


def asked(root, count=12, chat=False):
    path = root / "asked.jsonl"
    words = [" ".join(f"w{3 + (i * 7 + j) % 60}" for j in range(1 + i % 4)) + " " for i in range(count)]
    rows = [{"prompt": [{"role": "user", "content": one}] if chat else one} for one in words]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def recipe_at(root, *overrides, name="run", rewards="[]"):
    given = (f"data.train.path={asked(root)}", f"grpo.reward_model.path={root / 'rates'}", f"grpo.rewards={rewards}")
    return tiny_grpo(root, *given, "train.steps=3", "train.micro_batch=2", *overrides, name=name)


@pytest.mark.trap(
    "the padding token of another tokenizer ends the text that is rated",
    "pytorch/rl PR#3887",
    "scores of another position",
    "transformers' scores",
)
def test_it_gives_what_transformers_gives(tmp_path):
    """Texts of a plain prompt end with one EOS; 2e-5, for transformers' norms are in float32."""
    _, oracle = reward_model(tmp_path)
    found = recipe_at(tmp_path, "grpo.reward_model.weight=0.5", rewards="[{fn: tests.methods.judges.even}]")
    run(found)
    rows = samples_of(found)
    assert len(rows) >= 16
    for row in rows:
        words = f"{row['prompt']}{row['completion']}".split()
        ids = [number(word) for word in [*words, *["w1"] * (words[-1] != "w1")]]
        with torch.no_grad():
            score = oracle(torch.tensor([ids])).logits.item()
        assert row["rewards"]["reward_model"] == pytest.approx(score, rel=2e-5, abs=1e-5)
        assert row["reward"] == pytest.approx(0.5 * score + row["rewards"]["even"], rel=2e-5, abs=1e-5)
    assert len({round(row["reward"], 6) for row in rows}) > 8
    assert {"reward/reward_model", "reward/even"} <= metrics(found)[0].keys()


def test_a_run_on_a_mesh_is_that_of_one_process(tmp_path):
    reward_model(tmp_path)
    one = run(recipe_at(tmp_path, *RICH, "checkpoint.every=3", name="one"))
    shape = ("parallel.cp=2", "parallel.tp=2", "data.packing=true", "checkpoint.every=3")
    assert_same_run(run(recipe_at(tmp_path, *RICH, *shape, name="mesh"), 4), one)


def test_conversations_are_read_with_its_own_template(tmp_path):
    _, oracle = reward_model(tmp_path)
    found = recipe_at(tmp_path)
    asked(tmp_path, chat=True)
    template = "{% for m in messages %}{{ m.content ~ ' ' }}{% endfor %}"  # the policy's is another
    (found.model.directory / "chat_template.jinja").write_text(template)
    run(found)
    for row in samples_of(found):
        words = f"user {row['prompt'][0]['content']} w1 assistant {row['completion']} w1".split()
        with torch.no_grad():
            score = oracle(torch.tensor([[number(word) for word in words]])).logits.item()
        assert row["reward"] == pytest.approx(score, rel=2e-5, abs=1e-5)


def test_another_template_of_it_is_told_at_a_resume(tmp_path):
    directory, _ = reward_model(tmp_path)
    run(recipe_at(tmp_path, "checkpoint.every=2", "train.steps=2", "scheduler.warmup_steps=0"))
    (directory / "chat_template.jinja").write_text(TEMPLATE + " ")
    with pytest.raises(UserError, match="grpo.reward_model.path"):
        run(recipe_at(tmp_path, "checkpoint.every=2", "checkpoint.resume=auto"))


@pytest.mark.parametrize(("world_size", "weight"), [(1, 1e308), (2, float("nan"))])
def test_scores_that_are_no_numbers_end_the_run_in_a_line(tmp_path, world_size, weight):
    directory, made = reward_model(tmp_path)
    with torch.no_grad():
        made.score.weight.fill_(weight)
    made.save_pretrained(directory)
    with pytest.raises(
        (UserError, AssertionError), match=r"grpo.reward_model gave \S+ for a completion; a number of at most"
    ):
        run(recipe_at(tmp_path, name="run"), world_size)


def test_its_weights_are_planned(tmp_path):
    _, made = reward_model(tmp_path)
    with_it = make_plan(recipe_at(tmp_path), 2, GPUS["h100"])
    changes = ("grpo.reward_model.path=null", "grpo.rewards=[{fn: tests.methods.judges.even}]")
    without = make_plan(recipe_at(tmp_path, *changes), 2, GPUS["h100"])
    size = sum(one.numel() for one in made.parameters())
    assert with_it.step.peak - without.step.peak == pytest.approx(8 * size / 2, rel=0.02)


@pytest.mark.parametrize(
    "change, answer",
    [
        (lambda root: save_weights(write_model(root / "rates", "llama")), "rates is a language model"),
        (lambda root: reward_model(root, labels=3), "its head has 3 outputs, and a reward is one number"),
        (lambda root: (root / "rates" / "tokenizer.json").unlink(), "tokenizer"),
        (lambda root: (root / "rates" / "model.safetensors").unlink(), "Set grpo.reward_model.path to a directory"),
    ],
)
def test_mistakes_are_named_before_a_run(tmp_path, change, answer):
    reward_model(tmp_path)
    change(tmp_path)
    assert answer in "\n".join(preflight(recipe_at(tmp_path), 1))
