"""A byte-level language model, its text and its report; used by train_lm.py."""
