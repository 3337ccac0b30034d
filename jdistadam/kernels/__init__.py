"""All custom calls, and the reference implementation, which gives the same bits."""
