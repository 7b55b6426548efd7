"""The command line: options to a request, events to a terminal."""
