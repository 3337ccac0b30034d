"""Shared test code: models, operands, meshes, comparisons, and programs that tests start."""
