"""What models write and read: chat prompts, thoughts, calls of tools, schemas and grammars."""
