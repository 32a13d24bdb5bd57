"""Linear attention: the gated delta rule of Qwen3.5, its convolution, and both while decoding.

layer          the convolution, the rule, and one step of either
chunks         the rule by chunks, and its derivative
context        states exchanged between context-parallel ranks
flash          the rule by flash-linear-attention's kernels
check_flash    the comparison with torch before these are used
"""
