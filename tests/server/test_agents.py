"""Asks again what agents asked when a scripted model had them read an image (Qwen) or a file (Gemma), write another and
call a tool with a nested argument. tests/goldens/agents.json has their requests; tools/clients/keep.py writes it."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import scripted_model
from checkout import TESTS
from clients import script
from depth import deeper_but
from serving import serving, settings, until

from luce.native import Tower
from luce.text.dialects import GEMMA, QWEN

pytest.importorskip("PIL.Image")

RECORDED = json.loads((TESTS / "goldens" / "agents.json").read_text())
FOLDER = Path("/run/files")
ROWS = script.SIZE[0] * script.SIZE[1] // 1024
PLACES = {  # Each API has its own place for what a tool shows.
    "codex": "<tool_response>\n<|vision_start|><|vision_end|>\n</tool_response>",
    "opencode": "Attached media from tool result:<|vision_start|><|vision_end|><|im_end|>",
    "claude": "<tool_response>\n<|vision_start|><|vision_end|>\n</tool_response>",
    "pi": "Attached image(s) from tool result:<|vision_start|><|vision_end|><|im_end|>",
}
ENDS = {"codex": "event: response.completed", "claude": "event: message_stop"}


def models_of(folder, dialect, images):
    tower = folder / "mmproj.gguf" if images else None
    texts = script.script(FOLDER, dialect.name, images)
    path = scripted_model.write(folder / "scripted.gguf", texts, dialect=dialect, tower=tower)
    return {"scripted": path}, replace(settings(ctx=16384, sequences=4, checkpoints=16), mmproj=tower)


@pytest.fixture  # Of each test, since a server remembers images that it was sent.
def seeing(native, tmp_path_factory):
    paths, how = models_of(tmp_path_factory.mktemp("seeing"), QWEN, images=True)
    with serving(paths, how, log="json") as running:
        yield running


@pytest.fixture(scope="module")
def blind(native, tmp_path_factory):
    paths, how = models_of(tmp_path_factory.mktemp("blind"), QWEN, images=True)
    with serving(paths, replace(how, mmproj=None)) as running:
        yield running


@pytest.fixture(scope="module")
def gemma(native, tmp_path_factory):
    with serving(*models_of(tmp_path_factory.mktemp("gemma"), GEMMA, images=False), log="json") as running:
        yield running


@pytest.fixture
def line(capsys):
    """Gives what the log says of the one request since the last call."""

    def read():
        found = []

        def come():
            found.extend(each for each in capsys.readouterr().err.splitlines() if '"method"' in each)
            return found

        until(come, "a line is written")
        (told,) = found
        return json.loads(told)

    return read


@pytest.fixture
def encodes(monkeypatch):
    grids, encode = [], Tower.encode
    monkeypatch.setattr(Tower, "encode", lambda self, *given: grids.append(given[1]) or encode(self, *given))
    return grids


def turns_of(agent, dialect):
    kept = RECORDED[agent]
    return [turn | {"tools": kept["tools"]} for turn in kept[dialect]]


def ask(server, agent, body, stream=False):
    return server.post(RECORDED[agent]["path"], **{**body, "stream": stream})


def said(answer):
    """Returns the thoughts, the text and the calls of an answer in any API."""
    if "choices" in answer:
        message = answer["choices"][0]["message"]
        calls = [each["function"] for each in message.get("tool_calls") or ()]
        found = [(each["name"], json.loads(each["arguments"])) for each in calls]
        return message.get("reasoning_content") or "", message["content"] or "", found
    thoughts, text, calls = "", "", []
    for part in answer.get("output") or answer["content"]:
        if part["type"] in ("reasoning", "thinking"):
            thoughts += part.get("thinking") or part["content"][0]["text"]
        elif part["type"] in ("message", "text"):
            text += part.get("text") or part["content"][0]["text"]
        else:
            given = part["input"] if "input" in part else json.loads(part["arguments"])
            calls.append((part["name"], given))
    return thoughts, text, calls


def expected(agent, images):
    """Returns what the script has the model say in each turn of an agent."""
    first, *others = script.calls(FOLDER, images)[agent]
    begun = "It has a file.", "I read the file.", [first]
    return [begun, *(("", "", [each]) for each in others), ("", f"{agent} is done.", [])]


@pytest.mark.parametrize("agent", deeper_but(script.AGENTS, "pi"))
def test_an_agent_reads_an_image_and_goes_on(seeing, agent, line, prompts, encodes):
    """Its rows stand where its tool's answer does, and are encoded once and read once, however often it is sent."""
    decode = seeing.models.slots["scripted"].served.tokenizer.decode
    told = []
    for body, wanted in zip(turns_of(agent, "qwen"), expected(agent, images=True), strict=True):
        response = ask(seeing, agent, body)
        assert response.status_code == 200, response.text
        thoughts, text, calls = said(response.json())
        assert (thoughts, text.strip(), calls) == wanted
        told.append(line())
        rows = [token for token in prompts[-1] if token < 0]
        assert len(rows) == (ROWS if told[1:] else 0) and told[-1]["prompt"] == len(prompts[-1])
        if rows:
            at = prompts[-1].index(rows[0])
            assert prompts[-1][at : at + ROWS] == rows == [*range(rows[0], rows[0] - ROWS, -1)]
            assert PLACES[agent] in decode([token for token in prompts[-1] if token >= 0], special=True)
    assert len(encodes) == 1
    assert [(each.get("images"), each.get("encoded")) for each in told] == [(None, None), (1, 1), (1, 0), (1, 0)]
    assert told[2]["cached"] > told[0]["prompt"] + ROWS - 128


