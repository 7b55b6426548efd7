"""Chat templates that do what published ones do, shortened: each is named after the models that have such a one."""


TURN = "{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}"
PROMPT = "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
CHATML = "{%- for m in messages %}" + TURN + "{%- endfor %}" + PROMPT
# Qwen3.5 and 3.6: somebody has to ask, and thoughts of the last turn are shown. Contents are trimmed.
QWEN = """
{%- set ns = namespace(asked=false, last=-1) %}
{%- for m in messages %}{%- if m.role == 'user' and not (m.content|trim).startswith('<tool_response>') %}
{%- set ns.asked = true %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}
{%- if not ns.asked %}{{- raise_exception('No user query found in messages.') }}{%- endif %}
{%- for m in messages %}
{%- set content = m.content|trim %}
{%- if m.role == 'system' and not loop.first %}
{{- raise_exception('System message must be at the beginning.') }}
{%- elif m.role == 'tool' %}
{{- '<|im_start|>user\\n<tool_response>\\n' + content + '\\n</tool_response><|im_end|>\\n' }}
{%- elif m.role == 'assistant' %}
{%- set thought = m.reasoning_content if m.reasoning_content is string else '' %}
{%- if not thought and '</think>' in content %}
{%- set thought = content.split('</think>')[0].split('<think>')[-1] %}
{%- set content = content.split('</think>')[-1] %}{%- endif %}
{{- '<|im_start|>assistant\\n' }}
{%- if loop.index0 > ns.last %}{{- '<think>\\n' + thought|trim + '\\n</think>\\n\\n' }}{%- endif %}
{{- content|trim }}
{%- for c in m.tool_calls or [] %}{{- '<tool_call>' + c.function.name + '</tool_call>' }}{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- else %}{{- '<|im_start|>' + m.role + '\\n' + content + '<|im_end|>\\n' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}
{%- else %}{{- '<think>\\n' }}{%- endif %}{%- endif %}"""
# Gemma 2: no system message, and a user and the model by turns.
GEMMA = """
{%- if messages[0].role == 'system' %}{{- raise_exception('System role not supported') }}{%- endif %}
{%- for m in messages %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{%- endif %}
{%- set role = 'model' if m.role == 'assistant' else m.role %}
{{- '<start_of_turn>' + role + '\\n' + m.content|trim + '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\\n' }}{%- endif %}"""
# Gemma 4. It has the system's words, `<|think|>` and the tools in one turn, answers of tools in the model's own turn,
# and, the newer ones, thoughts where they led to calls since the user's last message. OFF is what ends a prompt that is
# not to think: an empty block of thoughts for the large models, and nothing for the small ones. ANSWERS goes through
# what tools answered: newer templates take messages of tools, and the first ones `tool_responses` of the message that
# calls.
GEMMA4_PARTS = """
{%- macro spelled(value) %}
{%- if value is string %}{{- '<|"|>' + value + '<|"|>' }}
{%- elif value is boolean %}{{- 'true' if value else 'false' }}
{%- elif value is none %}{{- 'null' }}
{%- elif value is mapping %}{{- '{' + pairs(value) + '}' }}
{%- elif value is sequence %}{{- '[' }}{%- for each in value %}{{- spelled(each) + ('' if loop.last else ',') }}
{%- endfor %}{{- ']' }}
{%- else %}{{- value }}{%- endif %}
{%- endmacro %}
{%- macro pairs(value) %}{%- for key, each in value|dictsort %}
{{- key + ':' + spelled(each) + ('' if loop.last else ',') }}{%- endfor %}{%- endmacro %}
{%- macro answered(name, value) %}
{{- '<|tool_response>response:' + name + '{' }}
{{- pairs(value) if value is mapping else 'value:' + spelled(value) }}{{- '}<tool_response|>' }}
{%- endmacro %}
{%- macro without_thoughts(text) %}
{%- for part in text.split('<channel|>') %}{{- part.split('<|channel>')[0] }}{%- endfor %}{%- endmacro %}
{{- bos_token }}
{%- set system = messages[0].content|trim if messages[0].role in ('system', 'developer') else '' %}
{%- set rest = messages[1:] if messages[0].role in ('system', 'developer') else messages %}
{%- set on = enable_thinking is defined and enable_thinking %}
{%- if on or system or tools %}{{- '<|turn>system\\n' + ('<|think|>\\n' if on else '') + system }}
{%- for tool in tools or [] %}
{{- '<|tool>declaration:' + tool.function.name + '{description:' + spelled(tool.function.description) }}
{{- ',parameters:' + spelled(tool.function.parameters) + '}<tool|>' }}{%- endfor %}
{{- '<turn|>\\n' }}{%- endif %}
{%- set ns = namespace(user=-1, last='tool', before='') %}
{%- for m in rest %}{%- if m.role == 'user' %}{%- set ns.user = loop.index0 %}{%- endif %}{%- endfor %}
{%- for m in rest %}SKIP
{%- if not (NEWER and m.role == 'assistant' and ns.before == 'assistant') %}
{{- '<|turn>' + ('model' if m.role == 'assistant' else m.role) + '\\n' }}{%- endif %}
{%- if NEWER and m.reasoning_content and m.tool_calls and loop.index0 > ns.user %}
{{- '<|channel>thought\\n' + m.reasoning_content + '\\n<channel|>' }}{%- endif %}
{%- for call in m.tool_calls or [] %}
{{- '<|tool_call>call:' + call.function.name + '{' + pairs(call.function.arguments) + '}<tool_call|>' }}{%- endfor %}
{%- set ns.last = 'call' if m.tool_calls else '' %}ANSWERS
{%- set text = (without_thoughts(m.content) if m.role == 'assistant' else m.content)|trim %}{{- text }}
{%- if ns.last == 'call' %}{{- '<|tool_response>' }}
{%- elif not (ns.last == 'answer' and not text) %}{{- '<turn|>\\n' }}{%- endif %}
{%- set ns.before = m.role %}END
{%- endfor %}
{%- if add_generation_prompt and not ns.last %}{{- '<|turn>model\\n' }}OFF{%- endif %}"""


