"""`dtrain serve`: the native engine behind HTTP, with OpenAI's API and the routes of vLLM and SGLang for RL.

start.py       starts and ends the server: threads, signals, watched directories
app.py         the Starlette application: access, bodies, responses, streams
routes.py      the paths and the functions behind them
protocol.py    from a body, checked against a table, to requests for the engine
answers.py     from tokens to bodies and events
updates.py     new weights and adapters
worker.py      the thread that owns the engine
classify.py    the routes of a classifier or reward model
command.py     the command's arguments

uvicorn is started by ../web.py. Only app.py imports starlette: `dtrain chat` uses updates.py and answers.py without
HTTP.
"""
