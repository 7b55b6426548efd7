"""The APIs: how each spells requests, answers and errors."""
