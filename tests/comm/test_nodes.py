"""What is a node: the variables, and what is refused."""

import pytest

from refimpl import launch
from refimpl.comm.group import Group
from refimpl.comm.nodes import node_of, ranks_per_node


def test_the_own_variable_comes_before_the_launcher_s_before_all_ranks() -> None:
    assert ranks_per_node(6, {}) == 6
    assert ranks_per_node(6, {"LOCAL_WORLD_SIZE": "3"}) == 3
    assert ranks_per_node(6, {"LOCAL_WORLD_SIZE": "3", "REFIMPL_RANKS_PER_NODE": " 2 "}) == 2
    assert ranks_per_node(6, {"LOCAL_WORLD_SIZE": "3", "REFIMPL_RANKS_PER_NODE": ""}) == 3


def test_ranks_are_numbered_node_by_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REFIMPL_RANKS_PER_NODE", "2")
    assert [node_of(rank, 6) for rank in range(6)] == [0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize("name", ["REFIMPL_RANKS_PER_NODE", "LOCAL_WORLD_SIZE"])
@pytest.mark.parametrize("said", ["4", "0", "-2", "two", "1.5", "12"])
def test_what_makes_no_whole_nodes_is_named_with_what_would(name: str, said: str) -> None:
    with pytest.raises(ValueError, match=rf"{name}={said}: 6 ranks .*REFIMPL_RANKS_PER_NODE to one of 1, 2, 3, 6"):
        ranks_per_node(6, {name: said})


def test_a_job_says_at_once_that_it_has_other_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REFIMPL_RANKS_PER_NODE", "3")
    with pytest.raises(launch.RankError, match="REFIMPL_RANKS_PER_NODE=3: 2 ranks do not make whole nodes"):
        launch.run(lambda: Group.world().rank, ranks=2, device="cpu")
