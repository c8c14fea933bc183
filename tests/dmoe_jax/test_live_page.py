"""The page of `dmoe watch` in a real browser: speed, strangers, keys, screen readers, the slider of time.

With DMOE_SCREENSHOTS=1 in the environment the pictures of the documentation are written anew.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import optax
import pytest
import trio

from dmoe_jax import open_swarm, product_key, record_swarm
from dmoe_jax.live.events import State, about, changes, line_of
from dmoe_jax.live.feeds import Feed, LiveFeed, Timeline
from dmoe_jax.live.run_feed import open_folder
from dmoe_jax.live.server import MAX_VIEWERS, serve_page
from dmoe_jax.models.mlp import MLP, Batch, MLPConfig
from dmoe_net import HostDown, LogNormal, SimNetwork, simulate
from dmoe_net.identity import Address
from tests.dmoe_jax.crowd import Crowd

sync_api = pytest.importorskip("playwright.sync_api", reason="there is no Playwright: pip install 'dmoe_jax[browser]'")

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium on this machine to look at the page with"),
]

ROOT = Path(__file__).parents[2]
PICTURES = ROOT / "docs" / "_static"
T = TypeVar("T")


@asynccontextmanager
async def served(feed: Feed) -> AsyncIterator[str]:
    async with serve_page(Address("127.0.0.1", 0), feed) as address:
        yield f"http://{address}/"


async def look(url: str, drive: Callable[[Any], T], **context: Any) -> T:
    """Let a function drive a page in a browser, in a thread; fails if the page's console has an error."""

    def in_thread() -> T:
        with sync_api.sync_playwright() as started:
            arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
            browser = started.chromium.launch(executable_path=CHROMIUM, args=arguments)
            try:
                page = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **context}).new_page()
                mistakes: list[str] = []
                page.on("pageerror", lambda error: mistakes.append(str(error)))
                page.on("console", lambda line: mistakes.append(line.text) if line.type == "error" else None)
                page.on("dialog", lambda dialog: (mistakes.append("a dialog"), dialog.dismiss()))
                page.goto(url)
                found = drive(page)
                assert mistakes == []
                return found
            finally:
                browser.close()

    return await trio.to_thread.run_sync(in_thread)


def until(page: Any, expression: str) -> None:
    """Wait until an expression is true in the page. Playwright's own way is against the page's policy."""
    for _ in range(200):
        if page.evaluate(expression):
            return
        page.wait_for_timeout(50)
    raise AssertionError(f"{expression} was never true")


def picture(page: Any, name: str) -> None:
    """Write a picture for the documentation, if it is asked for."""
    if os.environ.get("DMOE_SCREENSHOTS"):
        PICTURES.mkdir(exist_ok=True)
        page.screenshot(path=PICTURES / f"{name}.png")


