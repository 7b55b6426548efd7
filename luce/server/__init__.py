"""`luce serve` is HTTP for agents, on one engine thread for each model, or for each replica of it.

A request goes this way. `app` reads the body by the types of its API (`api/`), which makes an `Ask` of it.
`answer` makes the prompt and gives it to the model's scheduler (`luce/decode`). It cuts the text that comes back into
reasoning, text and calls (`luce/text`), which go back in the API's own form. `luce/prompts` keeps beginnings
of prompts; `models` loads and unloads, and `replicas` says which of a model's engines takes a request.
"""

LOOPBACK = ("127.0.0.1", "localhost", "::1")  # This machine, by the names that requests may have for it.
