"""`dtrain push`: a run's export, or adapter, to the Hugging Face hub, with a card that says how it came to be.

command.py has the arguments and sends the files, card.py writes the card and draws the losses. No row of the data
goes along. Torch is not imported.
"""
