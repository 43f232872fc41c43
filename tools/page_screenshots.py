"""Make docs/page.png and docs/page-phone.png: the server's page with runs that a script made up.

PYTHONPATH=src:tests python tools/page_screenshots.py
"""

import tempfile
from pathlib import Path

from playwright.sync_api import ViewportSize

from evaluation.browsing import View, chromium, viewing
from evaluation.runs import checkpoint
from evaluation.servers import Live, live

DOCS = Path(__file__).parent.parent / "docs"
PHONE = ViewportSize(width=390, height=844)
SCRIPT = """
import json, math, pathlib, random, sys, time
model, output, control = map(pathlib.Path, sys.argv[1:4])
tasks, step, weights = sys.argv[4:]
print("loading", model.name, flush=True)
if tasks == "mmlu":
    for done in range(64):
        print(f"\\rRequests:  {done}%|######    | {done}/100", end="", flush=True)
    while not (control / "go").exists():
        time.sleep(0.1)
random.seed(f"{model} {weights}")
numbers = {}
for ease, task in enumerate(tasks.split(",")):
    learnt = 1 - math.exp(-int(step) / (700 if weights == "model" else 500))
    value = 0.25 + 0.1 * ease + 0.4 * learnt + random.uniform(-0.02, 0.02)
    numbers[task] = {"acc,none": value, "acc_stderr,none": 0.018}
numbers["higher_is_better"] = {task: {"acc": True} for task in tasks.split(",")}
(output / "results.json").write_text(json.dumps(numbers))
"""


def fill(server: Live) -> None:
    """Evaluate two runs, and leave jobs that run and wait."""
    jobs = []
    for run in ("qwen3-4b-sft", "qwen3-4b-grpo"):
        for step in range(0, 1200, 200):
            place = checkpoint(server.root / run, step, ema=True)
            tasks = ("arc_easy", "hellaswag")
            jobs += [server.submit(place, *tasks, weights=one) for one in ("model", "ema")]
    for job in jobs:
        server.ended(job)
    for step in (1200, 1400, 1600, 1800, 2000):
        server.submit(checkpoint(server.root / "qwen3-4b-grpo", step), "mmlu")


def shoot(view: View, address: str, name: str) -> None:
    """Save what is seen of an address once its plots are drawn."""
    view.open(address)
    if "runs" in address:
        view.until("document.querySelectorAll('figure canvas').length === 2")
    else:
        view.until("document.querySelectorAll('.spark').length > 0")
    view.page.screenshot(path=DOCS / name)


def main() -> None:
    """Make the pictures."""
    with tempfile.TemporaryDirectory() as folder, chromium() as browser:
        directory = Path(folder)
        with live(directory, script=SCRIPT) as server:
            fill(server)
            runs = "/view/runs?run=qwen3-4b-sft&run=qwen3-4b-grpo"
            with viewing(browser, server) as view:
                shoot(view, runs, "page.png")
            with viewing(browser, server, size=PHONE, scheme="dark") as view:
                shoot(view, "/", "page-phone.png")
            server.go()


if __name__ == "__main__":
    main()
