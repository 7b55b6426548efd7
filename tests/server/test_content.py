"""Reads the content of messages, in every API's parts: what reaches a model that reads text alone."""

import base64

import pytest
from hypothesis import given
from hypothesis import strategies as st

from luce.server.ask import Refused
from luce.server.content import output_of, require_readable, text_of, thoughts_of

NOTE = "[{}: this model reads text alone]"
B64 = base64.b64encode("Straße".encode()).decode()
IMAGES = [
    {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}},
    {"type": "input_image", "image_url": "data:image/png;base64,AA=="},
    {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}},
    {"type": "image", "source": {"type": "url", "url": "x"}},
]
WORDS = {"type": "text", "text": "words"}
PDF = {"type": "base64", "media_type": "application/pdf", "data": "AA=="}
PARTS = [  # Each is told so.
    *((image, NOTE.format("image")) for image in IMAGES),
    ({"type": "input_audio", "input_audio": {"data": "AA==", "format": "wav"}}, NOTE.format("audio")),
    ({"type": "video_url", "video_url": {"url": "x"}}, NOTE.format("video")),
    ({"type": "computer_screenshot", "image_url": "x"}, NOTE.format("image")),
    # documents
    ({"type": "document", "source": PDF}, NOTE.format("document")),
    ({"type": "document", "source": PDF, "title": "Report"}, NOTE.format("document Report")),
    ({"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "words"}}, "words"),
    ({"type": "document", "title": "T", "context": "C", "source": {"type": "text", "data": "words"}},
     "T\nC\nwords"),
    ({"type": "document", "source": {"type": "content", "content": "words"}}, "words"),
    ({"type": "document", "source": {"type": "content", "content": [
        {"type": "text", "text": "one"}, IMAGES[2], {"type": "text", "text": "two"}]}},
     f"one\n{NOTE.format('image')}\ntwo"),
    ({"type": "document", "source": {"type": "base64", "media_type": "text/plain", "data": B64}}, "Straße"),
    ({"type": "document", "source": {"type": "base64", "media_type": "text/plain", "data": "?"}},
     NOTE.format("document")),
    ({"type": "document", "source": {"type": "file", "file_id": "f"}}, NOTE.format("document")),
    ({"type": "file", "file": {"filename": "a.pdf", "file_data": "data:application/pdf;base64,AA=="}},
     NOTE.format("document a.pdf")),
    ({"type": "file", "file": {"filename": "a.txt", "file_data": f"data:text/plain;base64,{B64}"}},
     "a.txt\nStraße"),
    ({"type": "file", "file": {"file_id": "f"}}, NOTE.format("document")),
    ({"type": "input_file", "filename": "a.csv", "file_data": f"data:text/csv;charset=utf-8;base64,{B64}"},
     "a.csv\nStraße"),
    ({"type": "input_file", "file_url": "x"}, NOTE.format("document")),
    # what servers searched and ran
    ({"type": "search_result", "source": "http://a", "title": "A", "content": [WORDS]},
     "A\nhttp://a\nwords"),
    ({"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "q"}},
     '[web_search {"query": "q"}]'),
    ({"type": "web_search_tool_result", "tool_use_id": "s", "content": [
        {"type": "web_search_result", "title": "A", "url": "http://a", "encrypted_content": "xyz"},
        {"type": "web_search_result", "title": "B", "url": "http://b", "encrypted_content": "xyz"}]},
     "A\nhttp://a\n\nB\nhttp://b"),
    ({"type": "web_search_tool_result", "tool_use_id": "s", "content": {
        "type": "web_search_tool_result_error", "error_code": "unavailable"}},
     '{"error_code": "unavailable"}'),
    ({"type": "web_fetch_tool_result", "tool_use_id": "s", "content": {
        "type": "web_fetch_result", "url": "http://a", "content": {
            "type": "document", "title": "A", "source": {"type": "text", "data": "words"}}}},
     "http://a\nA\nwords"),
    ({"type": "bash_code_execution_tool_result", "tool_use_id": "s", "content": {
        "type": "bash_code_execution_result", "stdout": "42", "return_code": 0, "content": []}},
     '{"stdout": "42", "return_code": 0, "content": []}'),
    ({"type": "mcp_tool_use", "id": "m", "name": "look", "input": {}, "server_name": "x"}, "[look {}]"),
    ({"type": "mcp_tool_result", "tool_use_id": "m", "content": [WORDS]}, "words"),
    # what nobody knows
    ({"type": "container_upload", "file_id": "f"}, NOTE.format("container_upload")),
    ({"type": "hologram", "data": "AA=="}, NOTE.format("hologram")),
    ({"type": "a\nb", "data": "AA=="}, NOTE.format("a b")),
    ({"type": "caption", "text": "words"}, "words"),
    ({"type": "compaction", "content": "what was said", "encrypted_content": "xyz"}, "what was said"),
    # what is no text for a reader
    ({"type": "thinking", "thinking": "hm", "signature": "s"}, ""),
    ({"type": "redacted_thinking", "data": "xyz"}, ""),
    ({"type": "refusal", "refusal": "no"}, "no"),
    ({"text": "no type"}, "no type"),
    ("a string", "a string"),
]  # fmt: skip


@pytest.mark.parametrize(("part", "told"), PARTS)
def test_a_part_is_told_in_words(part, told):
    assert text_of([part], "messages") == told
    text = {"type": "text", "text": "before"}
    between = "" if part == "a string" or told in ("no", "no type", "") else "\n"
    assert text_of([text, part], "messages") == f"before{between}{told}"
    assert text_of([text, text], "messages") == "beforebefore"


@pytest.mark.parametrize("part", [1, None, [], {"type": "text", "text": 3}, {"type": "text", "text": None}])
def test_a_part_that_is_malformed_is_refused(part):
    with pytest.raises(Refused) as refused:
        text_of([part], "messages")
    assert refused.value.param == "messages" and refused.value.status == 400


def test_thoughts_among_parts():
    parts = [
        {"type": "thinking", "thinking": "one"},
        {"type": "text", "text": "said"},
        {"type": "reasoning", "reasoning": "two"},
        {"type": "reasoning", "text": "three"},
        {"type": "thinking", "thinking": [{"type": "text", "text": "four"}]},
        {"type": "redacted_thinking", "data": "xyz"},
    ]
    assert thoughts_of(parts) == "one\ntwo\nthree\nfour" and text_of(parts, "messages") == "said"
    assert thoughts_of("said") == thoughts_of(None) == ""


OUTPUTS = [
    ("words", "words"),
    (None, ""),
    ([{"type": "input_text", "text": "one"}, {"type": "input_text", "text": "two"}], "one\ntwo"),
    ([{"type": "input_text", "text": "one"}, IMAGES[1]], f"one\n{NOTE.format('image')}"),
    ({"content": "words", "success": True}, "words"),
    ({"content": [{"type": "input_text", "text": "one"}], "success": False}, "one"),
    ({"temperature": 20.5, "sky": "blå"}, '{"temperature": 20.5, "sky": "blå"}'),
    ({"content": "words", "more": 1}, '{"content": "words", "more": 1}'),
    ([{"stdout": "42", "stderr": ""}], '[{"stdout": "42", "stderr": ""}]'),
    ([1, 2], "[1, 2]"),
    (42, "42"),
    (True, "true"),
    ({"type": "computer_screenshot", "image_url": "x"}, NOTE.format("image")),
]


@pytest.mark.parametrize(("output", "told"), OUTPUTS)
def test_what_a_tool_answered_reaches_the_model(output, told):
    assert output_of(output, "input") == told


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(0, 9) | st.text("ab", max_size=2),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["type", "text", "content", "source", "file", "data", "url"]), inner, max_size=3
        )
    ),
    max_leaves=8,
)


