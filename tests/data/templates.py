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

# Writes an object of arguments in its own form, and a text as it is (Gemma 4).
OWN_FORM = """{{ bos_token }}{% for message in messages %}{{ '<|turn>' + message.role + '\n' }}
{%- for call in message.tool_calls or [] %}{{ '<call>' + call.function.name + '{' }}
{%- if call.function.arguments is mapping %}
{%- for name, value in call.function.arguments | dictsort %}{{ name }}:{{ value }}{{ '' if loop.last else ',' }}
{%- endfor %}
{%- elif call.function.arguments is string %}{{ call.function.arguments }}{% endif %}{{ '}</call>' }}{% endfor %}
{{- message.content or '' }}{{ '<turn|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|turn>assistant\n' }}{% endif %}"""
# Joins arguments as text, writes calls only where the content is null, and closes the answers of tools at once, so that
# the reply behind them needs no generation prompt (DeepSeek V3).
JOINED = """{% set ns = namespace(told=false) %}{% for message in messages %}
{%- if message.role == 'assistant' and message.content is none %}{% set ns.told = false %}{{ '<A><calls>' }}
{%- for call in message.tool_calls %}{{ call.type + '<sep>' + call.function.name + '\n' }}
{{- call.function.arguments + '\n' }}{% endfor %}{{ '</calls><E>' }}
{%- elif message.role == 'assistant' %}{{ ('</told>' if ns.told else '<A>') + message.content + '<E>' }}
{%- set ns.told = false %}
{%- elif message.role == 'tool' %}{{ '<told>' + message.content }}{% set ns.told = true %}
{%- else %}{{ '<' + message.role + '>' + message.content }}{% endif %}{% endfor %}
{%- if ns.told %}{{ '</told>' }}{% elif add_generation_prompt %}{{ '<A>' }}{% endif %}"""
# Loops over a content that is no text, also where there is none (Qwen3.5, GLM 4.5).
LOOPED = """{% macro text(content) %}{% if content is string %}{{ content }}{% else %}
{%- for part in content %}{{ part.text }}{% endfor %}{% endif %}{% endmacro %}
{%- for message in messages %}{{ '<|' + message.role + '|>' }}{% set said = text(message.content) %}
{%- if said %}{{ said + '\n' }}{% endif %}
{%- for call in message.tool_calls or [] %}<call>{{ call.function | tojson }}</call>{% endfor %}
{{- '<|end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"""
# Prints what it expects to be a text; of several calls only the first (gpt-oss writes one, too).
PRINTED = """{% for message in messages %}{{ '<' + message.role + '>' + (message.content or '') }}
{%- if message.tool_calls %}{% set call = message.tool_calls[0].function %}
{{- '<call>' ~ call.name ~ ' ' ~ call.arguments ~ '</call>' }}{% endif %}
{{- '</>' }}{% endfor %}{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"""
