"""The native engine: requests to completions on the training mesh or on one device.

request                the request to an engine, and the completion that it gives
engine, native         continuous batching on one rank; on a mesh
sequence               the state that the engine keeps of a request; stop texts
kv_cache               keys and values of running sequences
cached_attention       the attention of a forward over them
graphs                 a decoding step as a CUDA graph
sampling               the next token
budget                 rows and memory of one engine, and its share of the requests
generate               completions in one call
scores                 log-probabilities of a prompt's tokens
"""
