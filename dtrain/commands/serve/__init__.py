"""`dtrain serve`: the native engine behind HTTP, in the words of OpenAI's API and of the servers used for RL.

start.py (start, end, threads) → app.py (starlette: access, bodies, answers, streams) → routes.py (the paths and their
functions) → protocol.py (bodies, checked against tables, to requests), answers.py (completions to bodies) and
updates.py (new weights and adapters) → worker.py (the one thread that owns the engine).
classify.py has a classifier's routes, and command.py the command's arguments. uvicorn is started by ../web.py. Only
app.py imports starlette: `dtrain chat` uses updates.py and answers.py without HTTP.
"""
