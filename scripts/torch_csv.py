"""Loads tables that `paceline export --csv` wrote with PyTorch's own loader, and prints a line for each.

    python scripts/torch_csv.py tests/torch/*.csv
    python scripts/torch_csv.py --dump tests/torch      writes PyTorch's own schedules, for `paceline import` to read

The name says what is in a table: NAME.compute.csv (compute_only) or NAME.comms.csv (compute_comms). A compute table is
lowered and run by PyTorch's simulator; beside it, the comms table must be that lowering. A table with `U` cells must
be refused. Needs PyTorch as in TORCH below: other versions may read tables differently.
"""

import pathlib
import re
import sys
import types

import torch
from torch.distributed.pipelining import schedules

TORCH = "2.9.1"
# Its schedules by the names of our files.
OWN = {
    "interleaved-1f1b": schedules.ScheduleInterleaved1F1B,
    "interleaved-zb": schedules.ScheduleInterleavedZeroBubble,
    "looped-bfs": schedules.ScheduleLoopedBFS,
    "zbv": schedules.ScheduleZBVZeroBubble,
    "dualpipev": schedules.ScheduleDualPipeV,
}


def cells(path):
    """The table's actions as (stage, letters, number), by row."""
    with open(path, newline="") as file:
        rows = file.read().split("\r\n")[:-1]
    found = [re.findall(r"(\d+)([A-Z_]+)(\d+)", row) for row in rows]
    return [[(int(s), letters, int(n)) for s, letters, n in row] for row in found]


def runtime(rows):
    """PyTorch's schedule runtime for the table's ranks, stages and micro-batches, without workers."""
    made = object.__new__(schedules._PipelineScheduleRuntime)
    actions = [action for row in rows for action in row]
    made.pp_group_size = len(rows)
    made._num_stages = 1 + max(stage for stage, _, _ in actions)
    made._n_microbatches = 1 + max(n for _, letters, n in actions if letters == "F")
    made._stages = []
    made.pipeline_order = {}
    return made


def lowered(made):
    """By rank: the table's actions with the sends and receives that PyTorch adds, and without what it adds for sharded data
    parallelism (which takes turns in its lowering)."""
    compute = {rank: [a for a in row if a is not None] for rank, row in made.pipeline_order.items()}
    home = made.stage_index_to_group_rank
    return schedules._add_send_recv(compute, stage_to_rank=lambda stage: home[stage], num_stages=made._num_stages)


def load(path):
    rows = cells(path)
    made = runtime(rows)
    comms = path.name.endswith(".comms.csv")
    if any(letters == "U" for row in rows for _, letters, _ in row):
        try:
            made._load_csv(str(path), format="compute_comms" if comms else "compute_only")
        except RuntimeError as error:
            assert "Invalid action string" in str(error), error
            return "refused, as it must be"
        raise AssertionError("PyTorch took a table with U cells")
    made._load_csv(str(path), format="compute_comms" if comms else "compute_only")
    if comms:
        order = made.pipeline_order_with_comms
        # The simulator does not know the actions of sharded data parallelism.
        sharding = (schedules.UNSHARD, schedules.RESHARD)
        made.pipeline_order_with_comms = {r: [a for a in order[r] if a.computation_type not in sharding] for r in order}
    else:
        made.pipeline_order_with_comms = lowered(made)
    steps = max(len(row) for row in made._simulate().values())
    twin = path.with_name(path.name.replace(".compute.csv", ".comms.csv"))
    if not comms and twin.exists() and not path.name.startswith("pytorch-"):
        written = runtime(rows)
        written._load_csv(str(twin), format="compute_comms")
        assert lowered(made) == written.pipeline_order_with_comms, f"{twin} is not PyTorch's lowering"
    return f"{made.pp_group_size} ranks, {made._n_microbatches} micro-batches, {steps} steps"


def dump(folder):
    """Writes PyTorch's schedules of several stages a rank in both formats: pytorch-NAME.compute.csv and .comms.csv."""
    ranks, microbatches = 3, 6
    stage = types.SimpleNamespace(submod=None)
    for name, kind in OWN.items():
        made = object.__new__(kind)
        made.pp_group_size, made._n_microbatches = ranks, microbatches
        made._num_stages = made.num_stages = 2 * ranks
        made.n_local_stages, made._stages = 2, [stage, stage]
        made.number_of_rounds = microbatches // ranks
        made.microbatches_per_round = microbatches // made.number_of_rounds
        made.pipeline_order = {rank: made._calculate_single_rank_operations(rank) for rank in range(ranks)}
        if name == "interleaved-zb":
            made.pipeline_order = made._add_bubbles_to_actions(made._num_stages)
        schedules._PipelineScheduleRuntime._dump_csv(made, folder / f"pytorch-{name}.compute.csv", "compute_only")
        rows = cells(folder / f"pytorch-{name}.compute.csv")
        lower = runtime(rows)
        lower._load_csv(str(folder / f"pytorch-{name}.compute.csv"))
        lower._dump_csv(folder / f"pytorch-{name}.comms.csv", "compute_comms")


def main():
    if torch.__version__.split("+")[0] != TORCH:
        sys.exit(f"this needs PyTorch {TORCH}, here is {torch.__version__}")
    if sys.argv[1:2] == ["--dump"]:
        dump(pathlib.Path(sys.argv[2]))
        return
    paths = [pathlib.Path(name) for name in sys.argv[1:]]
    if not paths:
        sys.exit(__doc__)
    for path in paths:
        print(f"OK {path.name}: {load(path)}")


if __name__ == "__main__":
    main()
