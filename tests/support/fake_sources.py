"""Has draft sources for generations over a fake engine (fake_core.py)."""

import itertools

from luce.speculate.drafting import Draft


class Source:
    """This is a draft source that keeps what it was told. `core` is an engine, for its last sequence, or a
    sequence."""

    def __init__(self, core=None):
        self.core = core
        self.budgets, self.rounds = [], []

    def begin(self, budget):
        self.budgets.append(budget)

    def propose(self, anchor, limits):
        pass

    def follows(self):
        return None

    def learn(self, done):
        self.rounds.append(done)



class Chain(Source):
    """Drafts chains: `guess(history)` for each next token. Keeps what it was asked."""

    name = "chain"

    def __init__(self, core, guess, length=8):
        super().__init__(core)
        self.guess, self.length = guess, length
        self.asked = []

    def draft(self, anchor, limits):
        self.asked.append((anchor, limits.candidates, limits.depth))
        history, tokens = (*self.core.committed, anchor), []
        for _ in range(min(self.length, limits.candidates, limits.depth)):
            tokens.append(self.guess(history))
            history = (*history, tokens[-1])
        return Draft(tuple(tokens))


class OnDevice(Source):
    """Asks for chains of the fake core's head."""

    name = "on device"

    def __init__(self, length=8):
        super().__init__()
        self.length = length

    def draft(self, anchor, limits):
        return Draft(on_device=min(self.length, limits.candidates, limits.depth))


class Trees(Source):
    """Drafts trees of given shapes whose nodes follow the target where the given flags say so."""

    name = "trees"

    def __init__(self, core, shapes, choose=None):
        super().__init__(core)
        self.choose = choose or core.choose
        self.shapes = itertools.cycle(shapes)

    def draft(self, anchor, limits):
        histories, tokens, parents = [(*self.core.committed, anchor)], [], [-1]
        for above, right in next(self.shapes)[: limits.candidates]:
            parent = above % len(histories)
            if len(histories[parent]) - len(histories[0]) < limits.depth:
                choice = self.choose(histories[parent])
                tokens.append(choice if right else (choice + 1) % 256)
                histories.append((*histories[parent], tokens[-1]))
                parents.append(parent)
        return Draft(tuple(tokens), tuple(parents))


class Faulty(Source):
    """Drafts what it is given, or raises it; raising: the verb that raises instead, "draft" or another."""

    name = "faulty"

    def __init__(self, draft, raising="draft"):
        super().__init__()
        self._draft, self._raising = draft, raising
        self.calls = 0

    def begin(self, budget):
        self._maybe("begin")

    def draft(self, anchor, limits):
        self.calls += 1
        self._maybe("draft")
        return Draft() if isinstance(self._draft, Exception) else self._draft

    def learn(self, done):
        self._maybe("learn")

    def propose(self, anchor, limits):
        self._maybe("propose")

    def _maybe(self, verb):
        if isinstance(self._draft, Exception) and verb == self._raising:
            raise self._draft
