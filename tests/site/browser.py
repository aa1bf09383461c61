"""A headless Chromium that can reach this machine only and notes every address that a page asks for."""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-component-update",
    "--disable-background-networking", "--disable-sync", "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
)  # fmt: skip


def missing() -> str:
    """Why there can be no browser here; empty if there can."""
    try:
        import selenium  # noqa: F401
    except ImportError:
        return "selenium is not installed"
    needed = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
    return f"not found on the PATH: {', '.join(needed)}" if needed else ""


@contextmanager
def chromium(profile: Path, size: tuple[int, int] = (1280, 900)) -> Iterator[Any]:
    """A selenium driver with an empty profile."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    for flag in (*FLAGS, f"--user-data-dir={profile}", f"--window-size={size[0]},{size[1]}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"performance": "ALL", "browser": "ALL"})
    driver = webdriver.Chrome(options, Service(shutil.which("chromedriver")))
    try:
        yield driver
    finally:
        driver.quit()


def requested(driver: Any) -> list[str]:
    """Every address asked for since the last call."""
    events = [json.loads(entry["message"])["message"] for entry in driver.get_log("performance")]
    sent = [event for event in events if event["method"] == "Network.requestWillBeSent"]
    return [event["params"]["request"]["url"] for event in sent]
