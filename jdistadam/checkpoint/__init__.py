"""Checkpoints: states of training as files, and back, on any mesh."""
