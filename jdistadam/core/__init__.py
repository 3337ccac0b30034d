"""Values (hyperparameters, precision, groups, trees) and all collectives."""
