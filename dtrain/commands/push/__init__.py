"""`dtrain push`: uploads a run's export or adapter to the Hugging Face hub, with a model card.

command.py has the arguments and uploads the files. card.py writes the model card and draws the losses. No rows of the
training data are uploaded. Torch is not imported.
"""
