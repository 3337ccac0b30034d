"""All custom calls, and the reference implementation that each equals bit for bit."""
