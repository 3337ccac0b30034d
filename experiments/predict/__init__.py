"""Predicts the time of a distributed optimizer's step from numbers of devices, bytes and speeds."""
