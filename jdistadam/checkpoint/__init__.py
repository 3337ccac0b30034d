"""Checkpoints: saves training states to files and restores them on any mesh."""
