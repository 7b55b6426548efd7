"""Images of prompts: opened, stretched to a size that a model's tower takes, and cut into patches."""
