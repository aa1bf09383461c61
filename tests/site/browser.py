"""A headless Chromium that can reach this machine only and notes every address that a page asks for."""

import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-component-update",
    "--disable-background-networking", "--disable-sync", "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
)  # fmt: skip
# On the PATH, or where Debian (also when the driver is kept off the PATH), Ubuntu's snap and macOS put them.
BROWSERS = (
    "chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "/snap/bin/chromium",
    "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome",
    "/Applications/Chromium.app/Contents/MacOS/Chromium",
)  # fmt: skip
DRIVERS = (
    "chromedriver", "/usr/bin/chromedriver", "/usr/lib/chromium/chromedriver", "/usr/lib/chromium-browser/chromedriver",
    "/snap/bin/chromium.chromedriver",
)  # fmt: skip
REMEDY = (
    "on Debian and Ubuntu: sudo apt install chromium chromium-driver (Ubuntu's snap: sudo snap install chromium); "
    "on macOS: brew install --cask google-chrome chromedriver"
)


def missing(browsers: Sequence[str] = BROWSERS, drivers: Sequence[str] = DRIVERS) -> str:
    """Why there can be no browser here, and how to get one; empty if there can."""
    try:
        import selenium  # noqa: F401
    except ImportError:
        return "no selenium: make install"
    needed = [words[0] for words in (browsers, drivers) if not first(words)]
    return f"no {' and no '.join(needed)}; {REMEDY}" if needed else ""


def first(names: Sequence[str]) -> str:
    """The program that is there of those named: looked for on the PATH, or at its place if it is an absolute one."""
    return next((found for found in map(shutil.which, names) if found), "")


@contextmanager
def chromium(profile: Path, size: tuple[int, int] = (1280, 900)) -> Iterator[Any]:
    """A selenium driver with an empty profile."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = first(BROWSERS)
    for flag in (*FLAGS, f"--user-data-dir={profile}", f"--window-size={size[0]},{size[1]}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"performance": "ALL", "browser": "ALL"})
    driver = webdriver.Chrome(options, Service(first(DRIVERS)))
    try:
        yield driver
    finally:
        driver.quit()


def requested(driver: Any) -> list[str]:
    """Every address asked for since the last call."""
    events = [json.loads(entry["message"])["message"] for entry in driver.get_log("performance")]
    sent = [event for event in events if event["method"] == "Network.requestWillBeSent"]
    return [event["params"]["request"]["url"] for event in sent]
