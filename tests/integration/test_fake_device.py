"""`--device fake`: real actors, transport and driver; no model."""

from __future__ import annotations

import pytest

from cluster import LLM, SamplingParams

SIZES = {
    "device": "fake",
    "max_running_requests": 8,
    "max_seq_len": 256,
    "max_step_tokens": 64,
    "integrity_interval": 1,
}
PROMPTS = ["The quick brown fox jumps. " * 8, "A lazy dog", "The quick brown fox jumps. " * 8]
SAMPLING = SamplingParams(temperature=0.0, max_tokens=24)


@pytest.mark.parametrize("settings", [{"tp_size": 2}, {"executor": "inproc"}], ids=["two ranks", "inproc"])
def test_same_readable_text_every_time(settings, request):
    if "tp_size" in settings:
        request.getfixturevalue("private_ray")
    with LLM(**SIZES, **settings) as llm:
        first, again = llm.generate(PROMPTS, SAMPLING), llm.generate(PROMPTS, SAMPLING)
        assert llm.config.device == "fake"
        assert llm.info.num_pages == 8 * 256 // 16
        assert llm.info.vocab_size == 49152
    assert [output.text for output in first] == [output.text for output in again]
    assert first[0].text == first[2].text != first[1].text
    for output in first:
        assert output.finish_reason == "length"
        assert len(output.token_ids) == 24
        assert output.text.isprintable()
        assert len(output.text) >= 24  # no token without text
    prompt = len(again[0].prompt_token_ids)
    assert again[0].cached_tokens == (prompt - 1) // 16 * 16 >= 16
