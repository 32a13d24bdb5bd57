"""Images of rows: their bytes, size and pixels, and what an image processor makes of them for a model.

files, decoding      bytes and digest of an image as a row writes it, and its record in a cache; its header's size; its
                     RGB values
processor, tensors   layout of patches and tokens; pixels for a tower, and streams of a document with images
families, fields     the processors of the families, and the fields of a model's directory that decide one
reader               images of chats: image tokens in the text, streams and pixels
"""
