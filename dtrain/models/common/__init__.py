"""Parts that the model families share. Read `decoder` first.

decoder                      layers and decoders, and the forward
functions                    norms, activations, rotary embedding
linear                       the linear layer, and how adapters change it
moe, routing                 mixtures of experts, their router and its balance loss
micro_batch                  the context of one micro-batch's forward: images, KV cache, routing, adapters
masks                        attention masks of one forward
keys_first                   context parallel: keys are gathered while queries are projected
config                       sizes and layer types of a model
config_fields, model_fields, rope_config    reading them from config.json
tower, vision_config         the text model of a multimodal checkpoint, and the sizes of its vision tower
flops                        training FLOPs per token
"""
