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
    "mistral": MISTRAL,
    "silent": SILENT,
    "tools": TOOLS,
}

CALL = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": {"at": "sea"}}}
