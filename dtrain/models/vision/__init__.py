"""Vision towers: from the patches of images to features in place of tokens. Module names are Hugging Face's.

common                       interface and FLOPs of a tower, attention within images, positions on a grid
image_balancing              balancing of images over ranks
qwen                         Qwen2.5-VL's, with attention in windows; Qwen3-VL's, with deepstack; Qwen3.5's
gemma3                       SigLIP and Gemma 3's pooling projector
gemma4                       Gemma 4's, with its pooling and embedder
"""
