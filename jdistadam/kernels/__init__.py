"""Every custom call, and the reference implementation that each must equal bit for bit."""
