"""`dtrain chat`: a conversation with a model, in the terminal.

command.py has the arguments, terminal.py reads lines and prints answers as they come, conversation.py has the messages
and the engine.
"""
