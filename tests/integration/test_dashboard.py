"""/dashboard: its files, its state, and the page in a real browser."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urljoin

import httpx
import pytest
from ray import serve

from cluster.config import EngineConfig
from cluster.serve.app import make_app
from tests.browser import Page, chromium, find_chromium
from tests.integration.http_server import CONFIG, MODEL, Server, running_server, until

KEY = "a-key-of-this-test"
AUTHORIZED = {"Authorization": f"Bearer {KEY}"}


@pytest.fixture(scope="module")
def server(private_ray: None) -> Iterator[Server]:
    with running_server(device="fake", api_key=[KEY]) as running:
        yield running


@pytest.fixture(scope="module")
def prefixed(server: Server) -> Server:
    """Another application of the same Serve, behind a `route_prefix`."""
    config = EngineConfig.parse(CONFIG | {"device": "fake", "api_key": [KEY], "spare_ranks": False})
    serve.run(make_app(config), name="prefixed", route_prefix="/llm")
    behind = Server(f"{server.url}/llm", serve.get_deployment_handle("engine", "prefixed"))
    until(lambda: behind.get("/ready").status_code == 200, 120)
    return behind


@pytest.fixture(params=["server", "prefixed"])
def site(request: pytest.FixtureRequest) -> Server:
    return request.getfixturevalue(request.param)


def state(server: Server) -> dict:
    answer = httpx.get(f"{server.url}/dashboard/state", headers=AUTHORIZED, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()


def complete(server: Server, prompt: str) -> None:
    body = {"prompt": prompt, "max_tokens": 20, "ignore_eos": True}
    answer = server.post("/v1/completions", body, headers=AUTHORIZED)
    assert answer.status_code == 200, answer.text


def test_files_need_no_key_and_load_nothing_from_elsewhere(site: Server) -> None:
    page = site.get("/dashboard")
    assert page.status_code == 200 and page.headers["content-type"].startswith("text/html")
    assert "default-src 'self'" in page.headers["content-security-policy"]
    files = Path("cluster/serve/dashboard/static")
    for path in files.iterdir():
        answer = site.get(f"/dashboard/{path.name}")
        assert answer.content == path.read_bytes()
        assert "://" not in answer.text.replace("http://www.w3.org/2000/svg", ""), path
    assert site.get("/dashboard/app.js").headers["content-type"].startswith("text/javascript")


@pytest.mark.parametrize("name", ["nothing.js", "..%2f__init__.py", "page.py"])
def test_no_other_file_is_served(server: Server, name: str) -> None:
    answer = httpx.get(f"{server.url}/dashboard/{name}", headers=AUTHORIZED, timeout=60)
    assert answer.status_code == 404 and answer.json()["error"]["type"] == "not_found_error"


def test_the_state_needs_a_key(site: Server) -> None:
    assert site.get("/dashboard/state").status_code == 401


def test_what_is_open_is_open_and_nothing_else(site: Server) -> None:
    for path in ("/health", "/ready", "/version", "/metrics", "/dashboard"):
        assert site.get(path).status_code == 200, path
    for path in ("/v1/models", "/health/..%2fv1/models", "/llm/llm/health", "/health/v1/models", "/openapi.json"):
        assert site.get(path).status_code == 401, path


def test_what_the_page_asks_for_is_where_it_asks(site: Server) -> None:
    """As a browser would: the page's links and calls, seen from its address."""
    page, files = f"{site.url}/dashboard", Path("cluster/serve/dashboard/static")
    links = re.findall(r'(?:href|src)="([^"]+)"', httpx.get(page).text)
    modules = re.findall(r'^import .* from "([^"]+)"', (files / "app.js").read_text(), re.M)
    assert len(links) == 3 and len(modules) == 6
    for address in [urljoin(page, link) for link in links] + [urljoin(f"{page}/app.js", module) for module in modules]:
        assert httpx.get(address).status_code == 200, address
    calls = re.findall(r'fetch\("([^"]+)"', "".join(path.read_text() for path in files.glob("*.js")))
    assert sorted(calls) == ["dashboard/state", "v1/chat/completions"]
    assert httpx.get(urljoin(page, "dashboard/state"), headers=AUTHORIZED, timeout=60).status_code == 200
    body = {"messages": [{"role": "user", "content": "Why?"}], "max_tokens": 4}
    answer = httpx.post(urljoin(page, "v1/chat/completions"), json=body, headers=AUTHORIZED, timeout=60)
    assert answer.status_code == 200, answer.text


