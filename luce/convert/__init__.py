"""`luce convert` runs what is here: it turns checkpoints into GGUF files."""
