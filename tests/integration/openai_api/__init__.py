"""The API through the official client: all files here share one server."""
