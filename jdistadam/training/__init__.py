"""``train_step`` and ``TrainState``: a whole training step as one program."""
