"""pytest exercises/ grades what you wrote; --impl solutions grades the solutions. See refimpl/grading/plugin.py."""

from refimpl.ranks.server import start_server

start_server("refimpl.grading.noted")  # before torch is imported here: the first verdict comes seconds earlier

from refimpl.grading.plugin import (  # noqa: E402, F401
    graders,
    grading,
    pytest_addoption,
    pytest_collection_modifyitems,
    pytest_configure,
    pytest_report_teststatus,
)
