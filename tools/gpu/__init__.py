"""What `tools/check_gpu` does, part by part.

check     the parts in their order, and the text file
ranks     processes with a GPU each
runs      recipes without a download, and what a rank does with one
parts     each part: what it tells, and what it finds wrong
"""
