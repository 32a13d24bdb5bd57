"""Parts of `tools/check_gpu`.

check       the parts in their order, and the text file
ranks       processes with a GPU each, kept between the parts
runs        recipes without a download, and what a rank does with one
parity      numbers against the CPU, compiled against eager, attention's proof
features    adapters, offloading, exports, GRPO, the same bits, weights sent to another process
layers      a step of real widths: memory, speed, trace
rates       what the device and its links reach
decoding    CUDA graphs against eager, over products and over varlen_attn
stops       a rank that never comes
"""
