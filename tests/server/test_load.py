"""Lets clients come and go: tests/support/serve_load.py's short form."""

import pytest
from serve_load import Load, cases
from serving import CHUNK, serving, settings, until

from luce.data import BOX


@pytest.mark.long
def test_every_answer_is_the_one_alone_and_nothing_is_left(native):
    known = cases(6, CHUNK, longest=1200)
    with serving(
        {"box": BOX}, settings(sequences=3, checkpoints=3, host_bytes=20 << 20, max_waiting=6)
    ) as server:
        load = Load(server.url, known)
        load.run(8, lambda done: done < 4)
        assert not load.wrong, load.wrong[0]
        assert load.counts["right"] and load.counts["gone"] and load.counts["bad"]
        until(lambda: server.scheduler.idle, "all sequences are free")
        served = server.models.slots["box"].served
        held, _ = served.first.cache.sizes()["device"]
        assert served.first.engine.native.info.sequences_free == 3
        assert served.first.engine.native.info.checkpoints_free == 3 - held
        served.first.cache.free_pages(served.info.n_pages)
        assert served.first.engine.native.info.pages_free == served.info.n_pages
