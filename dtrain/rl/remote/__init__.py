"""Servers: completions from vLLM, SGLang and `dtrain serve`, new weights for them, and a model that judges.

engine                  servers as the engine of a training run; sampling of the next rollout during training
http, dialects          requests to several servers; the protocol of each kind of server, with images
http_client             one HTTP call, and the state of a call that is tried again
publish                 new weights or an adapter for the servers: through a directory, by broadcast, or NCCL for vLLM
judge                   a reward: the points of another model
"""
