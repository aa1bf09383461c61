"""What the graders of `exercises/` share: run an answer on real ranks, and say what is wrong in the learner's terms.

A chapter NN_name has

    solutions/NN_name.py                   written by hand: the tasks (public functions and classes) and HINTS
    exercises/NN_name/exercise.py          the stub made from it: python -m refimpl.grading.stubs
    exercises/NN_name/test_*.py            the graders, written once for every answer; a long one is cut by task
    tests/mutants/NN_name/*.py             wrong answers, less what they have of the solution: to be rejected, with why

In a solution every public function and every method is a task, whose body the stub replaces, unless its `def` line ends
with `# given`. HINTS maps a task to its hints, from the vaguest to the plainest.

A grader is a function that runs on every rank, once for each number of ranks, with a process per rank:

    @on_ranks(2, 3, 4)                                         # test_NAME grades the task NAME
    def test_ring_all_gather(answer: Answer, group: WatchedGroup) -> None:
        for size in (1, 5):
            case(f"{size} elements a rank")                    # named in the report, and restarts the clock
            mine = torch.arange(size) + 10.0 * group.rank
            whole = answer.ring_all_gather(group, mine)
            equal(whole, expected, "the gathered tensor", known={"only your own chunk": ...})
        same_traffic(group, oracle, "ring_all_gather")         # bytes and calls, side by side with the expected

Answers get `group` or a `group.fresh()` one with an empty ledger; the grader itself uses `group.oracle()`, where only
calls are to be counted `group.tally()`, which moves nothing, and `group.everyone(obj)`, which gathers over connections
of its own.

A result can be right and the answer wrong: see that nothing more stays alive (`Kept`, begun before the answer makes
anything), not even the result itself for a backward that needs none of it (`let_go`), that a shard has memory of its
own (`own_memory`), that inputs keep their values and order (`untouched`), that what is to be filled stays where it is
(`in_place`) and is filled there (`places`), that bf16 travels as bf16 (`same_traffic(..., itemsize=2)`).
`torch.empty` gives NaN here, so that a padding nobody wrote is seen; so does a buffer of a transfer under way.

Its oracle is refimpl, or the same sum made on one process; never a stored number. Whatever the learner's code does
(raise, loop, exit, hang, not parse) ends in seconds as one short text. `require(condition, headline, *details)` and
`Wrong(headline, *details)` say the rest; a headline tells the mistake, not the symptom.

A mutant is a file with one wrong task, and two lines in its docstring, `task: NAME` and `says: WORDS OF THE REPORT`.

    rank.py        in a rank: load the answer, call the grader, put errors into the learner's terms
    grade.py       in the caller: choose the ranks, collect a Verdict
    compare.py     Wrong, equal, recognised misconceptions
    memory.py      what stays alive, views of more, changed inputs, moved outputs
    lines.py       how many lines of Python run
    process.py     what an answer sets for its process, put back before the next
    cheats.py      ways round an exercise, by name, as the text tells
    calls.py       the same, as an answer calls them while it runs
    kernels.py     Triton kernels in the interpreter: bytes, products, lanes that leave their tensor, races
    compiled.py    what Triton's compiler refuses and its interpreter takes
    probes.py      kernels of the graders' own
    traffic.py     WatchedGroup, transcripts
    undefined.py   what C leaves open, made to be seen: the integer that NaN becomes
    late.py        what `async_op=True` begins ends when it is waited for; till then what is to be filled is NaN
    exchange.py    numbers that add exactly, what forward and backward sent
    drive.py       a disk that takes whole pages and does everything as late as it may
    live.py        one task at once, on warm ranks: for `%%task` and `refimpl exercise watch`
    verdict.py     pass, fail or todo, and why
    chapters.py    where the files are, which tasks they hold and which are still to do
    stubs.py       stubs from solutions
    hints.py       one hint more each time
    progress.py    results and hints given, kept in the user's data folder
    plugin.py      pytest: options, todo, summary
"""
