"""Takes the screenshots of docs/images: python -m tests.integration.dashboard_pictures docs/images cpu

A server with the default model, at rest and under the load of `raydix bench serve`, seen on a screen and on a phone.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import ray

from tests.browser import Page, chromium
from tests.integration.http_server import Server, running_server

SCREEN, PHONE = (1280, 800), (390, 844)
SECONDS = 60  # of load before the pictures
QUESTIONS = ("What is the capital of France?", "And of Italy?")


def load(server: Server) -> subprocess.Popen[bytes]:
    """Four users, whose prompts begin in one of four ways."""
    options = ["--workload", "shared-prefix", "--prefix-len", "160", "--prefix-groups", "4", "--concurrency", "4"]
    options += ["--prompt-len", "uniform:20:80", "--output-len", "uniform:30:60", "--requests", "10000"]
    program = "import sys; from cluster.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", program, "bench", "serve", "--url", server.url, *options]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL)


async def ask(page: Page, question: str) -> None:
    await page.evaluate(f"document.getElementById('chat-text').value = {question!r}")
    before = await page.evaluate("document.querySelectorAll('.cached').length")
    await page.evaluate("document.getElementById('chat-form').requestSubmit()")
    await page.until(f"document.querySelectorAll('.cached').length > {before}", 300)


async def main(directory: Path, device: str) -> None:
    ray.init(address="local", num_cpus=8, include_dashboard=False, object_store_memory=128 << 20, log_to_driver=False)
    with running_server(device=device, tp_size=1, max_seq_len=2048, num_pages=1024, integrity_interval=0) as server:
        url = f"{server.url}/dashboard"
        for name, dark, size in (("rest", False, SCREEN), ("rest-phone", False, PHONE)):
            async with chromium() as page:
                await page.open(url, *size, dark=dark)
                await page.until("document.getElementById('status').dataset.state == 'good'", 30)
                await asyncio.sleep(6)
                await page.screenshot(directory / f"dashboard-{name}.png")
        async with chromium() as screen, chromium() as phone:
            await screen.open(url, *SCREEN, dark=False)
            await phone.open(url, *PHONE, dark=True)
            for page in (screen, phone):
                await page.until("document.getElementById('status').dataset.state == 'good'", 30)
            for question in QUESTIONS:
                await ask(screen, question)
            await ask(phone, QUESTIONS[0])
            generator = load(server)
            await asyncio.sleep(SECONDS)
            await screen.screenshot(directory / "dashboard-load.png")
            await screen.evaluate("document.getElementById('theme').click()")
            await screen.screenshot(directory / "dashboard-load-dark.png")
            await phone.screenshot(directory / "dashboard-load-phone.png", whole=True)
            print(screen.complaints, phone.complaints)
        generator.terminate()
        generator.wait()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), *sys.argv[2:]))
