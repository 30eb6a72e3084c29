"""`raydix bench serve`: load on any OpenAI-compatible server, and what its users would see."""
