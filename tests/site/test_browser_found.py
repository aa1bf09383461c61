"""Where the browser tests look for a browser, and what they say when there is none."""

from pathlib import Path

import pytest
from browser import DRIVERS, first, missing


def test_a_driver_off_the_path_is_found_at_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = tmp_path / "chromedriver"
    driver.write_text("#!/bin/sh\n")
    driver.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    assert first(["chromedriver", str(driver)]) == str(driver)
    assert first(["chromedriver"]) == ""
    assert "/usr/lib/chromium/chromedriver" in DRIVERS, "Debian's, when /usr/bin has none"


def test_the_reason_of_a_skip_says_how_to_get_a_browser() -> None:
    pytest.importorskip("selenium")
    reason = missing(browsers=["nowhere-a-browser"], drivers=["nowhere-a-driver"])
    assert "nowhere-a-browser and no nowhere-a-driver" in reason
    assert "apt install chromium chromium-driver" in reason
    assert "brew install" in reason
