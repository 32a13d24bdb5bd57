"""Completions from servers (vLLM, SGLang, `dtrain serve`), new weights to them, and a model that judges.

training                servers as the engine of a training run; the next rollout while training goes on
http, dialects          many requests to many servers; the requests of each kind
image_routes            the requests of prompts with images
http_client             one HTTP call, and the tries of one that failed
publish                 new weights, or an adapter alone, by broadcast or through a directory
weight_transfer         whole weights to vLLM over NCCL
judge                   a reward: another model's points
shared_directory        that directory, as trainer and servers share it
"""
