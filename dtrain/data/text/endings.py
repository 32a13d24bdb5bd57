"""Notes on chat templates whose replies do not end as a generation does. Torch is not imported."""

from dtrain.base.errors import UserError
from dtrain.data.text.replies import QUESTION, REPLY, Replies
from dtrain.data.text.tokenizer import Tokenizer

SHOWN = 40  # characters of an ending


def note(replies: Replies, tokenizer: Tokenizer, is_all_trained: bool) -> str | None:
    """Return the note on a template that ends a reply with no EOS token, or leaves that token untrained; else None.

    is_all_trained: whether all that the template writes of a reply is trained, else what `replies` finds.
    """
    messages = [QUESTION, {"role": "assistant", "content": REPLY}]
    try:
        text, spans = replies.find(messages, None, [1])
    except UserError:  # of rows it is told with file and line
        return None
    before, reply, ending = text.rpartition(REPLY)
    if not reply:
        return None
    end = len(before) + len(reply)
    trained_to = len(text) if is_all_trained else max((stop for _, stop in spans), default=0)
    ids, offsets = tokenizer.encode_with_offsets(text)
    eos = [start for token, (start, _) in zip(ids, offsets, strict=True) if start >= end and token in tokenizer.eos_ids]
    if eos and eos[0] < trained_to:
        return None
    shown = repr(ending.strip()[:SHOWN])
    if not ending.strip():
        return "note: the chat template writes no end-of-turn token: a model trained with it does not learn to stop"
    if eos:
        return (
            f"note: the chat template leaves the end of a reply, {shown}, untrained: a model trained with it does not "
            "learn to stop. Put the end into the {% generation %} block of a copy, and name it with data.chat_template"
        )
    known = ", ".join(repr(tokenizer.decode([token])) for token in tokenizer.eos_ids) or "none is named"
    return (
        f"note: the chat template ends a reply with {shown}, which is no EOS token of the model ({known}): generation "
        "does not stop there. Add the id of the token to eos_token_id in generation_config.json"
    )
