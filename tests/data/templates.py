"""Chat templates written for the tests, each behaving as the published one of its family does where it matters here."""

from pathlib import Path


def _read(name: str) -> str:
    return (Path(__file__).parent / "jinja" / f"{name}.jinja").read_text(encoding="utf-8")


# Trims contents, writes BOS itself, ends turns with <|eot_id|>; a turn with a tool call ignores its content.
LLAMA3 = _read("llama3")
# Contents as they are, a default system message, tool replies gathered into one user turn.
QWEN25 = _read("qwen25")
# Thinking is kept only after the last question; enable_thinking=false puts an empty block into the prompt.
QWEN3 = _read("qwen3")
# The system message goes into the first user turn; assistant is called model; roles must alternate.
GEMMA3 = _read("gemma3")
# No header and no generation prompt: what follows [/INST] is the model's.
LLAMA2 = _read("llama2")
# The loop counts: no round of it has a message as its variable.
BY_INDEX = _read("by_index")
# Leans on what the environment does with white space around blocks; reads thinking under its other name.
SLOPPY = _read("sloppy")
# Marks the reply itself, without its end-of-turn token.
GENERATION = _read("generation")
# The answers of tools stand in the turn that asked, which goes on after them without a header (Gemma 4).
ANSWERS = _read("answers")
# One form for turns of every role, in which calls of tools have no place; ends with EOS (Phi-4-mini).
ONE_FORM = _read("one_form")
# A reply names its channel, thinking has one of its own, and the last reply ends otherwise than those before (gpt-oss).
CHANNELS = _read("channels")
# Calls as tags with a text for each argument; what follows the last question thinks, and so does its prompt (Qwen3.5).
QWEN35 = _read("qwen35")
# Calls and answers behind marks, tools in front of the last question, ids of nine characters (Mistral).
MISTRAL = _read("mistral")
# Calls of tools as calls in Python, answers as turns of an environment; the last reply alone ends with EOS (OLMo 3).
OLMO3 = _read("olmo3")
# Of a reply it keeps what follows </think>, in the last turn too (R1-Distill).
R1 = _read("r1")

# Loops over the parts of a content, so that it writes nothing of a string (SmolVLM, Idefics 3).
ONLY_PARTS = """{% for message in messages %}<|im_start|>{{ message.role }}
{% for part in message.content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

# Writes the header of a reply after a user's turn only (DeepSeek-V3.1).
HEADER_AFTER_USER = """{{ bos_token }}{% for message in messages %}
{%- if message.role == 'user' %}{{ '[user]' + message.content }}
{%- elif message.role == 'assistant' %}
{%- if not loop.first and loop.previtem.role == 'user' %}{{ '[model]' }}{% endif %}{{ message.content + eos_token }}
{%- else %}{{ message.content }}{% endif %}
{%- endfor %}{% if add_generation_prompt %}[model]{% endif %}"""
# Writes a default system message in the first round of its loop (Kimi K2).
DEFAULT_IN_LOOP = """{% for message in messages %}
{%- if loop.first and message.role != 'system' %}{{ '[system]You are a helper.[/]' }}{% endif %}
{{- '[' + message.role + ']' + message.content + '[/]' }}
{%- endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"""

# Thoughts are parts of the content, as in Ministral 3's.
PARTS = """{{ bos_token }}{% for message in messages %}
{%- if message.role == 'assistant' %}
{%- if message.content is string %}{{ message.content }}
{%- elif message.content | length > 0 %}
{%- for part in message.content %}
{%- if part['type'] == 'thinking' %}{{ '[THINK]' + part['thinking'] + '[/THINK]' }}
{%- else %}{{ part['text'] }}{% endif %}
{%- endfor %}
{%- endif %}
{%- for call in message.tool_calls or [] %}{{ '[CALL]' + call.function.name }}{% endfor %}{{ eos_token }}
{%- else %}{{ '[' + message.role + ']' + message.content + '[/]' }}{% endif %}
{%- endfor %}"""
