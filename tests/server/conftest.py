"""What tests of the server watch."""

import pytest

from luce.server.models import Served


@pytest.fixture
def prompts(monkeypatch):
    """Gives the tokens of prompts that were made."""
    made_prompts = []

    async def seen(self, ask, made=Served.seen):
        placed = await made(self, ask)
        made_prompts.append(placed.tokens)
        return placed

    monkeypatch.setattr(Served, "seen", seen)
    return made_prompts
