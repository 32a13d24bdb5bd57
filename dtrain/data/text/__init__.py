"""Tokenizers, chat templates, and the calls of tools that templates write.

tokenizer       tokenizer.json with its special tokens; control tokens that a user writes as text
template        a model's chat template and its rendering
dropped_text    the text of messages that a template leaves out
replies         the parts of a rendered conversation that the model wrote, and how they end
call_form       the form in which a template reads calls of tools
tool_calls      the form in which a template writes calls of tools; calls read back
"""
