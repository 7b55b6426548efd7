"""What model files hold: metadata, tokenizer, chat template, facts, and where the hub keeps them."""
