"""The web page in a real browser, against the real server: what a person does with it.

Needs Debian's chromium (or another, named by LLAMASRV_CHROMIUM) and the package playwright. Screenshots are put into
``test-output``.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from conftest import in_ci, unavailable
from http_harness import serve
from server_process import ServerProcess
from talk import slots

from llamasrv import binding
from llamasrv.http.config import HttpConfig
from llamasrv.http.routes import api_routes
from llamasrv.http.ui import load_bundle

if not in_ci():
    pytest.importorskip("playwright.sync_api", reason="the package playwright is not installed")

from playwright.sync_api import Browser, BrowserContext, ConsoleMessage, Locator, Page, expect, sync_playwright

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parent.parent
OUTPUT = ROOT / "test-output"
#: How long anything may take on a loaded machine, seconds.
PATIENCE = 90.0
DESKTOP = {"width": 1280, "height": 800}
PHONE = {"width": 390, "height": 844}
#: An answer that is still under way when the test has done what it does, whatever the model says.
ENDLESS = {"ignore_eos": True, "max_tokens": 3000}
#: An answer that is over soon.
SHORT = {"max_tokens": 24}
CAPITAL = "What is the capital of Japan?"
KEY = "a-secret-key"
PREFIX = "/llm/ui"
#: The page asks for tools, which are off; the browser prints that.
NO_TOOLS = ((403, "/tools"),)


@pytest.fixture(scope="module")
def bundle() -> None:
    if load_bundle() is None:
        unavailable("llamasrv is built without the web UI")


@pytest.fixture(scope="module")
def browser(bundle: None) -> Iterator[Browser]:
    path = os.environ.get("LLAMASRV_CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
    if path is None:
        unavailable("chromium is not on PATH")
    expect.set_options(timeout=PATIENCE * 1000)
    with sync_playwright() as playwright:
        # the sandbox refuses to work for root
        arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
        # containers have a small /dev/shm
        browser = playwright.chromium.launch(executable_path=path, args=[*arguments, "--disable-dev-shm-usage"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def smol(bundle: None, demo_model_path: Path) -> Iterator[ServerProcess]:
    with ServerProcess("-m", demo_model_path, "-c", 16384, "-np", 4, "-t", 1, "--temp", 0) as server:
        yield server


@pytest.fixture(scope="module")
def guarded(bundle: None, demo_model_path: Path) -> Iterator[ServerProcess]:
    """Below a prefix, with a key, and settings for the page."""
    flags = ["-m", demo_model_path, "-c", 2048, "-np", 1, "-t", 1, "--temp", 0, "--api-key", KEY]
    settings = {"showBuildVersion": True, "theme": "dark", "customJson": json.dumps(SHORT)}
    server = ServerProcess(*flags, "--api-prefix", PREFIX, "--ui-config", json.dumps(settings))
    # readiness is asked of /health, which is below the prefix here
    server.health_path = f"{PREFIX}/health"
    with server:
        yield server


class Visit:
    """One browser profile at the page, and a record of what it asked for and complained about."""

    def __init__(self, context: BrowserContext, port: int, path: str) -> None:
        self.context = context
        self.origin = f"http://127.0.0.1:{port}"
        self.path = path
        self.requested: list[str] = []
        self.complaints: list[tuple[int, str]] = []
        self.errors: list[str] = []
        context.set_default_timeout(PATIENCE * 1000)
        context.on("request", lambda request: self.requested.append(request.url))
        context.on("console", self._on_console)
        context.on("weberror", lambda error: self.errors.append(str(error.error)))
        self.page: Page = context.new_page()

    def _on_console(self, message: ConsoleMessage) -> None:
        if message.type != "error":
            return
        status = re.search(r"responded with a status of (\d+)", message.text)
        if status is None:
            self.errors.append(message.text)
        else:
            url = message.location["url"]
            self.complaints.append((int(status[1]), url.removeprefix(self.origin + self.path).partition("?")[0]))

    # -- the page's parts

    @property
    def input(self) -> Locator:
        return self.page.get_by_placeholder("Type a message...")

    @property
    def answers(self) -> Locator:
        return self.page.get_by_label("Assistant message with actions")

    @property
    def questions(self) -> Locator:
        return self.page.get_by_label("User message with actions")

    @property
    def stop_button(self) -> Locator:
        return self.page.locator("form").get_by_role("button", name="Stop", exact=True)

    # -- what a person does

    def open(self) -> None:
        self.page.goto(f"{self.origin}{self.path}/")

    def ask(self, question: str) -> None:
        expect(self.input).to_be_editable()
        self.input.fill(question)
        self.page.locator("form").get_by_role("button", name="Send", exact=True).click()
        expect(self.questions.last).to_contain_text(question)

    def wait_for_text(self, than: int = 0) -> int:
        """Wait until the last answer has more than so many letters; returns how many it has."""
        script = """([label, than]) => {
            const all = document.querySelectorAll(`[aria-label="${label}"] p`);
            const length = [...all].reduce((sum, p) => sum + p.textContent.length, 0);
            return length > than && length;
        }"""
        handle = self.page.wait_for_function(script, arg=["Assistant message with actions", than])
        length: int = handle.json_value()
        return length

    def wait_for_end(self) -> None:
        expect(self.stop_button).to_have_count(0)
        expect(self.answers.last.get_by_role("button", name="Regenerate")).to_be_visible()

    def shoot(self, name: str) -> None:
        OUTPUT.mkdir(exist_ok=True)
        self.page.screenshot(path=OUTPUT / f"ui-{name}.png", animations="disabled")

    def background(self) -> float:
        """Lightness of the page's background, 0 to 1."""
        script = """() => {
            const canvas = new OffscreenCanvas(1, 1).getContext('2d');
            canvas.fillStyle = getComputedStyle(document.body).backgroundColor;
            canvas.fillRect(0, 0, 1, 1);
            return Math.max(...canvas.getImageData(0, 0, 1, 1).data.slice(0, 3)) / 255;
        }"""
        lightness: float = self.page.evaluate(script)
        return lightness

    def is_too_wide(self) -> bool:
        return bool(self.page.evaluate("document.documentElement.scrollWidth > window.innerWidth"))


