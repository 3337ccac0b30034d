"""What several tests share: models, operands, meshes, comparisons, and programs that they start."""
