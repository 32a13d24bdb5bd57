"""Reward: the completion is laid out in tags."""

from collections.abc import Sequence


def format_tags(
    completions: Sequence[str], *, tags: Sequence[str] = ("think", "answer"), strict: bool = True, prefix: str = ""
) -> list[float | None]:
    """Return 1.0 where each of `tags` is opened and closed once, one after the other, else 0.0; `strict`: with nothing
    but white space between and around them (DeepSeek-R1's format reward, arXiv:2501.12948).

    prefix: text that the chat template has put before the completion already, such as "<think>".

    >>> format_tags(["<think>a</think>\\n<answer>b</answer>", "<answer>b</answer><think>a</think>", "b"])
    [1.0, 0.0, 0.0]
    >>> format_tags(["a</think> so <answer>b</answer>"], strict=False, prefix="<think>")
    [1.0]
    """
    return [float(_is_laid_out(prefix + text, tags, strict)) for text in completions]


def _is_laid_out(text: str, tags: Sequence[str], strict: bool) -> bool:
    place = 0
    for tag in tags:
        begin, end = f"<{tag}>", f"</{tag}>"
        if text.count(begin) != 1 or text.count(end) != 1:
            return False
        opened, closed = text.find(begin, place), text.find(end)
        if opened < place or closed < opened or (strict and text[place:opened].strip()):
            return False
        place = closed + len(end)
    return not (strict and text[place:].strip())