@contextmanager
def crowd_served() -> Iterator[str]:
    """A process of its own that serves the page of a thousand peers which move 50 times a second."""
    command = [sys.executable, "-m", "tests.dmoe_jax.crowd"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().strip()
        finally:
            process.terminate()


async def test_a_thousand_peers_move_without_a_stutter() -> None:
    """At least 30 updates a second of a thousand peers are applied and drawn, measured in the page."""

    def drive(page: Any) -> dict[str, float]:
        until(page, "dmoeCounts.frames > 60")
        measured = page.evaluate(
            """() => new Promise((done) => {
                const before = { ...dmoeCounts, at: performance.now() };
                let [longest, last, ticks] = [0, performance.now(), 0];
                const tick = (now) => {
                    [longest, last, ticks] = [Math.max(longest, now - last), now, ticks + 1];
                    const seconds = (performance.now() - before.at) / 1000;
                    if (seconds < 5) requestAnimationFrame(tick);
                    else done({
                        updates: (dmoeCounts.events - before.events) / seconds,
                        drawn: (dmoeCounts.frames - before.frames) / seconds,
                        ticks: ticks / seconds, longest,
                    });
                };
                requestAnimationFrame(tick);
            })"""
        )
        assert page.locator("#peers-table tbody tr").count() == 25
        assert page.get_by_text("1 of 40").is_visible()
        return measured

    with crowd_served() as url:
        measured = await look(url, drive)
    assert measured["updates"] >= 30, measured
    assert measured["drawn"] >= 30, measured
    assert measured["longest"] < 250, measured


EVIL = "<img src=x onerror=alert(1)><script>alert(2)</script>"


async def test_nothing_that_a_stranger_says_is_markup() -> None:
    """Wherever it stands it is shown as it was said; no object of the page is reached by a name."""
    peer = {"role": "node", "name": EVIL, "state": EVIL, "address": EVIL, "facts": {EVIL: EVIL, "loss": EVIL}}
    peer["experts"] = {EVIL: [1, 2], "layer0.0": ["x", {}], "__proto__": [1, 1]}
    state = {"peers": {EVIL: peer, "b": {"role": "trainer", "name": "b", "facts": [1]}, "c": 7, "d": None}}
    state |= {"groups": {EVIL: {EVIL: EVIL, "target": EVIL}}, "news": [[EVIL, EVIL], 3], "totals": {"loss": EVIL}}
    feed = LiveFeed(EVIL)
    del state["peers"]["d"]
    feed.publish(0.0, state)
    feed.publish(1.0, json.loads(json.dumps(state)) | {"constructor": {"prototype": {"polluted": 1}}, "more": {"x": 1}})

    def drive(page: Any) -> None:
        until(page, "dmoeCounts.frames > 0")
        page.get_by_role("listbox").focus()
        page.wait_for_timeout(1200)  # tables, too
        assert page.locator("img, iframe, object, script:not([src='page.js'])").count() == 0
        assert EVIL in page.title()
        assert page.get_by_role("heading", level=1).inner_text() == EVIL
        for place in ("#peers-table", "#chosen", "#groups", "#news", "#option"):
            assert EVIL in page.locator(place).text_content(), place
        assert page.evaluate("({}).polluted === undefined && ({}).x === undefined")

    async with served(feed) as url:
        await look(url, drive)


async def test_who_comes_late_sees_the_past() -> None:
    """The curves begin with the first state that there was."""
    crowd, feed = Crowd(960, 40), LiveFeed("swarm 'thousand'")
    for step in range(240):
        totals = {"totals": crowd.totals(2 * step + 1)} if step < 239 else {}
        feed.publish(2.0 * step, totals or crowd.state(2 * step + 1))

    def drive(page: Any) -> None:
        until(page, "dmoeCounts.frames > 0")
        page.get_by_role("listbox").focus()
        for _ in range(70):
            page.keyboard.press("ArrowRight")
        page.mouse.click(640, 20)
        page.wait_for_timeout(1200)
        picture(page, "watch_live")
        loss = page.locator("#figures canvas").nth(3)
        coloured = """(canvas) => {
            const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width / 4, canvas.height);
            return data.some((part, index) => index % 4 === 3 && part > 200);
        }"""
        assert loss.evaluate(coloured)

    async with served(feed) as url:
        await look(url, drive)


async def small_crowd(steps: int = 1) -> LiveFeed:
    crowd, feed = Crowd(30, 2), LiveFeed("swarm 'small'")
    for step in range(steps):
        feed.publish(float(step), crowd.state(step + 1))
    return feed


async def test_the_page_is_used_by_keys_alone() -> None:
    """Tab comes to every control, and it shows; arrows, Home and End move over peers, with names; pages are turned."""

    def focus(page: Any) -> tuple[str, str]:
        return tuple(
            page.evaluate("[document.activeElement.id, getComputedStyle(document.activeElement).outlineStyle]")
        )

    def option(page: Any) -> str:
        chosen = "document.getElementById(document.getElementById('map').getAttribute('aria-activedescendant'))"
        return str(page.evaluate(f"{chosen}.textContent + ' ' + {chosen}.getAttribute('aria-posinset')"))

    def drive(page: Any) -> None:
        page.get_by_text("1 of 2").wait_for()
        reached = []
        for _ in range(5):
            page.keyboard.press("Tab")
            name, outline = focus(page)
            assert outline != "none", name
            reached.append(name)
        assert reached[1] == "map"
        assert reached[-2] == "page-next"  # "Previous" is disabled on the first page
        page.get_by_role("listbox").focus()
        assert option(page) == "node 00000000, serving, 4 experts 1"
        page.keyboard.press("ArrowRight")
        assert option(page) == "node 00000fd1, serving, 4 experts 2"
        assert page.locator("#chosen-heading").inner_text() == "00000fd1"
        page.keyboard.press("End")
        assert option(page) == "trainer a0000007, training 32"
        page.keyboard.press("ArrowUp")
        assert option(page).startswith("node")
        page.keyboard.press("Home")
        page.keyboard.press("ArrowLeft")
        assert option(page).endswith(" 1")
        page.locator("#page-next").focus()
        page.keyboard.press("Enter")
        page.get_by_text("2 of 2").wait_for()
        assert page.locator("#peers-table tbody tr").count() == 7
        assert page.locator("#page-next").is_disabled()

    async with served(await small_crowd()) as url:
        await look(url, drive)


async def test_a_screen_reader_finds_names_for_everything() -> None:
    """Headings, figures with their names, the map as a list of peers, tables with heads; one polite voice, seldom."""

    def drive(page: Any) -> str:
        page.get_by_text("1 of 2").wait_for()
        page.get_by_role("listbox").focus()
        assert page.locator("[aria-live]").count() == 1
        assert page.get_by_role("status").first.text_content().startswith("Peers: 32, Experts: 120, Step: 1")
        assert page.locator("canvas:not([aria-hidden=true], [aria-hidden=true] *)").count() == 0
        return str(page.locator("body").aria_snapshot())

    async with served(await small_crowd()) as url:
        tree = await look(url, drive)
    for line in (
        "heading \"swarm 'small'\" [level=1]",
        'heading "Figures of the whole swarm" [level=2]',
        "term: Training loss",
        'listbox "Peers and the load of their experts"',
        'option "node 00000000, serving, 4 experts" [selected]',
        'columnheader "entropy"',
        'rowheader "layer0"',
        'table "Peers 1 to 25"',
        'button "Next"',
        "progressbar",
    ):
        assert line in tree, f"{line}\n{tree}"


def recorded(num_states: int = 200) -> Timeline:
    """A timeline in which peers come, a node dies, and the step is the number of the state."""
    timeline = Timeline(about("a simulated swarm", "recorded", load="updates"))
    before: State = {}
    lines = []
    for step in range(num_states):
        state = Crowd(5 + step // 20, 2).state(step)
        if step > 100:
            state["peers"]["00000fd1/node"]["state"] = "no answer"
        lines.append(line_of("changes", 2.0 * step, state=changes(before, state)))
        before = state
    timeline.add(lines, is_over=True)
    return timeline


SIMULATED = MLPConfig(input_dim=8, num_classes=2, d_model=16, num_layers=2, grid_size=(4, 4), k_best=2)


async def simulated(folder: Path) -> None:
    """Eight simulated nodes, two of which die, and eight trainers; recorded."""

    def batches(seed: int) -> Iterator[Batch]:
        rng = np.random.default_rng(seed)
        while True:
            x = rng.normal(size=(16, SIMULATED.input_dim)).astype(np.float32)
            yield Batch(x, (x[:, 0] > x[:, 1]).astype(np.int32))

    async def node(network: SimNetwork, index: int, join: str) -> None:
        async with open_swarm(join, network=network, host=f"node{index}", seed=index) as swarm:
            uids = [f"layer{layer}.{index // 2}.[{index % 2 * 2}:{index % 2 * 2 + 2}]" for layer in range(2)]
            await swarm.serve(dict.fromkeys(uids, SIMULATED.expert()), optimizer=optax.adam(3e-3))
            await trio.sleep_forever()

    deaths = [(25.0, HostDown("node2")), (35.0, HostDown("node5"))]
    async with (
        simulate(seed=1, latency=LogNormal(median_s=0.08, sigma=0.5), schedule=deaths) as network,
        open_swarm(network=network, host="trainer", seed=7) as swarm,
    ):
        facts: dict[str, Any] = {"step": 0}
        async with swarm.announced("trainer", lambda: facts), record_swarm(swarm, folder, period_s=1.0):
            for index in range(8):
                network.start(f"node{index}", node, network, index, swarm.contact)
                await trio.sleep(1)
            trainers = swarm.trainer(
                MLP.on(swarm, SIMULATED, product_key(SIMULATED.grid_size)),
                optax.adam(5e-3),
                [batches(seed) for seed in range(8)],
            )
            losses: list[float] = []
            for _ in range(45):
                await trainers.run(4, on_step=lambda record: losses.append(record.loss))
                facts |= {"step": trainers.step, "loss": float(np.mean(losses[-16:]))}
                facts |= {"failed_calls": swarm.statistics.failed}


@pytest.mark.timeout(400)
async def test_a_simulation_is_recorded_and_shown(tmp_path: Path) -> None:
    """Its load, its loss and its deaths, in virtual time."""
    record = "import sys; from pathlib import Path; from dmoe_net import run; from functools import partial;"
    record += "from tests.dmoe_jax.test_live_page import simulated; run(partial(simulated, Path(sys.argv[1])), seed=1)"
    command = [sys.executable, "-c", record, str(tmp_path / "simulated")]
    await trio.run_process(command, cwd=ROOT)
    feed = open_folder(tmp_path / "simulated")

    def drive(page: Any) -> None:
        until(page, "document.getElementById('slider').max > 25")
        page.wait_for_timeout(1200)
        assert page.get_by_text("left").first.is_visible()
        slider = page.get_by_role("slider", name="Time")
        slider.focus()
        for _ in range(14):
            page.keyboard.press("ArrowLeft")
        page.wait_for_timeout(1200)
        picture(page, "watch_simulated")
        assert page.locator("#layers tbody tr").count() == 2

    async with served(feed.timeline) as url:
        await look(url, drive)


async def test_the_slider_moves_time_and_back() -> None:
    """To each state of a recording, also far back and through times in which peers came; Play plays."""

    def drive(page: Any) -> None:
        slider = page.get_by_role("slider", name="Time")
        until(page, "document.getElementById('slider').max === '199'")
        step = page.locator("#figures dd").nth(4)  # behind peers and experts, each with a curve
        for key, count, value in (("Home", 1, 0), ("ArrowRight", 3, 3), ("End", 1, 199), ("ArrowLeft", 70, 129)):
            slider.focus()
            for _ in range(count):
                page.keyboard.press(key)
            page.wait_for_timeout(400)
            assert step.inner_text() == str(value)
            assert slider.get_attribute("aria-valuetext").endswith(f"step {value}")
            assert f"{7 + value // 20}" == page.locator("#figures dd").first.inner_text()
        page.get_by_role("listbox").focus()
        page.keyboard.press("Home")
        page.keyboard.press("ArrowRight")
        page.get_by_text("no answer").first.wait_for()
        page.get_by_role("button", name="Play").click()
        until(page, "Number(document.getElementById('slider').value) > 135")
        page.get_by_role("button", name="Pause").click()
        stopped = page.evaluate("document.getElementById('slider').value")
        page.wait_for_timeout(300)
        assert page.evaluate("document.getElementById('slider').value") == stopped

    async with served(recorded()) as url:
        await look(url, drive)


async def test_a_run_folder_is_shown(tmp_path: Path) -> None:
    """With its nodes, the samples of its experts and its end, under its name."""
    lines: list[dict[str, Any]] = [{"kind": "task", "unit": "tokens"}]
    for step in range(1, 51):
        lines.append({"kind": "train", "time_s": step, "step": step, "trainer": step % 2, "loss": 5.0, "items": 64})
        load = {f"layer0.{index}": step * (index + 1) for index in range(4)}
        peer = {uid: f"127.0.0.1:{4000 + index // 2}" for index, uid in enumerate(load)}
        lines.append({"kind": "experts", "time_s": step, "step": step, "load": load, "peer": peer})
    lines.append({"kind": "event", "name": "node_killed", "time_s": 50, "step": 50, "peer": "127.0.0.1:4001"})
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in [*lines, {"kind": "headline"}]))

    def drive(page: Any) -> None:
        page.get_by_text("tokens per s").wait_for()
        assert page.get_by_role("heading", level=1).inner_text() == str(tmp_path)
        assert page.get_by_text("64", exact=True).first.is_visible()
        assert page.locator("#layers caption").inner_text() == "Load of experts, in samples per second"
        assert page.locator("#layers tbody tr").inner_text().split()[:3] == ["layer0", "4", "4"]
        assert "killed" in page.locator("#peers-table").inner_text()
        assert page.locator("#news li").inner_text().endswith("node killed")

    feed = open_folder(tmp_path)
    async with served(feed.timeline) as url:
        await look(url, drive)


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_colours_and_motion_are_those_that_the_user_prefers(scheme: str) -> None:
    """Dark paper in the dark, text that can be read on it, and no moving ring where motion is not wanted."""

    def drive(page: Any) -> tuple[list[int], list[int], str]:
        until(page, "dmoeCounts.frames > 0")
        style = "(name) => getComputedStyle(document.body)[name].match(/[0-9]+/g).map(Number)"
        paper, ink = (page.evaluate(style, name) for name in ("backgroundColor", "color"))
        return paper, ink, page.evaluate("getComputedStyle(document.getElementById('ring')).transitionDuration")

    async with served(await small_crowd()) as url:
        paper, ink, moves = await look(url, drive, color_scheme=scheme, reduced_motion="reduce")
    assert (sum(paper) < 120) == (scheme == "dark")
    assert contrast(paper, ink) >= 7  # WCAG 2.2, enhanced
    assert moves in ("0s", "1e-06s")


def contrast(one: list[int], other: list[int]) -> float:
    """Contrast of two colours, WCAG 2.2: (lighter + 0.05) / (darker + 0.05) of their relative luminances."""

    def luminance(colour: list[int]) -> float:
        parts = [part / 255 for part in colour[:3]]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


async def test_a_browser_too_many_is_told() -> None:
    """And is no blank page."""
    feed = LiveFeed("x")
    async with served(feed) as url, AsyncExitStack() as stack:
        address = Address.parse(url.removeprefix("http://").rstrip("/"))
        for _ in range(MAX_VIEWERS):
            stream = await stack.enter_async_context(await trio.open_tcp_stream(address.host, address.port))
            await stream.send_all(f"GET /events HTTP/1.1\r\nHost: {address}\r\n\r\n".encode())
            await stream.receive_some()

        def drive(page: Any) -> None:
            page.get_by_text("not connected: reload to try again").wait_for()

        with pytest.raises(AssertionError, match="503"):  # which the console says, too
            await look(url, drive)
