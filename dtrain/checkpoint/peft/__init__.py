"""Adapters in PEFT's layout, in and out.

config    adapter_config.json to an `AdapterConfig`, and back
tensors   the tensors of its file: names, shapes, headers
files     an adapter's weights, read and written
base      the base model that an adapter names, compared with the one at hand
export    an adapter alone, folded, or merged into its base
"""