def streamed(agent, stream):
    """Returns what said() does, of a stream of events."""
    events = [json.loads(each[6:]) for each in stream.splitlines() if each.startswith("data: {")]
    if agent == "codex":  # It takes items from their own events.
        return said({"output": [each["item"] for each in events if each["type"] == "response.output_item.done"]})
    return said({"content": blocks_of(events)} if agent == "claude" else {"choices": [{"message": message_of(events)}]})


def blocks_of(events):
    """Returns the blocks of Anthropic's events."""
    blocks = {each["index"]: {**each["content_block"], "spelled": ""} for each in events if "content_block" in each}
    for each in (event for event in events if event["type"] == "content_block_delta"):
        for kind in each["delta"].keys() & {"text", "thinking", "partial_json"}:
            blocks[each["index"]]["spelled" if kind == "partial_json" else kind] += each["delta"][kind]
    return [block | ({"input": json.loads(block["spelled"])} if block["spelled"] else {}) for block in blocks.values()]


def message_of(events):
    """Returns the message of OpenAI's chunks."""
    message = {"content": "", "reasoning_content": "", "tool_calls": []}
    for delta in (choice["delta"] for each in events for choice in each["choices"]):
        for kind in ("content", "reasoning_content"):
            message[kind] += delta.get(kind) or ""
        for call in delta.get("tool_calls") or ():
            if call["index"] == len(message["tool_calls"]):
                message["tool_calls"].append({"function": {"name": "", "arguments": ""}})
            for kind, value in call["function"].items():
                message["tool_calls"][call["index"]]["function"][kind] += value
    return message


@pytest.mark.parametrize("agent", deeper_but(script.AGENTS, "codex"))
def test_a_stream_says_the_same(seeing, agent, line):
    for body, wanted in zip(turns_of(agent, "qwen"), expected(agent, images=True), strict=True):
        response = ask(seeing, agent, body, stream=True)
        assert response.status_code == 200 and ENDS.get(agent, "data: [DONE]") in response.text
        thoughts, text, calls = streamed(agent, response.text)
        assert (thoughts, text.strip(), calls) == wanted
        line()


@pytest.mark.parametrize("agent", deeper_but(script.AGENTS, "codex"))
def test_an_agent_talks_to_a_gemma(gemma, agent, line):
    """Nested arguments come as the model wrote them, and what it said before is the beginning of the next prompt."""
    told = []
    for body, wanted in zip(turns_of(agent, "gemma"), expected(agent, images=False), strict=True):
        response = ask(gemma, agent, body)
        assert response.status_code == 200, response.text
        thoughts, text, calls = said(response.json())
        assert (thoughts, text.strip(), calls) == wanted
        told.append(line())
    assert all(after["cached"] > before["prompt"] - 128 for before, after in zip(told, told[1:], strict=False))


@pytest.mark.parametrize("agent", deeper_but(script.AGENTS, "opencode"))
def test_a_model_without_a_tower_goes_on_where_the_image_is_a_tools(blind, agent):
    """opencode and pi send it in a message of the user's own, if they were told that the model sees."""
    answers = [ask(blind, agent, body) for body in turns_of(agent, "qwen")]
    if agent in ("codex", "claude"):
        assert [said(answer.json())[2:] for answer in answers] == [each[2:] for each in expected(agent, images=True)]
    else:
        assert [answer.status_code for answer in answers] == [200, 400, 200, 200]
        assert "this model reads text alone" in answers[1].json()["error"]["message"]
