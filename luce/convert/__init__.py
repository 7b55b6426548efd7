"""What `luce convert` runs: checkpoints to GGUF files."""
