"""Linear attention of Qwen3.5: the gated delta rule and its convolution, in training and decoding.

layer          the convolution and the rule, and their steps while decoding
chunks         the rule computed by chunks, and its derivative
context        the exchange of states between context-parallel ranks
flash          the rule by the kernels of flash-linear-attention, and their check on a device
"""
