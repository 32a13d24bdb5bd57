"""Vision towers: from the patches of images to features in the place of tokens. Module names are Hugging Face's.

common                       interface, config and FLOPs of a tower, attention within images, positions on a grid
image_balancing              images dealt to the ranks that hold the same rows
qwen                         Qwen2.5-VL's, with attention in windows; Qwen3-VL's, with deepstack, and that of Qwen3.5
gemma3                       SigLIP and Gemma 3's pooling projector
gemma4                       Gemma 4's, with its pooling and embedder
"""
