"""`dtrain serve`: the native engine behind HTTP, in the words of OpenAI's API and of the servers used for RL.

server.py (HTTP, start and end) → protocol.py (bodies to requests), answers.py (completions to bodies, text.py) and
updates.py (new weights) → worker.py (the one thread that owns the engine).
"""
