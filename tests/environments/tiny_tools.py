"""A tiny recipe whose model calls tools."""

import json

from tests.tiny import tiny_grpo

TINY = """\
{%- for tool in tools or [] %}{{ tool.function.name }} {% endfor -%}
{%- for m in messages %}
    {%- if m.role != 'assistant' %}{{- 'w8 ' + m.content + ' ' }}
    {%- else %}
        {{- 'w9 ' + m.content }}
        {%- for call in m.tool_calls or [] %}
            {{- '<tool_call>{"name": "' + call.function.name + '", "arguments": ' }}
            {{- (call.function.arguments | tojson) + '}</tool_call>' }}
        {%- endfor %}
        {{- ' w1 ' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- 'w9' }}{% endif %}
"""


def tiny_tools(root, *overrides, name):
    """A recipe whose model draws a call with every second word: of a tool that answers, raises, or is not there."""
    recipe = tiny_grpo(
        root,
        "grpo.tools=[{fn: tests.environments.toolbox.after}]",
        "grpo.sampling.stop=[</tool_call>]",
        "grpo.max_turns=3",
        "data.max_length=48",
        "train.micro_batch=2",
        "train.steps=4",
        *overrides,
        name=name,
    )
    directory = recipe.model.directory
    written = json.loads((directory / "tokenizer.json").read_text())
    words = {"after": range(10, 34), "before": range(34, 40)}
    texts = {
        number: f'<tool_call>{{"name": "{tool}", "arguments": {{"word": "w{number}"}}}}</tool_call>'
        for tool, numbers in words.items()
        for number in numbers
    }
    rest = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    written["added_tokens"] = [{"id": number, "content": text, **rest} for number, text in texts.items()]
    vocabulary = written["model"]["vocab"]
    written["model"]["vocab"] = {texts.get(number, word): number for word, number in vocabulary.items()}
    (directory / "tokenizer.json").write_text(json.dumps(written))
    (directory / "chat_template.jinja").write_text(TINY)
    rows = [{"question": f"w{40 + number} w5"} for number in range(24)]
    (root / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return recipe