@contextmanager
def visit(
    browser: Browser,
    port: int,
    path: str = "",
    sends: dict[str, Any] | None = None,
    complaints: Sequence[tuple[int, str]] = NO_TOOLS,
    errors: str = "never",
    **options: Any,
) -> Iterator[Visit]:
    """A new profile. ``sends``: what is added to each request.

    ``complaints``: the failed requests it may have; ``errors``: a pattern of what else may stand in the console.
    """
    with browser.new_context(**{"viewport": DESKTOP, "locale": "en-US", **options}) as context:
        if sends:
            config = json.dumps({"customJson": json.dumps(sends)})
            # not for the empty page that comes first, which has no storage
            script = "if (location.protocol === 'http:' && !localStorage.getItem('LlamaUi.config')) "
            context.add_init_script(f"{script} localStorage.setItem('LlamaUi.config', {json.dumps(config)})")
        visited = Visit(context, port, path)
        try:
            yield visited
        except BaseException:
            visited.shoot("failed")
            raise
    assert set(visited.complaints) <= set(complaints)
    # one list and one call of a tool, per load of the page
    n_loads = sum(url == f"{visited.origin}{path}/" for url in visited.requested)
    assert visited.complaints.count((403, "/tools")) <= 2 * n_loads
    assert not [error for error in visited.errors if not re.match(errors, error)]
    assert visited.requested
    for url in visited.requested:
        own = url == f"{visited.origin}{path}" or url.startswith(f"{visited.origin}{path}/")
        assert own or url.startswith(("data:", f"blob:{visited.origin}")), url


def test_a_first_visit_installs_the_page_and_a_second_one_asks_only_for_news(
    browser: Browser, smol: ServerProcess
) -> None:
    with visit(browser, smol.port) as person:
        person.open()
        expect(person.page.get_by_text("Hello there")).to_be_visible()
        expect(person.input).to_be_editable()
        assert person.page.evaluate("crossOriginIsolated")
        # done when every file that the worker keeps was there
        person.page.evaluate("navigator.serviceWorker.ready.then(() => true)")
        person.page.wait_for_function("caches.keys().then((names) => names.some((name) => name.includes('precache')))")
        person.shoot("first-light")
        person.page.reload()
        expect(person.input).to_be_editable()
        assert person.page.evaluate("navigator.serviceWorker.controller !== null")


