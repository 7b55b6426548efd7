"""Requests of which the server reads a part (prefill: {keep, model}): reports, counts, refusals, and what the cache of
beginnings makes of them. The box scores for itself."""

import threading

import pytest
from checkout import ROOT
from depth import deeper, deeper_but
from serving import serving, settings, streamed

from luce.data import BOX

TEXT = (ROOT / "luce" / "decode" / "generation.py").read_text()[:2500]
GREEDY = {"max_tokens": 12, "temperature": 0}
KEEP = {"prefill": {"keep": 0.3}}
ASKED = {
    "/v1/completions": {"prompt": TEXT, **GREEDY},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": TEXT}], **GREEDY},
    "/v1/messages": {"messages": [{"role": "user", "content": TEXT}], **GREEDY},
}


@pytest.fixture(scope="module")
def server(native):
    with serving({"box": BOX}, settings(scorer=BOX, ctx=2048, checkpoints=16)) as running:
        yield running


def asked(server, api, **more):
    answer = server.post(api, **(ASKED[api] | more))
    assert answer.status_code == 200, answer.text
    return answer.json()


def text_of(answer):
    return answer["choices"][0]["text"]


@pytest.mark.parametrize("api", deeper_but(ASKED, "/v1/chat/completions", "/v1/messages"))
def test_answers_say_what_was_read(server, api):
    whole, kept = asked(server, api), asked(server, api, **KEEP)
    assert "prefill" not in whole
    report, usage = kept["prefill"], kept["usage"]
    assert report["model"] == "box.gguf" and report["keep"] == 0.3
    assert report["read"] == sum(end - first for first, end in report["spans"])
    if api == "/v1/messages":
        read = usage["input_tokens"] + usage["cache_read_input_tokens"]
        all_of_it = sum(whole["usage"][key] for key in ("input_tokens", "cache_read_input_tokens"))
        left_out = usage["left_out_tokens"]
    else:
        read, all_of_it = usage["prompt_tokens"], whole["usage"]["prompt_tokens"]
        left_out = usage["prompt_tokens_details"]["left_out_tokens"]
    assert read == report["read"] and left_out == report["left_out"] > read
    assert read + left_out == all_of_it


@pytest.mark.parametrize("api", ["/v1/completions", *deeper("/v1/chat/completions")])
def test_streams_say_it_with_the_last_event(server, api):
    events = streamed(server.post(api, stream=True, **(ASKED[api] | KEEP)))
    told = [event["prefill"] for event in events if "prefill" in event]
    assert told == [asked(server, api, **KEEP)["prefill"]]


@pytest.mark.long
def test_a_part_and_a_whole_prompt_are_never_taken_for_each_other(server):
    """Each has its own tokens in whatever order they are asked, and is resumed from what it kept itself. Ahead of the
    first gap they are one."""
    api, beginning = "/v1/completions", "x = 1\n" * 40
    parts = {"prompt": beginning + TEXT}
    orders = [(None, 0.5, 0.2, None, 0.5, 0.2), (0.2, 0.5, None, 0.2, None, 0.5)]
    found = {}
    for order in orders:
        with serving({"box": BOX}, settings(scorer=BOX, ctx=2048, checkpoints=16)) as fresh:
            met = set()
            for keep in order:
                more = {} if keep is None else {"prefill": {"keep": keep}}
                answer = asked(fresh, api, **parts, **more)
                cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
                spans = answer.get("prefill", {"spans": [[0, 1 << 20]]})["spans"]
                if keep in met:
                    assert cached > spans[0][1] or keep is None or cached > 0
                else:  # Another one has kept the beginning alone, which both have.
                    assert cached <= spans[0][1]
                met.add(keep)
                assert found.setdefault(keep, text_of(answer)) == text_of(answer)


@pytest.mark.long
def test_answers_beside_each_other_have_the_tokens_of_each_alone(server):
    shares = (0.15, 0.3, 0.6, None)
    bodies = [{} if keep is None else {"prefill": {"keep": keep}} for keep in shares]
    alone = [text_of(asked(server, "/v1/completions", **body)) for body in bodies]
    together = [None] * len(bodies)

    def ask(i):
        together[i] = text_of(asked(server, "/v1/completions", **bodies[i]))

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(len(bodies))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert together == alone


def test_several_answers_to_one_prompt(server):
    answer = asked(server, "/v1/completions", n=2, seed=3, **KEEP)
    assert len(answer["choices"]) == 2 and answer["prefill"]["left_out"] > 0


def test_only_what_is_read_has_to_fit_into_the_context(native):
    with serving({"box": BOX}, settings(scorer=BOX, ctx=512)) as small:
        refused = small.post("/v1/completions", prompt=TEXT, **GREEDY)
        assert refused.status_code == 400 and "maximum context length is 512" in refused.text
        assert small.post("/v1/completions", prompt=TEXT, **GREEDY, prefill={"keep": 0.2}).status_code == 200


@pytest.mark.parametrize(
    ("prefill", "more", "said"),
    [
        ({"keep": 0}, {}, "prefill.keep is 0: it is the share of the prompt"),
        ({"keep": 1.5}, {}, "prefill.keep is 1.5"),
        ({"keep": "a"}, {}, "prefill.keep is 'a'"),
        ({}, {}, "prefill.keep is None"),
        ({"keep": True}, {}, "prefill.keep is True"),
        ({"keep": 0.5, "model": "other.gguf"}, {}, "prefill.model is 'other.gguf': the server has box.gguf"),
        ({"keep": 0.5}, {"echo": True, "logprobs": 1}, "a prompt that is read whole"),
    ],
)
def test_what_cannot_be_is_refused(server, prefill, more, said):
    refused = server.post("/v1/completions", prompt=TEXT, prefill=prefill, **GREEDY, **more)
    assert refused.status_code == 400 and said in refused.json()["error"]["message"]


def test_a_server_without_a_scorer_refuses(native):
    with serving({"box": BOX}) as plain:
        refused = plain.post("/v1/completions", prompt=TEXT, **GREEDY, **KEEP)
        assert refused.status_code == 400 and "started without a scorer" in refused.text
