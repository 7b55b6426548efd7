"""`luce serve` is HTTP for agents, on one engine thread for each model.

A request goes this way. `app` reads the body by the types of its API (`openai`, `responses`, `anthropic`,
`ollama`), which makes an `Ask` of it. `answer` makes the prompt and gives it to the model's `scheduler`. It
cuts the text that comes back into reasoning, text and calls (`dialect`), which go back in the API's own
form. `cache` keeps beginnings of prompts; `models` loads and unloads.
"""
