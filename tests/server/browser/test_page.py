"""Uses the page at / in a browser: headless Chromium, driven by selenium. `.ci/page` installs both and runs
this.

Where there is no browser these tests fail: they are not collected unless they are asked for.
"""

import shutil
from contextlib import contextmanager

import pytest
import scripted_model
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import Select, WebDriverWait
from serving import HANG_S, Gate, serving, settings, until

from luce.data import BOX
from luce.decode.engine import Engine
from luce.server import app
from luce.server.api import openai

FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --window-size=1100,900"
)
MARKED = """Some **bold** and *slanted* words, `code` and a
second line; 2 * 3 * 4 is 24.

## A title

1. one
2. two
   - deeper

```python
a = "**no**"  # <b>text</b>
```

| name | value |
|---|---|
| x | `1` |

> said

<img src=x onerror="document.title='broken'"><script>document.title='broken'</script>
```
left open
"""
WORDS = {
    "mark": [MARKED],
    "think": ["<think>\nOne thing.\nAnother <b>thing</b>.\n</think>\n\nYes."],
    "default": ["Well."],
}


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    options = webdriver.ChromeOptions()
    options.binary_location = next(
        filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome")))
    )
    for flag in FLAGS.split():
        options.add_argument(flag)
    options.add_argument(f"--user-data-dir={tmp_path_factory.mktemp('browser')}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options, webdriver.ChromeService(shutil.which("chromedriver")))
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def scripted(tmp_path_factory):
    return scripted_model.write(tmp_path_factory.mktemp("scripted") / "scripted.gguf", WORDS)


class Page:
    """The page of a server, in a browser."""

    def __init__(self, browser, url):
        self.browser, self._url = browser, url
        browser.get(url)
        browser.execute_script("localStorage.clear(); sessionStorage.clear()")
        browser.get_log("browser")
        browser.refresh()

    def find(self, id):
        return self.browser.find_element(By.ID, id)

    def all(self, selector):
        return self.browser.find_elements(By.CSS_SELECTOR, selector)

    def wait(self, condition):
        return WebDriverWait(self.browser, HANG_S, 0.05).until(lambda _: condition())

    def send(self, text):
        """Sends a message, and does not wait for its answer."""
        self.find("text").send_keys(text, Keys.ENTER)

    def ask(self, text):
        """Sends a message and returns its answer, an element that is whole."""
        before = len(self.all("article"))
        self.send(text)
        self.wait(lambda: len(self.all("article:not([aria-busy])")) == before + 1)
        return self.all("article")[-1]

    def problems(self):
        """Returns what the browser complained of, its refusals of scripts and styles among it."""
        return [line for line in self.browser.get_log("browser") if line["level"] in ("SEVERE", "WARNING")]


@contextmanager
def page_of(browser, paths, how=None, **more):
    how = how or settings(ctx=4096, checkpoints=0, spec="off")
    with serving(paths, how, **more) as server:
        page = Page(browser, server.url)
        yield page, server


@pytest.fixture(scope="module")
def served(scripted):
    with serving({"scripted": scripted}, settings(ctx=4096, checkpoints=0, spec="off")) as server:
        yield server


@pytest.fixture
def page(browser, served):
    return Page(browser, served.url)


@pytest.fixture
def bodies(monkeypatch):
    """Lists the bodies that the server was sent."""
    made, found = openai.chat_ask, []
    monkeypatch.setattr(openai, "chat_ask", lambda body, **how: found.append(body) or made(body, **how))
    return found


def texts(elements):
    return [element.text for element in elements]


# ---- answers


def test_an_answer_is_marked_up_and_never_html(page):
    answer = page.ask("SAY mark")
    assert texts(answer.find_elements(By.TAG_NAME, "strong")) == ["bold"]
    assert texts(answer.find_elements(By.TAG_NAME, "em")) == ["slanted"]
    assert texts(answer.find_elements(By.CSS_SELECTOR, "p code, td code")) == ["code", "1"]
    assert "second line; 2 * 3 * 4 is 24." in answer.text.splitlines()
    assert texts(answer.find_elements(By.TAG_NAME, "h4")) == ["A title"]
    assert texts(answer.find_elements(By.CSS_SELECTOR, "ol > li"))[0] == "one"
    assert texts(answer.find_elements(By.CSS_SELECTOR, "ol > li > ul > li")) == ["deeper"]
    assert texts(answer.find_elements(By.TAG_NAME, "th")) == ["name", "value"]
    assert texts(answer.find_elements(By.TAG_NAME, "td")) == ["x", "1"]
    assert texts(answer.find_elements(By.TAG_NAME, "blockquote")) == ["said"]
    code = answer.find_elements(By.CSS_SELECTOR, "pre code")
    assert texts(code) == ['a = "**no**"  # <b>text</b>', "left open"]
    assert texts(answer.find_elements(By.CSS_SELECTOR, "figcaption span")) == ["python", "text"]
    assert "<img src=x onerror=" in answer.text and "<script>" in answer.text
    assert not answer.find_elements(By.CSS_SELECTOR, "img, script, b") and page.browser.title == "luce"
    assert page.problems() == []


def test_what_comes_in_parts_looks_as_it_does_whole(page):
    """Blocks that are whole stay as they are while others come."""
    for cut in range(0, len(MARKED), 7):
        pairs = page.browser.execute_script(
            """const [text, cut] = arguments, [body, whole] = [make("div"), make("div")];
            for (let at = 0; at < cut; at += 3) show(body, text.slice(0, at));
            show(body, text.slice(0, cut));
            show(whole, text.slice(0, cut));
            return [body.innerHTML, whole.innerHTML];""",
            MARKED,
            cut,
        )
        assert pairs[0] == pairs[1]


def test_thoughts_are_folded(page):
    answer = page.ask("SAY think")
    (thoughts,) = answer.find_elements(By.TAG_NAME, "details")
    summary, said = thoughts.find_elements(By.CSS_SELECTOR, "summary, div")
    assert thoughts.get_attribute("open") is None and not said.is_displayed()
    assert summary.text.startswith("Thought for ") and summary.text.endswith(" s")
    summary.send_keys(Keys.ENTER)
    assert said.is_displayed() and said.text == "One thing.\nAnother <b>thing</b>."
    assert texts(answer.find_elements(By.CSS_SELECTOR, ".body p")) == ["Yes."]
    assert not [
        each for each in page.ask("SAY mark").find_elements(By.TAG_NAME, "details") if each.is_displayed()
    ]


def test_an_answer_comes_in_parts_and_tells_its_figures(browser, native):
    """They are those of the server."""
    with page_of(browser, {"box": BOX}, settings(spec="mtp", gamma=2)) as (page, server):
        page.find("open").click()
        page.find("max_tokens").send_keys("64")
        answer = page.ask("def add(a, b):")
        rate, count, drafts, prompt, first = texts(answer.find_elements(By.CSS_SELECTOR, ".foot span"))[-5:]
        figures = {
            sample.name: sample.value
            for family in server.watch.registry.collect()
            for sample in family.samples
        }
        drafted = int(figures["luce:spec_decode_num_draft_tokens_total"])
        accepted = int(figures["luce:spec_decode_num_accepted_tokens_total"])
        tokens = int(figures["luce:generation_tokens_total"])
        share = round(100 * accepted / drafted)
        assert drafted > 0 and drafts == f"{drafted} drafted, {accepted} accepted ({share}%)"
        assert count == f"{tokens} tokens" and rate.endswith(" tokens/s") and float(rate.split()[0]) > 0
        assert prompt == f"prompt of {int(figures['luce:prompt_tokens_total'])} tokens" and first.startswith(
            "first after "
        )
        assert page.problems() == []


# ---- while it comes


@pytest.mark.parametrize("way", ["button", "Esc", "New chat"])
def test_an_answer_is_stopped(browser, endless, way):
    with page_of(browser, {"m": endless}, settings(ctx=50_000, checkpoints=0, spec="off")) as (page, server):
        page.send("x")
        page.wait(lambda: len(page.all("article")[0].text) > 20)
        assert not page.find("send").is_displayed() and server.scheduler.running == 1
        if way == "Esc":
            page.find("text").send_keys(Keys.ESCAPE)
        else:
            page.find("stop" if way == "button" else "new").click()
        until(lambda: server.scheduler.idle, "the server has stopped too")
        if way == "New chat":
            page.wait(lambda: not page.all("article"))
            page.wait(lambda: page.find("empty").is_displayed())
        else:
            page.wait(lambda: "stopped" in page.all("article .foot")[0].text)
        page.wait(lambda: page.find("send").is_displayed())


def test_enter_sends_and_shift_enter_breaks_the_line(page, bodies):
    page.find("text").send_keys("one", Keys.SHIFT, Keys.ENTER, Keys.NULL, "two")
    assert not bodies
    page.find("text").send_keys(Keys.ENTER)
    page.wait(lambda: page.all("article:not([aria-busy])"))
    assert said(bodies[0]) == [("user", "one\ntwo")] and texts(page.all(".user")) == ["one\ntwo"]
    page.find("text").clear()
    page.send("   ")
    assert len(page.all(".user")) == 1


# ---- the conversation


def said(body):
    return [(each["role"], each["content"]) for each in map(dict_of, body.messages)]


def dict_of(message):
    return (
        message
        if isinstance(message, dict)
        else {name: getattr(message, name) for name in message.__struct_fields__}
    )


def test_a_conversation_goes_on_and_an_answer_is_asked_again(page, bodies):
    page.ask("SAY think")
    page.ask("and more")
    first, second = bodies
    assert said(first) == [("user", "SAY think")]
    assert said(second) == [("user", "SAY think"), ("assistant", "Yes."), ("user", "and more")]
    assert dict_of(second.messages[1])["reasoning_content"].strip().startswith("One thing.")
    (retry,) = page.all("button.retry")
    retry.click()
    page.wait(lambda: len(bodies) == 3 and page.all("button.retry"))
    assert said(bodies[2]) == said(second) and len(page.all("article")) == 2
    page.find("new").click()
    page.ask("SAY mark")
    assert said(bodies[3]) == [("user", "SAY mark")] and len(page.all("article")) == 1


def test_settings_are_sent_and_kept(page, bodies):
    page.find("open").click()
    page.find("system").send_keys("Be brief.")
    given = {"temperature": "0", "top_p": "0.9", "top_k": "7", "min_p": "0.1", "max_tokens": "5", "seed": "3"}
    assert page.find("temperature").get_attribute("placeholder") == "0.6"  # It is the model's.
    for name, value in given.items():
        page.find(name).send_keys(value)
    Select(page.find("thinking")).select_by_visible_text("Off")
    answer = page.ask("SAY mark")
    assert "cut off at the most tokens allowed" in answer.find_element(By.CLASS_NAME, "foot").text
    (body,) = bodies
    assert said(body) == [("system", "Be brief."), ("user", "SAY mark")] and body.enable_thinking is False
    assert {name: float(getattr(body, name)) for name in given} == {
        name: float(value) for name, value in given.items()
    }
    page.browser.refresh()
    assert page.find("system").get_attribute("value") == "Be brief."
    assert page.find("seed").get_attribute("value") == "3"
    page.ask("y")
    assert bodies[1].top_k == 7


def test_nothing_is_sent_of_what_was_not_set(page, bodies):
    page.ask("x")
    sent = {
        name: getattr(bodies[0], name)
        for name in ("temperature", "top_p", "top_k", "min_p", "max_tokens", "seed")
    }
    assert set(sent.values()) == {None} and bodies[0].enable_thinking is None


def test_the_model_is_chosen_among_several(browser, scripted, bodies):
    with page_of(browser, {"a": scripted, "b": scripted}) as (page, _):
        page.wait(lambda: page.find("model").is_displayed())
        assert texts(Select(page.find("model")).options) == ["a", "b"]
        page.ask("x")
        Select(page.find("model")).select_by_visible_text("b")
        page.ask("y")
        assert [body.model for body in bodies] == ["a", "b"]
        assert Select(page.find("model")).first_selected_option.text == "b"


# ---- keys, and servers that are not ready


def test_a_key_is_asked_for_where_it_is_needed(browser, scripted):
    with page_of(browser, {"scripted": scripted}, keys=["right"]) as (page, _):
        dialog = page.find("ask-key")
        for key in ("wrong", "right"):
            page.wait(
                lambda: dialog.get_attribute("open") and not page.find("new-key").get_attribute("value")
            )
            page.find("new-key").send_keys(key, Keys.ENTER)
        page.wait(lambda: "scripted" in page.find("name").text)
        assert not dialog.get_attribute("open")
        assert page.ask("x").text.startswith("Well.")
        page.browser.refresh()  # The tab remembers it.
        page.wait(lambda: "scripted" in page.find("name").text)
        assert (
            page.browser.execute_script(
                "return Object.keys(localStorage).join() + sessionStorage['luce.key']"
            )
            == "right"
        )


def test_a_key_that_is_not_given_is_asked_for_again(browser, scripted):
    with page_of(browser, {"scripted": scripted}, keys=["right"]) as (page, _):
        page.wait(lambda: page.find("ask-key").get_attribute("open"))
        page.find("new-key").send_keys(Keys.ESCAPE)
        page.wait(lambda: page.find("status").text == "The server asks for a key.")
        page.send("x")
        page.wait(lambda: page.find("ask-key").get_attribute("open"))
        page.find("new-key").send_keys("right", Keys.ENTER)
        page.wait(lambda: page.all("article:not([aria-busy])"))
        assert page.all("article")[0].text.startswith("Well.")


def test_it_waits_for_a_model_that_is_loaded(browser, scripted, monkeypatch):
    held = Gate(Engine.open)
    monkeypatch.setattr(Engine, "open", held)
    with page_of(browser, {"scripted": scripted}, loading=True) as (page, _):
        page.wait(lambda: page.find("status").text == "The model is being loaded …")
        held.opened.set()
        page.wait(lambda: "scripted" in page.find("name").text and not page.find("status").text)


def test_what_goes_wrong_is_told_and_asked_again(page, monkeypatch):
    with monkeypatch.context() as broken:

        async def refused(*args, **how):
            raise app.Refused(400, "<b>no</b> such thing")

        broken.setattr(app, "asked", refused)
        answer = page.ask("SAY think")
        (problem,) = answer.find_elements(By.CSS_SELECTOR, "[role=alert]")
        assert problem.text == "<b>no</b> such thing"
    page.all("button.retry")[0].click()
    page.wait(lambda: page.all("article:not([aria-busy]) .body p"))
    assert "Yes." in page.all("article")[0].text and len(page.all("article")) == 1


def test_a_server_that_ends_is_told(browser, endless):
    with page_of(browser, {"m": endless}, settings(ctx=50_000, checkpoints=0, spec="off")) as (page, server):
        page.send("x")
        page.wait(lambda: len(page.all("article")[0].text) > 20)
        server.stop()
        page.wait(lambda: "the server is shutting down" in page.all("article")[0].text)
        page.send("y")
        page.wait(lambda: "The server does not answer." in page.all("article")[-1].text)


# ---- how it is used


def test_all_has_a_name_and_the_keyboard_reaches_it(page):
    page.find("open").click()
    unnamed = page.browser.execute_script(
        """return [...document.querySelectorAll("input, textarea, select, button")]
           .filter((each) => !(each.labels?.length || each.textContent.trim() ||
           each.getAttribute("aria-label"))) .map((each) => each.id)"""
    )
    assert unnamed == []
    assert page.browser.execute_script("return document.documentElement.lang") == "en"
    reached = set()
    for _ in range(30):
        focused = page.browser.switch_to.active_element
        reached.add(focused.get_attribute("id"))
        focused.send_keys(Keys.TAB)
    needed = {"new", "theme", "open", "system", "thinking", "temperature", "seed", "key", "text", "send"}
    assert needed <= reached
    page.find("text").send_keys(Keys.ESCAPE)
    assert not page.find("settings").is_displayed()


def test_it_is_light_or_dark(page):
    def back():
        return page.browser.execute_script("return getComputedStyle(document.body).backgroundColor")

    found = {}
    for _ in range(3):
        found[page.find("theme").get_attribute("aria-label")] = back()
        page.find("theme").click()
    assert found["Theme: dark"] != found["Theme: light"] and len(found) == 3
    page.find("theme").click()
    page.browser.refresh()
    assert back() == found["Theme: dark"]


def test_a_small_screen_has_all_of_it(page):
    size = page.browser.get_window_size()
    try:
        page.browser.set_window_size(400, 700)
        page.ask("SAY mark")
        wide = page.browser.execute_script("return document.documentElement.scrollWidth - innerWidth")
        assert wide <= 0 and page.find("send").is_displayed()
    finally:
        page.browser.set_window_size(size["width"], size["height"])
