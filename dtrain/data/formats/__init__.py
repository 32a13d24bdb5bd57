"""Rows of a format to samples of token ids and masks.

formats      the formats of rows, and how each is recognised
image_parts  images in rows: parts of messages, placeholders, and the column images
encoder      what the encoders of all formats share; a conversation or text to ids and mask
pairs        preferences to the two documents of a pair
labels       replies marked good or bad; classes, numbers and margins
prompts      prompts to draw completions for
"""
