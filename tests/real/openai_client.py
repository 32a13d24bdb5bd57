"""OpenAI's client on `dtrain serve`: completions, chat, streams, log-probabilities, tools and errors. The oracle is
transformers in this process."""

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.real.common import Checks, model, need  # noqa: E402

need("openai transformers", "openai", "transformers")

import openai  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402

from tests.serve.serving import Process, key_file  # noqa: E402

COUNT = 12
TOOLS_TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for call in m.tool_calls or [] %}"
    '<tool_call>\n{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n'
    "</tool_call>{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
POWER = {
    "type": "function",
    "function": {
        "name": "power",
        "description": "Raises a number.",
        "parameters": {"type": "object", "properties": {"base": {"type": "integer"}}, "required": ["base"]},
    },
}


def with_tools(source: Path, directory: Path) -> Path:
    """Return the model with a chat template that reads tools."""
    directory.mkdir()
    for path in source.iterdir():
        (directory / path.name).symlink_to(path)
    (directory / "chat_template.jinja").unlink()
    (directory / "chat_template.jinja").write_text(TOOLS_TEMPLATE)
    return directory


class Oracle:
    """transformers in float32: greedy tokens, their log-probabilities and text."""

    def __init__(self, directory: Path):
        self.model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(directory)

    @torch.no_grad()
    def greedy(self, prompt: list[int]) -> tuple[list[int], list[float], str]:
        ids, logprobs = list(prompt), []
        while len(logprobs) < COUNT and not (logprobs and ids[-1] == self.tokenizer.eos_token_id):
            row = self.model(torch.tensor([ids])).logits[0, -1].log_softmax(-1)
            ids.append(int(row.argmax()))
            logprobs.append(float(row.max()))
        drawn = ids[len(prompt) :]
        return drawn, logprobs, self.tokenizer.decode(drawn, skip_special_tokens=True)

    def chat(self, messages: list[dict], **more) -> list[int]:
        text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **more)
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]


def completions(checks: Checks, client: openai.OpenAI, oracle: Oracle) -> None:
    prompt = "The capital of France is"
    ids, logprobs, text = oracle.greedy(oracle.tokenizer(prompt)["input_ids"])
    settings = {"model": client.models.list().data[0].id, "prompt": prompt, "max_tokens": COUNT, "temperature": 0}
    whole = client.completions.create(**settings, logprobs=0, extra_body={"return_token_ids": True})
    checks.same("completion: text", whole.choices[0].text, text)
    checks.same("completion: token ids", whole.choices[0].token_ids, ids)
    checks.near("completion: logprobs", whole.choices[0].logprobs.token_logprobs, logprobs, 1e-4)
    checks.same("completion: tokens counted", whole.usage.completion_tokens, len(ids))
    parts = list(client.completions.create(**settings, stream=True, stream_options={"include_usage": True}))
    checks.same("completion: streamed text", "".join(part.choices[0].text for part in parts if part.choices), text)
    checks.same("completion: streamed usage", parts[-1].usage.completion_tokens, len(ids))
    draws = {**settings, "temperature": 1.0, "n": 3, "seed": 7}
    first, again = (client.completions.create(**draws) for _ in range(2))
    texts = [choice.text for choice in first.choices]
    checks.same("completion: n and seed, drawn again", [choice.text for choice in again.choices], texts)
    checks.holds("completion: samples differ", len(set(texts)) == 3)
    stopped = client.completions.create(**settings, stop=[text[6:9]])
    checks.same("completion: stop text left out", stopped.choices[0].text, text[: text.index(text[6:9])])


def chat(checks: Checks, client: openai.OpenAI, oracle: Oracle) -> None:
    messages = [{"role": "user", "content": "What is 2 + 2?"}]
    ids, logprobs, text = oracle.greedy(oracle.chat(messages))
    settings = {"model": client.models.list().data[0].id, "messages": messages, "max_tokens": COUNT, "temperature": 0}
    whole = client.chat.completions.create(**settings, logprobs=True)
    choice = whole.choices[0]
    checks.same("chat: text", choice.message.content, text)
    checks.near("chat: logprobs", [token.logprob for token in choice.logprobs.content], logprobs, 1e-4)
    checks.same("chat: tokens of the prompt", whole.usage.prompt_tokens, len(oracle.chat(messages)))
    parts = list(client.chat.completions.create(**settings, stream=True, logprobs=True))
    pieces = [part.choices[0].delta.content or "" for part in parts if part.choices]
    checks.same("chat: streamed text", "".join(pieces), text)
    values = [
        token.logprob for p in parts if p.choices and p.choices[0].logprobs for token in p.choices[0].logprobs.content
    ]
    checks.near("chat: streamed logprobs", values, logprobs, 1e-4)

    call = {"id": "c1", "type": "function", "function": {"name": "power", "arguments": '{"base": 3}'}}
    talk = [*messages, {"role": "assistant", "content": "", "tool_calls": [call]}]
    talk.append({"role": "tool", "content": "9", "tool_call_id": "c1"})
    read = [*messages, {**talk[1], "tool_calls": [{**call, "function": {"name": "power", "arguments": {"base": 3}}}]}]
    prompt = oracle.chat([*read, talk[2]], tools=[POWER])
    answered = client.chat.completions.create(
        **settings | {"messages": talk}, tools=[POWER], extra_body={"return_token_ids": True}
    )
    checks.same("tools: the prompt's tokens", answered.prompt_token_ids, prompt)
    checks.same("tools: text", answered.choices[0].message.content, oracle.greedy(prompt)[2])


def errors(checks: Checks, client: openai.OpenAI, url: str) -> None:
    def raised(act) -> str:
        try:
            act()
        except openai.APIStatusError as error:
            return type(error).__name__
        return "nothing"

    ask = {"prompt": "a", "max_tokens": 1}
    checks.same("an unknown model", raised(lambda: client.completions.create(model="x", **ask)), "NotFoundError")
    other = openai.OpenAI(base_url=f"{url}/v1", api_key="wrong", max_retries=0)
    checks.same("a wrong key", raised(lambda: other.models.list()), "AuthenticationError")
    name = client.models.list().data[0].id
    long = {"model": name, "prompt": "a", "max_tokens": 10**6}
    checks.same("too many tokens", raised(lambda: client.completions.create(**long)), "BadRequestError")


def main() -> None:
    checks = Checks()
    print(f"openai {openai.__version__}, transformers {transformers.__version__}")
    with tempfile.TemporaryDirectory() as root:
        directory = with_tools(model(), Path(root, "model"))
        server = Process(directory, "--api-key-file", str(key_file(Path(root))), dtype="float32", starts=True)
        try:
            client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="secret", max_retries=0, timeout=120)
            oracle = Oracle(directory)
            completions(checks, client, oracle)
            chat(checks, client, oracle)
            errors(checks, client, server.url)
        finally:
            server.kill()
    checks.end()


if __name__ == "__main__":
    main()
