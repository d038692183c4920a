"""The chat page in a real Chromium, against the real API over a real engine.

MORAY_CHROMIUM names the browser where none of the usual names is on the PATH.
"""

import json
import os
import re
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from chat_server import DRAFTERS, ChatServer, running_server, wait_until

from moray.decoding.request import Request
from moray.drafters.configs import NgramConfig
from moray.edge.config import EdgeConfig
from moray.edge.device.client import EdgeClient
from moray.edge.device.drafting import DeviceDrafter
from moray.edge.device.events import VerifiedTokens
from moray.edge.device.transport import WebSocketLink
from moray.edge.messages import Hello
from moray.targets.head import TargetHead
from moray.targets.model import Target
from moray.targets.spec import TargetConfig

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
expect = playwright.expect

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
FLAGS = ("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking")
QUESTION = "What lives in a crevice of the reef?"
ANSWER = ".answer .caption"


def find_chromium(driver: Any) -> str | None:
    named = os.environ.get("MORAY_CHROMIUM")
    own = driver.chromium.executable_path
    found = [named, *map(shutil.which, NAMES), own if Path(own).is_file() else None]
    return next(filter(None, found), None)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        path = find_chromium(driver)
        if path is None:
            pytest.skip(f"no Chromium: set MORAY_CHROMIUM to one, or install one of {', '.join(NAMES)}")
        browser = driver.chromium.launch(executable_path=path, args=list(FLAGS))
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ChatServer]:
    with running_server(tmp_path_factory.mktemp("chat")) as server:
        yield server


@pytest.fixture
def complaints() -> list[str]:
    """What the browser said against the page; a test that expects some empties it."""
    return []


