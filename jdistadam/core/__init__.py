"""Values: hyperparameters, precision, groups, trees, and the words in which devices talk."""