def test_a_question_is_answered_piece_by_piece_with_statistics(browser: Browser, smol: ServerProcess) -> None:
    with visit(browser, smol.port, sends=SHORT) as person:
        person.open()
        with person.page.expect_response("**/v1/chat/completions") as exchange:
            person.ask(CAPITAL)
        person.wait_for_end()
        answer = person.answers.last
        pieces = answer_pieces(exchange.value.text())
        assert len(pieces) > 3
        expect(answer).to_contain_text("".join(pieces).strip())
        expect(answer.get_by_text(re.compile(r"^\s*\d+ tokens$"))).to_be_visible()
        expect(answer.get_by_text(re.compile(r"^\s*[\d.]+ t/s$"))).to_be_visible()
        expect(answer.get_by_text("SmolLM2")).to_be_visible()
        expect(person.questions.last.get_by_text(re.compile(r"^\s*\d+ tokens$"))).to_be_visible()
        expect(person.page.get_by_label("Open conversations").get_by_text(CAPITAL)).to_be_visible()
        person.shoot("answer-light")
        # the page sends all this, and the template knows no tools
        request = exchange.value.request
        body = request.post_data_json
        assert body["stream"] and body["return_progress"] and body["timings_per_token"] and body["reasoning_control"]
        assert body["sse_ping_interval"] == 1
        assert body["tools"]
        assert request.headers["x-conversation-id"]


def answer_pieces(stream: str) -> list[str]:
    """The pieces of text in a stream of events, which must have come to its end."""
    frames = [line.removeprefix("data: ") for line in stream.splitlines() if line.startswith("data: ")]
    assert frames.pop() == "[DONE]"
    deltas = [choice["delta"] for frame in frames for choice in json.loads(frame)["choices"]]
    return [delta["content"] for delta in deltas if delta.get("content")]


def test_an_answer_can_be_stopped_and_made_again(browser: Browser, smol: ServerProcess) -> None:
    with visit(browser, smol.port, sends=ENDLESS) as person:
        person.open()
        person.ask("Tell me a story.")
        person.wait_for_text(than=20)
        person.shoot("streaming-light")
        person.stop_button.click()
        person.wait_for_end()
        wait_until_idle(person, smol)
        person.answers.last.get_by_role("button", name="Regenerate").click()
        expect(person.stop_button).to_be_visible()
        person.wait_for_text(than=20)
        person.stop_button.click()
        person.wait_for_end()
        expect(person.page.get_by_label("Message version 2 of 2")).to_be_visible()
        wait_until_idle(person, smol)


def wait_until_idle(person: Visit, server: ServerProcess) -> None:
    """Until the server works for nobody: the stop button has reached it."""
    for _ in range(int(PATIENCE * 10)):
        if not any(slot["is_processing"] for slot in slots(server)):
            return
        person.page.wait_for_timeout(100)
    raise AssertionError("the server still works after the stop button")


def test_a_question_can_be_edited_and_another_conversation_begun(browser: Browser, smol: ServerProcess) -> None:
    with visit(browser, smol.port, sends=SHORT) as person:
        person.open()
        person.ask("What is 2 + 2?")
        person.wait_for_end()
        person.questions.last.get_by_role("button", name="Edit").click()
        edited = person.page.get_by_placeholder("Edit your message...")
        edited.fill("What is the colour of the sky?")
        edited.press("Enter")
        expect(person.questions.last).to_contain_text("sky")
        person.wait_for_end()
        expect(person.page.get_by_label("Message version 2 of 2").first).to_be_visible()
        first = person.answers.last.get_by_role("paragraph").first.inner_text()
        assert first
        person.shoot("edited-light")

        person.page.get_by_role("button", name="New chat").first.click()
        expect(person.page.get_by_text("Hello there")).to_be_visible()
        person.ask(CAPITAL)
        person.wait_for_end()
        expect(person.questions).to_have_count(1)
        expect(person.answers.last).not_to_contain_text(first)
        person.shoot("second-light")
        person.page.get_by_label("Open conversations").get_by_role("link").first.click()
        expect(person.questions.last).to_contain_text("sky")
        expect(person.answers.last).to_contain_text(first)


