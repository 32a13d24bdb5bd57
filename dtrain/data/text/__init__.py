"""Tokenizers, chat templates, and tool calls in their text.

tokenizer       tokenizer.json with its special tokens; control tokens that users write as text
template        a model's chat template and its rendering
dropped_text    text of messages that a template leaves out
replies         spans of the model's own replies in a rendered conversation
call_form       the form in which a template reads tool calls
tool_calls      the form in which a template writes tool calls; reading calls from text
"""
