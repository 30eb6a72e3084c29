"""What the tests here have in common: the model, its chat template, keys, and the question that most of them ask."""

MODEL = "SmolLM2-tools"
KEYS = ["first-key", "second-key"]
TEMPLATE = """\
{%- for message in messages %}
{%- if loop.first and tools %}<|im_start|>system
Functions: {% for tool in tools %}{{ tool | tojson }} {% endfor %}
Call one as <tool_call>{"name": NAME, "arguments": {}}</tool_call>. Thoughts go in <think></think>.<|im_end|>
{% endif %}<|im_start|>{{ message.role }}
{{ message.content }}
{%- for call in message.tool_calls or [] %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if thinking is defined %}<think>
{% endif %}{% endif %}"""
GREEDY = {"model": MODEL, "temperature": 0, "max_tokens": 24}
CAPITAL = [{"role": "user", "content": "What is the capital of France?"}]