def test_the_state_shows_load_memory_ranks_and_tree(server: Server) -> None:
    prompt = "one two three four five six seven eight nine ten " * 8
    for end in ("to the left", "to the right", "and back"):
        complete(server, prompt + end)
    until(lambda: not state(server)["silent"], 60)
    now = state(server)
    assert now["model"] == MODEL
    assert now["ingresses"][0]["first_token"]["counts"] and now["ingresses"][0]["open_streams"] == 0
    (replica,) = now["replicas"]
    assert replica["problem"] is None and replica["settings"]["device"] == "fake"
    assert [set(rank) for rank in replica["ranks"]] == [{"node_ip", "pid", "gpu_ids"}]
    metrics = replica["metrics"]
    assert metrics["generation_tokens"] >= 60 and metrics["total_pages"] == 512
    page_size = replica["settings"]["page_size"]
    tokens = sum(node[1] for node in replica["tree"])
    assert tokens == metrics["cached_pages"] * page_size  # a tree as small as this is shown whole
    shared = replica["tree"][0]
    assert shared[0] == -1 and shared[2] == 2 and shared[1] >= 64  # two of the three went on from it
    assert KEY not in str(now) and str(Path.home()) not in str(now)


@pytest.mark.skipif(find_chromium() is None, reason="no Chromium is installed")
@pytest.mark.parametrize(("width", "height"), [(1280, 800), (390, 844)])
async def test_in_a_browser(site: Server, tmp_path: Path, width: int, height: int) -> None:
    async with chromium() as page:
        await page.open(f"{site.url}/dashboard", width, height)
        await page.until("!document.getElementById('key-form').hidden", 60)
        await page.evaluate(f"document.getElementById('key').value = '{KEY}'")
        await page.evaluate("document.getElementById('key-form').requestSubmit()")
        await page.until("document.getElementById('status').dataset.state == 'good'", 60)
        assert await page.evaluate("document.getElementById('key-form').hidden")
        for question in ("Tell me a story about a fox.", "Go on."):
            await ask(page, question)
        answers = await page.evaluate("[...document.querySelectorAll('.cached b')].map((line) => line.textContent)")
        assert len(answers) == 2 and all(answer.endswith("prompt tokens cached") for answer in answers)
        assert not answers[1].startswith("0 of")
        await page.until("document.querySelectorAll('#tree-picture rect').length > 1", 60)
        await page.until("document.querySelectorAll('.plot svg').length == 3", 60)
        assert await page.evaluate("document.querySelector('.chip').textContent") == "rank 0 CPU"
        assert await page.evaluate("document.documentElement.scrollWidth") == width  # nothing sticks out
        if width > 1000:
            assert await page.evaluate("document.documentElement.scrollHeight") <= height  # all of it is seen at once
        unauthorized = [each for each in page.complaints if "401" not in each]  # the first state had no key
        assert unauthorized == []


TWO_THAT_REASON = """
const events = ["reasoning_content", "reasoning_content", "content"].map((part, number) =>
  "data: " + JSON.stringify({choices: [{delta: {[part]: part + number + " "}}]}) + "\\n\\n");
const fetched = window.fetch;
window.fetch = async (url, options) => {
  if (String(url).endsWith("completions")) {
    window.asked = JSON.parse(options.body).model;
    return new Response(events.join("") + "data: [DONE]\\n\\n");
  }
  const state = await (await fetched(url, options)).json();
  const [replica] = state.replicas, settings = {...replica.settings, served_model_name: "zwei"};
  state.replicas.push({...replica, name: "another", settings});
  return new Response(JSON.stringify(state));
};
"""


@pytest.mark.skipif(find_chromium() is None, reason="no Chromium is installed")
async def test_a_chat_with_one_of_two_models_that_reasons(server: Server) -> None:
    async with chromium() as page:
        await page.open(f"{server.url}/dashboard", 1280, 800)
        await page.until("!document.getElementById('key-form').hidden", 60)
        await page.evaluate(f"document.getElementById('key').value = '{KEY}'")
        await page.evaluate("document.getElementById('key-form').requestSubmit()")
        await page.until("document.getElementById('status').dataset.state == 'good'", 60)
        assert await page.evaluate("document.getElementById('chat-model').hidden")  # there is one model
        await page.evaluate(TWO_THAT_REASON)
        await page.until("!document.getElementById('chat-model').hidden", 60)
        assert await page.evaluate("document.getElementById('model').textContent") == f"{MODEL}, zwei"
        for model in (MODEL, "zwei"):
            await page.evaluate(f"document.getElementById('chat-model').value = '{model}'")
            await page.evaluate("document.getElementById('chat-model').dispatchEvent(new Event('change'))")
            await page.evaluate("document.getElementById('chat-text').value = 'Why?'")
            await page.evaluate("document.getElementById('chat-form').requestSubmit()")
            await page.until("document.querySelector('.message:not(.user) > span')?.textContent == 'content2 '", 60)
            thoughts = await page.evaluate("document.querySelector('.thoughts').textContent")
            assert thoughts == "reasoning_content0 reasoning_content1 "
            assert await page.evaluate("window.asked") == model


async def ask(page: Page, question: str) -> None:
    before = await page.evaluate("document.querySelectorAll('.cached').length")
    await page.evaluate(f"document.getElementById('chat-text').value = '{question}'")
    await page.evaluate("document.getElementById('chat-form').requestSubmit()")
    await page.until(f"document.querySelectorAll('.cached, .message.error').length > {before}", 60)
    assert await page.evaluate("document.querySelector('.message.error')?.textContent") is None
