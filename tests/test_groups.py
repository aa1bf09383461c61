"""Tests of one `xdist_group` run on one worker: else the site is built and a chapter's ranks are started on each."""

import pytest


@pytest.mark.xdist_group("one-worker")
def test_a_group_is_known_to_xdist(request: pytest.FixtureRequest) -> None:
    if getattr(request.config.option, "loadgroup", False):
        assert request.node.nodeid.endswith("@one-worker"), (
            "pytest and pytest-xdist do not go together: see pyproject.toml"
        )