@pytest.fixture
def page(browser: Any, server: ChatServer, complaints: list[str]) -> Iterator[Any]:
    server.pace, server.targets.break_after = 0.0, None
    server.targets.requests.clear()
    server.targets.updates.clear()
    context = browser.new_context(viewport={"width": 1200, "height": 800})
    page = context.new_page()
    page.set_default_timeout(20_000)
    page.on("console", lambda m: complaints.append(m.text) if m.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.goto(server.url)
    expect(page.locator("#model")).to_have_text("tiny")
    page.fill("#max-tokens", "48")
    yield page
    context.close()
    wait_until(lambda: server.num_running == 0, "the engine is idle again")
    assert complaints == []


def send(page: Any, text: str = QUESTION) -> None:
    page.fill("#question", text)
    page.press("#question", "Enter")


def answer_text(page: Any, number: int = 0) -> str:
    """All of an answer but the refused drafts."""
    return "".join(page.locator(".answer").nth(number).locator("p.text > span:not(.refused)").all_text_contents())


def kinds(page: Any) -> set[str]:
    return set(page.locator(".answer p.text > span").evaluate_all("spans => spans.map(span => span.className)"))


def colour(page: Any, kind: str) -> str:
    return page.locator(f".answer .{kind}").first.evaluate("span => getComputedStyle(span).backgroundColor")


def stream_of(chunks: list[dict[str, Any]], end: str = "data: [DONE]\n\n") -> str:
    return "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + end


def pretend(page: Any, **response: Any) -> None:
    """Answer the page's next chat in the server's place."""
    page.route("**/v1/chat/completions", lambda route: route.fulfill(**response), times=1)


def test_an_answer_is_the_targets_own_greedy_text(page, server):
    server.pace = 0.02
    send(page)
    expect(page.locator(".answer .own").first).to_be_attached()
    assert page.locator(ANSWER).count() == 0, "nothing was shown before the answer was whole"
    expect(page.locator(ANSWER)).to_be_visible()
    assert answer_text(page) == server.greedy([{"role": "user", "content": QUESTION}], 48)
    assert page.input_value("#question") == ""


def test_the_whole_conversation_is_sent(page, server):
    send(page)
    expect(page.locator(ANSWER)).to_have_count(1)
    first = answer_text(page)
    send(page, "And then?")
    expect(page.locator(ANSWER)).to_have_count(2)
    turns = [("user", QUESTION), ("assistant", first), ("user", "And then?")]
    expected = server.tokenizer.encode_prompt([{"role": role, "content": content} for role, content in turns])
    assert server.targets.requests[-1].prompt == tuple(expected)


def test_text_is_coloured_by_where_it_came_from(page):
    send(page)
    expect(page.locator(ANSWER)).to_be_visible()
    assert kinds(page) == {"own", "drafted", "refused"}
    drafted, own = colour(page, "drafted"), colour(page, "own")
    assert len({drafted, own, "rgba(0, 0, 0, 0)"}) == 3
    expect(page.locator(".answer .refused").first).to_be_hidden()
    page.check("#show-refused")
    expect(page.locator(".answer .refused").first).to_be_visible()
    line = page.locator(".answer .refused").first.evaluate("span => getComputedStyle(span).textDecorationLine")
    assert line == "line-through"
    page.uncheck("#show-origins")
    assert colour(page, "drafted") == colour(page, "own") == "rgba(0, 0, 0, 0)"


def test_the_figures_are_those_of_the_engine(page, server):
    send(page)
    expect(page.locator(ANSWER)).to_be_visible()
    passes = server.targets.updates
    tokens = sum(len(each.tokens) for each in passes)
    accepted = sum(each.num_accepted for each in passes)
    assert (len(passes[0].tokens), tokens) == (1, 48)
    expect(page.locator("#tau")).to_have_text(f"{(tokens - 1) / (len(passes) - 1):.2f}")
    expect(page.locator("#share")).to_have_text(f"{int(accepted / tokens * 100 + 0.5)} %")
    expect(page.locator("#counts")).to_have_text(f"{tokens} / {len(passes) - 1}")
    expect(page.locator("#speed")).to_have_text(re.compile(r"^\d+(\.\d)?$"))
    expect(page.locator("#first")).to_have_text(re.compile(r"^\d+(\.\d)? m?s$"))
    assert page.locator("#passes rect").count() == min(len(passes) - 1, 48)


def test_the_figures_move_while_the_answer_comes(page, server):
    server.pace = 0.15
    send(page)
    seen = set()
    expect(page.locator("#tau")).to_have_text(re.compile(r"^\d"))
    while page.locator(ANSWER).count() == 0:
        seen.add(tuple(page.locator(f"#{name}").text_content() for name in ("tau", "speed", "counts")))
    assert len({counts for _, _, counts in seen}) > 2
    assert len({speed for _, speed, _ in seen}) > 2
    assert all(text[0].isdigit() for figures in seen for text in figures)


def test_without_speculation_nothing_is_drafted_and_the_text_is_the_same(page, server):
    send(page)
    expect(page.locator(ANSWER)).to_be_visible()
    drafted = answer_text(page)
    page.click("#new-chat")
    expect(page.locator(".turn")).to_have_count(0)
    page.uncheck("#speculate")
    send(page)
    expect(page.locator(ANSWER)).to_be_visible()
    assert kinds(page) == {"own"}
    assert answer_text(page) == drafted
    expect(page.locator("#tau")).to_have_text("1.00")
    assert server.targets.requests[-1].drafter is None


def test_settings_are_sent(page, server):
    assert page.locator("#drafter option").all_text_contents() == list(DRAFTERS)
    page.select_option("#drafter", "lookup")
    page.fill("#temperature", "0.7")
    page.fill("#seed", "11")
    page.fill("#max-tokens", "5")
    send(page)
    expect(page.locator(ANSWER)).to_be_visible()
    request = server.targets.requests[-1]
    assert (request.drafter, request.max_new_tokens) == ("lookup", 5)
    assert (request.params.temperature, request.params.seed) == (0.7, 11)
    assert page.locator(".answer .note").text_content().startswith("Cut off")


def test_a_setting_out_of_range_is_not_sent(page, server):
    page.fill("#temperature", "7")
    send(page)
    assert page.evaluate("document.activeElement.id") == "temperature"
    assert page.input_value("#question") == QUESTION
    assert server.targets.requests == []


@pytest.mark.parametrize("way", ["button", "Escape", "new chat"])
def test_stopping_frees_the_engine_and_keeps_what_came(page, server, way):
    server.pace = 0.1
    page.fill("#max-tokens", "300")
    send(page)
    expect(page.locator(".answer .own").first).to_be_attached()
    page.fill("#question", "typed meanwhile")
    assert server.num_running == 1
    if way == "Escape":
        page.keyboard.press("Escape")
    else:
        page.click("#stop" if way == "button" else "#new-chat")
    wait_until(lambda: server.num_running == 0, "the engine has let the sequence go", seconds=2)
    expect(page.locator("#send")).to_be_visible()
    assert page.input_value("#question") == "typed meanwhile"
    if way == "new chat":
        expect(page.locator(".turn")).to_have_count(0)
    else:
        expect(page.locator(".answer .note")).to_have_text("Stopped.")
        assert answer_text(page)


def test_shift_enter_begins_a_line(page, server):
    page.fill("#question", "one")
    page.press("#question", "Shift+Enter")
    page.keyboard.type("two")
    assert page.input_value("#question") == "one\ntwo"
    assert server.targets.requests == []
    page.keyboard.press("Enter")
    expect(page.locator(".question .text")).to_have_text("one\ntwo")
    expect(page.locator(ANSWER)).to_be_visible()


def test_a_full_server_is_told_of_and_the_question_comes_back(page, server, browser, complaints):
    server.pace = 0.1
    others = [browser.new_page() for _ in range(2)]
    for other in others:
        other.goto(server.url)
        expect(other.locator("#model")).to_have_text("tiny")
        other.fill("#max-tokens", "300")
        send(other)
        expect(other.locator(".answer .own").first).to_be_attached()
    send(page)
    expect(page.locator("#problem")).to_have_text(re.compile(r"busy \(429\).*Try again in 1 s\."))
    assert page.input_value("#question") == QUESTION
    expect(page.locator(".turn")).to_have_count(0)
    assert [text for text in complaints if "429" not in text] == []
    complaints.clear()
    for other in others:
        other.close()
    wait_until(lambda: server.num_running == 0, "the tabs' answers have ended", seconds=5)
    server.pace = 0.0
    page.press("#question", "Enter")
    expect(page.locator(ANSWER)).to_be_visible()
    expect(page.locator("#problem")).to_be_hidden()


def test_a_wrong_key_is_told_of_and_asked_for(page, complaints):
    body = json.dumps({"error": {"message": "no such key", "type": "authentication_error"}})
    pretend(page, status=401, content_type="application/json", body=body)
    send(page)
    expect(page.locator("#problem")).to_have_text("The API key is missing or wrong (401): no such key.")
    assert page.evaluate("document.activeElement.id") == "api-key"
    assert page.input_value("#question") == QUESTION
    complaints.clear()
    page.fill("#api-key", "sesame")
    with page.expect_request("**/v1/models") as models:
        page.press("#api-key", "Tab")
    assert models.value.headers["authorization"] == "Bearer sesame"
    assert page.evaluate("[sessionStorage.length, localStorage.length, document.cookie]") == [1, 0, ""]
    expect(page.locator("#problem")).to_be_hidden()
    with page.expect_request("**/v1/chat/completions") as chat:
        page.press("#question", "Enter")
    assert chat.value.headers["authorization"] == "Bearer sesame"
    expect(page.locator(ANSWER)).to_be_visible()


def test_an_answer_that_breaks_off_keeps_what_came_and_can_be_tried_again(page, server, complaints):
    server.targets.break_after = 3
    send(page)
    expect(page.locator(".broken")).to_contain_text("the server has failed on this request")
    part = answer_text(page)
    assert part
    complaints.clear()
    page.click("text=Try again")
    expect(page.locator(".broken")).to_have_count(0)
    expect(page.locator(ANSWER)).to_have_count(1)
    whole = answer_text(page)
    assert whole.startswith(part)
    assert whole == server.greedy([{"role": "user", "content": QUESTION}], 48)


def test_an_error_within_a_stream_is_told_of(page):
    error = {"error": {"message": "target replicas keep failing: try again later"}}
    pretend(page, content_type="text/event-stream", body=stream_of([error], end=""))
    send(page)
    expect(page.locator("#problem")).to_have_text("target replicas keep failing: try again later")
    assert page.input_value("#question") == QUESTION


def test_a_server_that_is_gone_is_told_of(page, complaints):
    page.route("**/v1/**", lambda route: route.abort())
    send(page)
    expect(page.locator("#problem")).to_contain_text("The server cannot be reached.")
    assert page.input_value("#question") == QUESTION
    complaints.clear()


def test_markup_is_shown_as_text(page):
    evil = "<script>document.title = 'taken'</script><img src=x onerror=\"document.title = 'taken'\">"
    speculation = {
        "pieces": [{"text": evil, "drafted": True}, {"text": evil, "drafted": False}],
        "rejected": evil,
        "num_tokens": 2,
        "num_accepted": 1,
        "num_rejected": 1,
    }
    chunk = {"choices": [{"index": 0, "finish_reason": "stop", "delta": {}}], "speculation": speculation}
    pretend(page, content_type="text/event-stream", body=stream_of([chunk]))
    page.check("#show-refused")
    send(page, evil)
    expect(page.locator(ANSWER)).to_be_visible()
    assert page.locator(".answer .text").text_content() == evil * 3
    assert page.locator(".question .text").text_content() == evil
    assert page.locator(".turn script, .turn img").count() == 0
    assert page.title() == "Moray"


def test_the_policy_forbids_what_the_page_does_not_need(page, complaints):
    forbidden = page.evaluate("""async () => {
        const forbidden = [];
        document.addEventListener("securitypolicyviolation", (event) => forbidden.push(event.effectiveDirective));
        const script = document.createElement("script");
        const image = Object.assign(new Image(), { src: "data:image/gif;base64,AAAA" });
        const styled = document.createElement("p");
        styled.setAttribute("style", "color: red");
        script.append("window.ran = 1");
        document.body.append(script, image, styled);
        try { styled.innerHTML = "<b>x</b>"; } catch { forbidden.push("innerHTML"); }
        await new Promise((done) => setTimeout(done, 200));
        return [...forbidden, String(window.ran)];
    }""")
    assert {"img-src", "style-src-attr", "innerHTML", "undefined"} <= set(forbidden)
    complaints.clear()


@pytest.mark.parametrize("width", [320, 390, 768, 1280])
def test_nothing_sticks_out_of_the_window(page, width):
    page.set_viewport_size({"width": width, "height": 700})
    send(page, "long" * 100)
    expect(page.locator(ANSWER)).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    if width < 800:
        expect(page.locator("#temperature")).to_be_hidden()
        page.click("#open-settings")
    expect(page.locator("#temperature")).to_be_in_viewport()
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_every_control_has_a_name_and_can_be_reached_by_keyboard(page):
    seen = []
    for _ in range(16):
        page.keyboard.press("Tab")
        seen.append(page.evaluate("document.activeElement.id"))
    wanted = {"new-chat", "show-origins", "show-refused", "transcript", "speculate", "drafter", "temperature", "seed"}
    assert wanted <= set(seen)
    unnamed = page.locator("input, select, textarea").evaluate_all(
        "fields => fields.filter(field => !field.labels.length).map(field => field.id)"
    )
    assert unnamed == []


def test_a_device_s_answer_is_shown_as_it_comes(browser, tmp_path):
    """Verified text plainly, what was drafted after it otherwise; at the end the verified text alone."""
    with running_server(tmp_path, edge={"drafters": ["lookup"], "max_sessions": 1}) as server:
        page = browser.new_page()
        page.goto(server.url)
        expect(page.locator("#model")).to_have_text("tiny")
        expect(page.locator("#edge")).to_be_hidden()
        target = Target.load(TargetConfig(model=str(server.folder), device="cpu"))
        hello = Hello(
            target=target.spec.fingerprint,
            text=server.tokenizer.fingerprint,
            drafter="lookup",
            drafter_fingerprint="",
        )
        drafter = NgramConfig(type="ngram", max_ngram=3).build(TargetHead.of(target))
        url = server.url.replace("http:", "ws:") + "/v1/edge"
        client = EdgeClient(
            DeviceDrafter(drafter, "lookup", 256), hello, lambda: WebSocketLink(url), EdgeConfig(give_up_seconds=10)
        )
        prompt = tuple(server.tokenizer.encode_prompt([{"role": "user", "content": QUESTION}]))
        tokens: list[int] = []

        def answer() -> None:
            for event in client.answer(Request(prompt=prompt, max_new_tokens=60, ignore_eos=True)):
                if isinstance(event, VerifiedTokens):
                    tokens.extend(event.tokens)

        server.pace = 0.1
        device = threading.Thread(target=answer)
        device.start()
        expect(page.locator("#edge-verified")).not_to_be_empty(timeout=15_000)
        device.join(timeout=60)
        expect(page.locator("#edge-state")).to_have_text("lookup, 60 tokens, complete", timeout=15_000)
        assert page.locator("#edge-verified").text_content() == server.tokenizer.decode(tokens)
        assert page.locator("#edge-unverified").text_content() == ""
        page.close()
