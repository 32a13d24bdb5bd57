"""Adapters in PEFT's layout.

config    adapter_config.json to an `AdapterConfig` and back; the base model that it names
tensors   the tensors of its file: names and shapes
files     an adapter's weights, read and written
export    an adapter copied, folded, or merged into its base
"""
