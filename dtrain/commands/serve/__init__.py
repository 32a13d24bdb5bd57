"""`dtrain serve`: the native engine behind HTTP, in the words of OpenAI's API and of the servers used for RL.

server.py (start, end, threads) → app.py (starlette: access, bodies, answers, streams) → routes.py (the paths and their
functions) → fields.py and protocol.py (bodies, checked against tables, to requests), answers.py (completions to
bodies, text.py), updates.py (new weights) and adapters.py (an adapter beside them) → worker.py (the one thread that
owns the engine).
classify.py has a classifier's routes; command.py the command's arguments; start.py begins it all. uvicorn is started
by ../web.py. Only app.py imports starlette: other commands use adapters.py and text.py, and need no HTTP.
"""
