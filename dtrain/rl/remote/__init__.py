"""Completions from servers (vLLM, SGLang, `dtrain serve`), new weights to them, and a model that judges.

training                servers as the engine of a training run; the next rollout while training goes on
http, dialects          many requests to many servers; the requests of each kind, prompts with images included
http_client             one HTTP call, and the tries of one that failed
publish                 new weights, or an adapter alone, by broadcast, through a directory, or to vLLM over NCCL
judge                   a reward: another model's points
"""
