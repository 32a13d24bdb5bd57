"""Images of rows: their files, and their patches and tokens for a model.

files       bytes and digest of an image, its record in a cache, its size and RGB values
processor   base class of image processors: layout of patches and tokens, pixels, streams
tensors     pixels as a vision tower reads them, and the streams of a document with images
families    the image processors of the families, read from the files of a model's directory
reader      images of chats: image tokens in the text, streams and pixels
"""
