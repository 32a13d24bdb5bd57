"""The native engine: requests to completions on the training mesh or on one device.

request                the request to an engine, and the completion that it gives
engine, native         continuous batching on one rank; on a mesh, its share of the requests
images, image_prompts  images of prompts as a batch; a prompt with images, as a server is sent it
kv_cache               keys and values of running sequences, and the memory that they may take
cached_attention       the attention of a forward over them
varlen_decode          that of a decoding step by variable-length flash attention
slot_flash             its operation, to the slots of the cache
check_varlen_decode    the check of a device before that is used
graphs                 a decoding step as a CUDA graph
sampling               the next token; sequences, and their ends by stop texts
generate               completions in one call
chats                  chats, and their images, to prompts
scores                 log-probabilities of a prompt's tokens
"""
