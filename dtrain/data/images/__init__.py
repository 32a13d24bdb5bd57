"""Images of rows: their bytes, size and pixels, and what an image processor makes of them for a model.

files, decoding      bytes and digest of an image as a row writes it, and its record in a cache; its header's size; its
                     RGB values
whole                torn files, told without decoding
processor, pixels    layout of patches and tokens, and the tensors of a tower
positions            streams of a document whose tokens stand for images
families, fields     the processors of the families, and the fields of a model's directory that decide one
reader               images of chats: image tokens in the text, streams and pixels
"""
