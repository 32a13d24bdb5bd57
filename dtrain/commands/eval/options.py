"""Messages of code that is shared with recipes, in the options of `dtrain eval`."""

import re

# A recipe's key as the shared code writes it -> the command's option.
_OPTIONS = {
    r"grpo\.rewards=\[\{fn: (\w+), kwargs: \{(\w+): \.\.\}\}\]": r"""--reward '\1={"\2": ".."}'""",
    r"grpo\.rewards\[\d+\]\.fn": "--reward",
    r"grpo\.reward_timeout": "--reward-timeout",
    r"grpo\.sampling\.max_new_tokens": "--max-new-tokens",
    r"grpo\.sampling\.(\w+)": r"--\1",
    r"data\.chat_template": "--chat-template",
    r"data\.prompts_as": "--prompts-as",
    r"data\.train\.path": "DATA",
    r"model\.path": "DIR",
}


def in_options(text: str) -> str:
    """Return a message about keys of a recipe with the options of this command in their place."""
    for key, option in _OPTIONS.items():
        text = re.sub(key, option, text)
    return text
