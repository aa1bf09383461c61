"""The ranks of a file's answers end with the file."""

from collections.abc import Iterator

import pytest
from answers import grader


@pytest.fixture(scope="module", autouse=True)
def _leave() -> Iterator[None]:
    yield
    grader().__exit__(None, None, None)
