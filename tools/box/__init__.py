"""Says how the model in the box is made: corpus, trunk, NextN head, DFlash drafter. Entry point: train.py."""
