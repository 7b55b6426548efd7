"""A model that is loaded once and asked from any thread: what the Python API, the command line and the server
stand on."""
