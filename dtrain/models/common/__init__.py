"""Parts that the families of models share.

config                       a model's sizes
config_fields, model_fields, rope_config    reading them from config.json
decoder, functions           layers and whole decoders, their operations; norms, activations, rotary embedding
micro_batch                  everything that belongs to one micro-batch's forward: images, a KV cache, routing
moe, routing                 mixtures of experts; their router and its balance loss
keys_first                   keys of context parallel on their way while queries are projected
flops                        training FLOPs per token
linear                       the linear layer, and how adapters change it
tower, vision_config         the text model of a multimodal checkpoint; sizes of its vision tower
"""
