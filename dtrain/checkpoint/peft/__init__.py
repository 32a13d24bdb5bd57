"""Adapters in PEFT's layout, in and out.

config    adapter_config.json to an `AdapterConfig`, and back; the base model that it names
tensors   the tensors of its file: names, shapes, headers
files     an adapter's weights, read and written
export    an adapter alone, folded, or merged into its base
"""
