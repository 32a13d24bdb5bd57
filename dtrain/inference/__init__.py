"""The native engine: requests to completions on the training mesh or on one device.

request                the request to an engine, and the completion that it gives
engine, native         continuous batching on one rank, log-probabilities of prompts; on a mesh, its share of the
                       requests
images                 images of prompts as a batch
kv_cache               keys and values of running sequences, and the memory that they may take
cached_attention       the attention of a forward over them
varlen_decode          that of a decoding step by variable-length flash attention, and its check on a device
graphs                 a decoding step as a CUDA graph
sampling               the next token; sequences, and their ends by stop texts
generate               completions in one call
chats                  chats, and their images, to prompts; a prompt with images as it is sent to a server
"""
