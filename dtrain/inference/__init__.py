"""The native generation engine: requests to completions, on the training mesh or on one device.

request                requests to an engine, and their completions
engine                 the engine of one rank: continuous batching, and log-probabilities of prompts
native                 the engine on a mesh, which distributes requests over the ranks
kv_cache               keys and values of running sequences, and the memory for them
cached_attention       attention over the cache, for prompts and for decoding steps
varlen_decode          the same for decoding steps by variable-length flash attention, and its check on a device
graphs                 decoding steps as CUDA graphs
decodable              check that the cache has all states of a model of transformers
sampling               sampling of the next token; running sequences, and stop texts
images                 images of prompts as a batch
generate               loading a model, and completions in one call
chats                  conversion of chats with images to prompts, also for servers
"""