@given(JSON)
def test_any_json_is_text_or_refused(value):
    for read in (lambda: text_of(value, "x"), lambda: output_of(value, "x"), lambda: thoughts_of(value)):
        try:
            assert isinstance(read(), str)
        except Refused as refused:
            assert refused.status == 400


@pytest.mark.parametrize("image", IMAGES)
def test_only_an_image_in_the_newest_message_of_a_user_is_refused(image):
    asks, text = ("user", [{"type": "text", "text": "What is it?"}, image]), ("user", "And?")
    result = ("user", [{"type": "tool_result", "tool_use_id": "t", "content": [image]}])
    for turns in (
        [asks],
        [text, ("assistant", "yes"), asks],
        [asks, ("system", "late")],
        [asks, ("assistant", "It is")],  # It is a beginning of the answer.
        [("assistant", None), ("tool", [image]), asks],
    ):
        with pytest.raises(Refused, match="an image: this model reads text alone"):
            require_readable(turns, "messages")
    for turns in (
        [],
        [asks, ("assistant", "a cat"), text],
        [asks, text],
        [asks, ("assistant", None), ("tool", "words")],
        [text, ("assistant", None), ("tool", [image])],
        [text, ("assistant", None), result],
        [("system", [image]), text],
        [("user", [{"type": "document"}, {"type": "input_audio"}, {"type": "hologram"}])],
        [("assistant", [image])],
    ):
        require_readable(turns, "messages")
