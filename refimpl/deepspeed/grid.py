"""DeepSpeed's grid: an `mpu` that a topology makes. DeepSpeed: deepspeed/runtime/pipe/topology.py."""

from typing import Any

from torch.distributed import ProcessGroup

from refimpl.comm.process_group import of_rows
from refimpl.deepspeed import comm
from refimpl.parallel.pipeline.topology import PipeDataParallelTopology, ProcessTopology


class PipelineParallelGrid:
    """This rank's place on a topology with "pipe", "data" and perhaps "model", and its group on each axis.

    Making one is a collective of all ranks. `initialize(mpu=grid)` takes it for a model that its author has split.
    """

    def __init__(self, topology: ProcessTopology | None = None, process_group: Any = None) -> None:
        """Without a topology the ranks' prime factors go to pipe and data in turn. ValueError for another size."""
        self.global_rank, self.world_size = comm.get_rank(), comm.get_world_size()
        self._topo = topology or PipeDataParallelTopology(*_halves(self.world_size))
        if not self._is_grid_valid():
            raise ValueError(f"a topology of {self._topo.world_size()} ranks in a job of {self.world_size}")
        sizes = [max(self._topo.get_dim(axis), 1) for axis in ("pipe", "data", "model")]
        self.pipe_parallel_size, self.data_parallel_size, self.model_parallel_size = sizes
        self.slice_parallel_size = self.model_parallel_size
        self.stage_id, self.data_parallel_id = self.get_stage_id(), self.get_data_parallel_id()
        self.is_first_stage = self.stage_id == 0
        self.is_last_stage = self.stage_id == self.pipe_parallel_size - 1
        replicas = [self._topo.get_axis_list("data", i) for i in range(self.data_parallel_size)]
        self.dp_groups, self.pipe_groups = (self._topo.get_axis_comm_lists(axis) for axis in ("data", "pipe"))
        alone = [[rank] for rank in range(self.world_size)]
        slices = self._topo.get_axis_comm_lists("model") if self.model_parallel_size > 1 else alone
        ranks, self.ds_model_proc_group = self._mine(replicas)
        self.ds_model_world_size, self.ds_model_rank = len(ranks), ranks.index(self.global_rank)
        self.dp_group, self.dp_proc_group = self._mine(self.dp_groups)
        self.pp_group, self.pp_proc_group = self._mine(self.pipe_groups)
        self.slice_group, self.slice_proc_group = self._mine(slices)

    def __deepcopy__(self, memo: object) -> "PipelineParallelGrid":
        return self  # a copied model is on the same ranks

    def _mine(self, lists: list[list[int]]) -> tuple[list[int], ProcessGroup]:
        """Of these lists, which share out all ranks, the one that this rank is in, and torch's group of it."""
        rows = [sorted(ranks) for ranks in lists]
        return next(row for row in rows if self.global_rank in row), of_rows(rows)

    def _is_grid_valid(self) -> bool:
        return self._topo.world_size() == self.world_size

    def topology(self) -> ProcessTopology:
        return self._topo

    def stage_to_global(self, stage_id: int, **place: int) -> int:
        """The rank of a stage in this rank's pipeline, or in the one that `place` names."""
        me = self._topo.get_coord(self.global_rank)
        return self._topo.get_rank(**{**me._asdict(), "pipe": stage_id, **place})

    def get_global_rank(self) -> int:
        return self.global_rank

    def get_stage_id(self) -> int:
        return int(self._topo.get_coord(self.global_rank).pipe)

    def get_data_parallel_id(self) -> int:
        return int(self._topo.get_coord(self.global_rank).data)

    def get_pipe_parallel_rank(self) -> int:
        return self.stage_id

    def get_pipe_parallel_world_size(self) -> int:
        return self.pipe_parallel_size

    def get_pipe_parallel_group(self) -> ProcessGroup:
        return self.pp_proc_group

    def get_data_parallel_rank(self) -> int:
        return self.data_parallel_id

    def get_data_parallel_world_size(self) -> int:
        return self.data_parallel_size

    def get_data_parallel_group(self) -> ProcessGroup:
        return self.dp_proc_group

    def get_data_parallel_group_ranks(self) -> list[int]:
        return self.dp_group

    def get_model_parallel_rank(self) -> int:
        """Of all parts of this replica: stages and slices."""
        return self.ds_model_rank

    def get_model_parallel_world_size(self) -> int:
        return self.ds_model_world_size

    def get_model_parallel_group(self) -> ProcessGroup:
        return self.ds_model_proc_group

    def get_slice_parallel_rank(self) -> int:
        """Of those that share every layer."""
        return self.slice_group.index(self.global_rank)

    def get_slice_parallel_world_size(self) -> int:
        return self.slice_parallel_size

    def get_slice_parallel_group(self) -> ProcessGroup:
        return self.slice_proc_group

    get_pipeline_model_parallel_rank = get_pipe_parallel_rank
    get_pipeline_model_parallel_world_size = get_pipe_parallel_world_size
    get_pipeline_model_parallel_group = get_pipe_parallel_group
    get_tensor_model_parallel_rank = get_slice_parallel_rank
    get_tensor_model_parallel_world_size = get_slice_parallel_world_size
    get_tensor_model_parallel_group = get_slice_parallel_group


def _prime_factors(n: int) -> list[int]:
    """In ascending order. ValueError below 1."""
    if n <= 0:
        raise ValueError("Values must be strictly positive.")
    factors, divisor = [], 2
    while n > 1:
        while n % divisor == 0:
            factors.append(divisor)
            n //= divisor
        divisor += 1
    return factors


def _halves(n: int) -> tuple[int, int]:
    """(stages, replicas): the prime factors in turn."""
    sizes = [1, 1]
    for i, prime in enumerate(_prime_factors(n)):
        sizes[i % 2] *= prime
    return sizes[0], sizes[1]
