"""`dtrain chat`: a conversation with a model, in the terminal.

command.py has the arguments. terminal.py has the conversation, reads lines, and prints answers as they arrive.
"""
