"""From rows in one of the formats to samples of token ids and masks.

formats      the formats of rows, and how each is recognised and checked
image_parts  images in rows: parts of messages, placeholders, and the column images
encoder      what the encoders of all formats share; a conversation or text to ids and mask
pairs        preference rows to the two documents of a pair
labels       replies with a label (KTO); classes, numbers and margins for reward models
prompts      prompts that the model completes
"""
