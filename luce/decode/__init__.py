"""Decoding: a request becomes rounds of draft, verify, accept and commit, and those become events."""
