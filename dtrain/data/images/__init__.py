"""Images of rows: their bytes, size and pixels, and what an image processor makes of them for a model.

files                bytes and digest of an image as a row writes it, its record in a cache, its size and RGB values
processor, tensors   layout of patches and tokens; pixels for a tower, and streams of a document with images
families             the processors of the families, read from the files of a model's directory
reader               images of chats: image tokens in the text, streams and pixels
"""
