"""The report in a real browser, from disk: nothing blank, clipped, too wide or out of the keyboard's reach.

Skipped where Chromium or its driver is not installed (Debian: `apt install chromium chromium-driver`).
"""

from __future__ import annotations

import base64
import io
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

SIZES = {1280: 900, 360: 740}
SCHEMES = ("light", "dark")
MAX_TABS = 60
LOAD_SECONDS = 60
# Antialiasing and fonts that are a little wider than those the layout was made with.
SLACK_PIXELS = 3
LEAST_DRAWN_SHARE = 0.01
LEAST_COLOURS = 8

CHARTS = """
return [...document.querySelectorAll('svg.chart')].map(svg => {
  const box = svg.closest('.chart-box'), at = svg.getBoundingClientRect(), around = box.getBoundingClientRect();
  const outside = [...svg.querySelectorAll('text')].filter(text => {
    const own = text.getBoundingClientRect();
    return own.left < at.left - arguments[0] || own.right > at.right + arguments[0]
      || own.top < at.top - arguments[0] || own.bottom > at.bottom + arguments[0];
  }).map(text => text.textContent);
  return {key: svg.closest('figure').id, outside,
    x: around.left + scrollX, y: around.top + scrollY, width: around.width, height: around.height,
    inner: box.scrollWidth, left: at.left - around.left, drawn: at.width, tall: at.height,
    end: around.right};
});
"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Chromium without a window."""
    chromium, driver_path = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or driver_path is None:
        pytest.skip("Chromium is not installed: apt install chromium chromium-driver")
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver_path))
    driver.set_page_load_timeout(120)
    driver.set_script_timeout(120)
    yield driver
    driver.quit()


def show(browser: Any, page: Path, width: int, scheme: str) -> None:
    """Load the page, to its end, on a screen of this width with this preference."""
    from selenium.webdriver.support.wait import WebDriverWait

    metrics = {"width": width, "height": SIZES[width], "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    features = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", features)
    browser.get("about:blank")
    browser.get(page.as_uri())
    # On a busy machine `get` has come back with a part of the document read.
    WebDriverWait(browser, LOAD_SECONDS).until(
        lambda driver: driver.execute_script(
            "return document.readyState === 'complete' && location.href === arguments[0]", page.as_uri()
        )
    )


def picture(browser: Any, chart: dict[str, Any]) -> Image.Image:
    """The visible part of a chart."""
    clip = {name: chart[name] for name in ("x", "y", "width", "height")} | {"scale": 1}
    shot = browser.execute_cdp_cmd(
        "Page.captureScreenshot", {"format": "png", "captureBeyondViewport": True, "clip": clip}
    )
    return Image.open(io.BytesIO(base64.b64decode(shot["data"]))).convert("RGB")


def background(browser: Any) -> tuple[int, ...]:
    """The colour behind the charts."""
    colour = browser.execute_script("return getComputedStyle(document.querySelector('main > section')).backgroundColor")
    return tuple(int(part) for part in colour.removeprefix("rgb(").removesuffix(")").split(","))


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("width", SIZES)
def test_charts_are_drawn_and_whole_and_nothing_is_wider_than_the_screen(
    browser: Any, full_file: Path, width: int, scheme: str
) -> None:
    show(browser, full_file, width, scheme)
    charts = browser.execute_script(CHARTS, SLACK_PIXELS)

    assert len(charts) == 11
    ground = background(browser)
    assert (sum(ground) > 3 * 128) == (scheme == "light")
    for chart in charts:
        assert chart["outside"] == [], chart["key"]
        assert chart["end"] <= width, chart["key"]
        assert chart["left"] >= -1, chart["key"]
        # What does not fit the box can be scrolled to.
        assert chart["drawn"] <= max(chart["width"], chart["inner"]) + 1, chart["key"]
        assert chart["tall"] <= chart["height"] + 1, chart["key"]
        image = picture(browser, chart)
        counts = image.getcolors(1 << 24) or []
        blank = sum(count for count, colour in counts if colour == ground)
        assert 1 - blank / (image.width * image.height) >= LEAST_DRAWN_SHARE, chart["key"]
        assert len(counts) >= LEAST_COLOURS, chart["key"]
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    assert browser.execute_script("return performance.getEntriesByType('resource').length") == 0
    assert browser.get_log("browser") == []


@pytest.mark.parametrize("page", ["bare_page", "hostile_page", "lossless_page"])
def test_other_pages_fit_a_phone_without_errors(
    browser: Any, page: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    path = tmp_path / "report.html"
    path.write_text(request.getfixturevalue(page), encoding="utf-8")
    show(browser, path, 360, "dark")

    assert browser.execute_script("return document.documentElement.scrollWidth") <= 360
    assert [chart["key"] for chart in browser.execute_script(CHARTS, SLACK_PIXELS) if chart["outside"]] == []
    assert browser.get_log("browser") == []
    assert browser.execute_script("return document.querySelectorAll('script').length") == 1


def test_the_keyboard_reaches_navigation_and_tables_and_opens_them(browser: Any, full_file: Path) -> None:
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.keys import Keys

    show(browser, full_file, 1280, "light")
    reached: list[str] = []
    for _ in range(MAX_TABS):
        ActionChains(browser).send_keys(Keys.TAB).perform()
        active = browser.switch_to.active_element
        reached.append(active.get_attribute("href") or active.tag_name)
        assert browser.execute_script("return getComputedStyle(arguments[0]).outlineStyle", active) != "none"
        if active.tag_name == "summary":
            break

    assert reached[0].endswith("#content")
    assert reached[1] == "button"
    assert len([place for place in reached if "#" in place]) == 16
    assert reached[-1] == "summary"
    table = browser.find_element("css selector", "figure details table")
    assert not table.is_displayed()
    ActionChains(browser).send_keys(Keys.ENTER).perform()
    assert table.is_displayed()


def test_the_button_changes_the_theme(browser: Any, full_file: Path) -> None:
    show(browser, full_file, 1280, "dark")
    button = browser.find_element("id", "theme")
    grounds = [background(browser)]
    for _ in range(3):
        button.click()
        grounds.append(background(browser))

    by_preference, light, dark, again = grounds
    assert dark == by_preference == again
    assert sum(light) > sum(dark)
    assert button.text == "Theme: system"


def test_all_of_it_prints_on_paper(browser: Any, full_file: Path) -> None:
    show(browser, full_file, 1280, "dark")
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})

    assert background(browser) == (255, 255, 255)
    assert not browser.find_element("css selector", "nav").is_displayed()
    boxes = "return [...document.querySelectorAll('.scroll')].map(box => getComputedStyle(box).overflowX)"
    assert set(browser.execute_script(boxes)) == {"visible"}
    printed = browser.execute_cdp_cmd("Page.printToPDF", {"paperWidth": 8.27, "paperHeight": 11.69})
    assert base64.b64decode(printed["data"]).startswith(b"%PDF")