def gemma4(large=True, takes_tools=True):
    """Returns the template of a large model or of a small one, and of the newer ones or of the first."""
    messages = """
{%- for answer in rest[loop.index:] if m.tool_calls and ns.last != 'over' %}
{%- if answer.role != 'tool' %}{%- set ns.last = 'over' %}{%- else %}
{%- set of = namespace(name='unknown') %}
{%- for call in m.tool_calls if call.id == answer.tool_call_id %}{%- set of.name = call.function.name %}{%- endfor %}
{{- answered(of.name, answer.content) }}{%- set ns.any = true %}{%- endif %}{%- endfor %}
{%- if ns.any %}{%- set ns.last = 'answer' %}{%- elif ns.last == 'over' %}{%- set ns.last = 'call' %}{%- endif %}
{%- set ns.any = false %}"""
    attached = """
{%- for answer in m.tool_responses or [] %}{{- answered(answer.name, answer.response) }}{%- set ns.last = 'answer' %}
{%- endfor %}"""
    off = "{%- if not on %}{{- '<|channel>thought\\n<channel|>' }}{%- endif %}" if large else ""
    source = GEMMA4_PARTS.replace("OFF", off).replace("ANSWERS", messages if takes_tools else attached)
    source = source.replace("NEWER", str(takes_tools).lower())
    skip, end = ("{%- if m.role != 'tool' %}", "{%- endif %}") if takes_tools else ("", "")
    return source.replace("SKIP", skip).replace("END", end)


# Mistral: calls have ids of nine letters, and the system's words come before the last user's.
MISTRAL = """
{%- set said = messages[0].content if messages[0].role == 'system' else '' %}
{%- set rest = messages[1:] if messages[0].role == 'system' else messages %}
{%- set ns = namespace(n=0) %}
{%- for m in rest %}{%- if m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) %}
{%- if (m.role == 'user') != (ns.n % 2 == 0) %}{{- raise_exception('roles must alternate') }}{%- endif %}
{%- set ns.n = ns.n + 1 %}{%- endif %}{%- endfor %}
{%- for m in rest %}
{%- if m.role == 'user' %}
{{- '[INST]' + (said + '\\n\\n' if loop.last and said else '') + m.content + '[/INST]' }}
{%- elif m.role == 'tool' %}
{%- if m.tool_call_id|length != 9 %}{{- raise_exception('Tool call IDs should have length 9!') }}{%- endif %}
{{- '[TOOL_RESULTS]' + m.content + '[/TOOL_RESULTS]' }}
{%- elif m.tool_calls %}{{- '[TOOL_CALLS]' + m.tool_calls[0].function.name }}
{%- else %}{{- ' ' + m.content|trim + '</s>' }}{%- endif %}
{%- endfor %}"""
# Phi-3.5: a role that it does not know is left out without a word.
SILENT = """
{%- for m in messages %}{%- if m.role in ('system', 'user', 'assistant') %}
{{- '<|' + m.role + '|>\\n' + m.content + '<|end|>\\n' }}{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>\\n' }}{%- endif %}"""
# Hermes: it goes through the tools, also where there are none.
TOOLS = "{%- for tool in tools %}{{- tool.function.name }}{%- endfor %}" + CHATML
PUBLISHED = {
    "chatml": CHATML,
    "qwen": QWEN,
    "gemma": GEMMA,
    "gemma 4": gemma4(),
    "gemma 4 at first": gemma4(takes_tools=False),
    "mistral": MISTRAL,
    "silent": SILENT,
    "tools": TOOLS,
}

CALL = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": {"at": "sea"}}}
