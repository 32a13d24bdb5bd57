"""Adapters and 4-bit weights of linear layers: LoRA, DoRA and NF4.

    config    which layers get an adapter, its rank and scale, in PEFT's terms (no torch)
    lora      LoRA and DoRA: parameters, forward, initial values
    nf4       weights in the 4-bit NormalFloat format of QLoRA

The files of adapters are in `checkpoint.peft`.
"""