def test_an_answer_goes_on_after_a_reload_in_its_middle(browser: Browser, smol: ServerProcess) -> None:
    with visit(browser, smol.port, sends=ENDLESS) as person:
        person.open()
        person.ask("Tell me a long story about a river.")
        person.wait_for_text(than=20)
        person.page.reload()
        seen = person.wait_for_text(than=20)
        # more than there was: it is still being written
        person.wait_for_text(than=seen + 20)
        expect(person.stop_button).to_be_visible()
        person.shoot("resumed-light")
        person.stop_button.click()
        person.wait_for_end()
        wait_until_idle(person, smol)
    assert any("/v1/stream?" in url for url in person.requested)


def test_below_a_prefix_the_page_asks_for_the_key_and_then_works(browser: Browser, guarded: ServerProcess) -> None:
    refused = [(401, "/props"), (401, "/tools"), (401, "/v1/models"), (401, "/v1/streams/lookup"), *NO_TOOLS]
    with visit(browser, guarded.port, PREFIX, complaints=refused, errors=".*ApiError: Invalid API Key") as person:
        # without the last slash, too
        person.page.goto(f"{person.origin}{PREFIX}")
        assert person.page.url.startswith(f"{person.origin}{PREFIX}/")
        expect(person.page.get_by_text("Access denied")).to_be_visible()
        person.shoot("key")
        person.page.get_by_role("button", name="Enter API Key").click()
        field = person.page.get_by_placeholder("Enter your API key...")
        field.fill("wrong")
        person.page.get_by_role("button", name="Save & Retry").click()
        expect(person.page.get_by_text(re.compile("Invalid API key", re.IGNORECASE)).first).to_be_visible()
        field.fill(KEY)
        person.page.get_by_role("button", name="Save & Retry").click()
        expect(person.input).to_be_editable()
        # settings of --ui-config
        expect(person.page.locator("html.dark")).to_have_count(1)
        expect(person.page.get_by_text(re.compile("b?11549")).first).to_be_visible()
        person.ask(CAPITAL)
        person.wait_for_end()
        assert person.wait_for_text() > 5
        person.shoot("prefix-dark")


def test_while_the_model_loads_the_page_says_so_and_goes_on_by_itself(browser: Browser, bundle: None) -> None:
    waiting = [(503, path) for path in ("/props", "/tools", "/v1/models", "/v1/streams/lookup")]
    with ExitStack() as stack:
        served = stack.enter_context(serve(HttpConfig(port=0), api_routes, is_ready=False))
        with binding.Params() as params:
            served.context.params = {**params.to_dict(), "n_parallel": 1}
        person = stack.enter_context(visit(browser, served.port, complaints=[*waiting, *NO_TOOLS], errors=".*Loading"))
        person.open()
        expect(person.page.get_by_text(re.compile("loading", re.IGNORECASE)).first).to_be_visible()
        person.shoot("loading")
        served.state.is_ready = True
        expect(person.input).to_be_editable()
        expect(person.page.get_by_text("Loading model")).to_have_count(0)


@pytest.mark.parametrize(("device", "scheme"), [("phone", "light"), ("phone", "dark"), ("desktop", "dark")])
def test_the_page_fits_the_screen_in_both_colours(
    browser: Browser, smol: ServerProcess, device: str, scheme: str
) -> None:
    phone = {"viewport": PHONE, "is_mobile": True, "has_touch": True, "device_scale_factor": 2}
    options = phone if device == "phone" else {}
    with visit(browser, smol.port, sends=SHORT, color_scheme=scheme, **options) as person:
        person.open()
        expect(person.input).to_be_editable()
        assert not person.is_too_wide()
        person.ask("Write one line of Python that prints a very_long_identifier_" + "x" * 60)
        person.wait_for_end()
        lightness = person.background()
        assert lightness < 0.3 if scheme == "dark" else lightness > 0.9
        assert not person.is_too_wide()
        box = person.input.bounding_box()
        assert box is not None
        assert box["y"] + box["height"] <= person.page.viewport_size["height"]  # type: ignore[index]
        person.shoot(f"{device}-{scheme}")
