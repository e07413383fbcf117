"""Parts of examples/train_charlm.py: the model, the text, and what is written of a run."""
