"""What a scripted model says to the clients' own SDKs, and the tool that it calls, in each API's words."""

from luce.text.dialects import GEMMA, QWEN

CALL = """<tool_call>
<function=read>
<parameter=path>
notes/a b.txt
</parameter>
<parameter=lines>
3
</parameter>
</function>
</tool_call>"""
THOUGHT = "<think>\nThe user greets me.\n</think>\n\n"
SCRIPT = {
    "hello": [f"{THOUGHT}Hello, wörld!"],
    "read": [f"{THOUGHT}I look.\n\n{CALL}", "It says 42."],
    "twice": [f"{CALL}\n{CALL.replace('3', '4')}", "Both are there."],
    "broken": ["<tool_call>\n<function=read>\n<parameter=path>\nx"],
}
GEMMA_CALL = '<|tool_call>call:read{path:<|"|>notes/a b.txt<|"|>,lines:3}<tool_call|>'
GEMMA_THOUGHT = "<|channel>thought\nThe user greets me.\n<channel|>"
GEMMA_SCRIPT = {
    "hello": [f"{GEMMA_THOUGHT}Hello, wörld!"],
    "read": [f"{GEMMA_THOUGHT}I look.{GEMMA_CALL}", "It says 42."],
    "twice": [f"{GEMMA_CALL}{GEMMA_CALL.replace('3', '4')}", "Both are there."],
    "broken": ['<|tool_call>call:read{path:<|"|>x'],
}
SCRIPTS = {QWEN: SCRIPT, GEMMA: GEMMA_SCRIPT}
SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}, "lines": {"type": "integer"}}}
ARGUMENTS = {"path": "notes/a b.txt", "lines": 3}


TOOL = {"type": "function", "function": {"name": "read", "description": "Reads.", "parameters": SCHEMA}}
FUNCTION = {"type": "function", "name": "read", "parameters": SCHEMA, "strict": False}
ANTHROPIC_TOOL = {"name": "read", "description": "Reads.", "input_schema": SCHEMA}
SYSTEM = [{"type": "text", "text": "x-anthropic-billing-header: 1"}, {"type": "text", "text": "Be brief."}]
