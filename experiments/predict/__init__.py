"""How long a step of a distributed optimizer takes on so many devices, from bytes and speeds."""
