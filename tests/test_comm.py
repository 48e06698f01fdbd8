"""Collectives, the halo plan, the rotation of rounds, and the buffers they use."""

from __future__ import annotations

import math
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import WorkerPool, blocking, run_threads
from harness.covering import by_pairs
from harness.late import run_late

import sar
from sar.comm import LocalGroup, current_group, exchange_counts, legacy, use_group
from sar.kernels import add_rows
from sar.stream import GradientMessages, GradientReturn, HaloPlan, build_halo_plan, fetch


def both(size, case, processes, *args):
    """The same case in threads and over gloo; returns both lists of results."""
    return run_threads(size, case, *args), processes.run(size, case, *args)


DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.int32]


def case_collectives(group):
    rank, size = group.rank, group.size
    results = {}
    for op in ("sum", "max", "min"):
        tensor = torch.tensor([[rank + 1.0], [-rank]]).t()  # not contiguous
        assert group.all_reduce(tensor, op) is tensor
        results[op] = tensor.view(-1).tolist()
    gathered = group.all_gather(torch.tensor([[rank, rank * 10], [0, 0]]).t())
    results["gathered"] = [part[:, 0].tolist() for part in gathered]
    tensor = torch.full((2, 2), float(rank))
    assert group.broadcast(tensor, src=size - 1) is tensor
    results["broadcast"] = tensor.unique().tolist()
    counts = [(rank + peer) % 3 for peer in range(size)]
    rows = torch.tensor([[rank] * sum(counts), [p for p in range(size) for _ in range(counts[p])]])
    for dtype in DTYPES:
        found = group.all_to_all(rows.t().to(dtype), counts, counts)
        assert found.dtype == dtype
        results[str(dtype)] = found.tolist()
    results["counts"] = exchange_counts(group, [10 * rank + peer for peer in range(size)])
    return results


@pytest.mark.parametrize("size", [1, 2, 4])
def test_collectives(size: int, either: WorkerPool) -> None:
    for results in both(size, case_collectives, either):
        for rank, got in enumerate(results):
            assert got["sum"] == [sum(range(1, size + 1)), -sum(range(size))]
            assert got["max"] == [size, 0]
            assert got["min"] == [1, 1 - size]
            assert got["gathered"] == [[r, 10 * r] for r in range(size)]
            assert got["broadcast"] == [size - 1]
            rows = [[p, rank] for p in range(size) for _ in range((rank + p) % 3)]
            assert all(got[str(dtype)] == rows for dtype in DTYPES)
            assert got["counts"] == [10 * peer + rank for peer in range(size)]


def test_unknown_reduction_names_what_came() -> None:
    with pytest.raises(ValueError, match="op: got 'avg', expected 'sum', 'max' or 'min'"):
        LocalGroup().all_reduce(torch.zeros(1), "avg")


def test_current_group_is_one_rank_until_told_otherwise() -> None:
    group = current_group()
    assert (group.rank, group.size) == (0, 1)
    other = LocalGroup()
    with use_group(other):
        assert current_group() is other
        with use_group(group):
            assert current_group() is group
        assert current_group() is other
    assert current_group() is group
    assert run_threads(2, lambda g: current_group() is g) == [True, True]


def case_agree(group, errors):
    try:
        group.agree(errors[group.rank], "loading")
    except Exception as error:
        cause = error.__cause__
        return type(error).__name__, str(error), None if cause is None else str(cause)
    return None


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ValueError("bad width 7"), "ValueError"),
        (sar.PartitionError("bad width 7"), "PartitionError"),
        (sar.NotSupportedError("bad width 7"), "NotSupportedError"),
        (KeyError("bad width 7"), "KeyError"),
        (FileNotFoundError("bad width 7"), "FileNotFoundError"),
        (pytest.UsageError("bad width 7"), "SarError"),  # a class that other ranks cannot know
    ],
)
def test_agreed_errors_are_equal_on_all_ranks(
    error: Exception, kind: str, processes: WorkerPool
) -> None:
    assert both(3, case_agree, processes, [None] * 3) == ([None] * 3, [None] * 3)
    errors = [None, error, ValueError("later")]
    for results in both(3, case_agree, processes, errors):
        assert {result[0] for result in results} == {kind}
        assert len({result[1] for result in results}) == 1
        assert "rank 1" in results[0][1] and "loading" in results[0][1]
        assert "bad width 7" in results[0][1]
        assert "bad width 7" in results[1][2]  # the rank at fault keeps its own stack


def case_alike(group, options):
    try:
        group.agree(None, "loading", {"k": options[group.rank]})
    except ValueError as error:
        return str(error)
    return ""


def test_options_that_differ_are_named_on_all_ranks() -> None:
    assert run_threads(3, case_alike, [1, 1, 1]) == [""] * 3
    (message,) = set(run_threads(3, case_alike, [1, 1, 2]))
    assert message == "loading: k: rank 2 got 2, rank 0 got 1; expected the same on all ranks"
    one, other = ("x" * 5000 + end for end in "ab")  # behind what a message has room for
    (message,) = set(run_threads(3, case_alike, [one, one, other]))
    assert message.startswith("loading: k: rank 2 got 'xxx")


def test_agreement_survives_long_and_foreign_text() -> None:
    text = "ünïcödé " * 1000
    results = run_threads(2, case_agree, [None, ValueError(text)])
    assert results[0][1].startswith("rank 1: loading: ünïcödé")
    assert 100 < len(results[0][1]) <= 1024


# Halo plan and rotation. Rank r owns the rows r * 100 + 0 .. NUM - 1 and wants from each peer an
# own pattern, so that every list, count and offset differs between pairs.

NUM = 7


def wanted_rows(rank: int, peer: int, pattern: str) -> list[int]:
    if rank == peer or pattern == "nothing":
        return []
    if pattern == "everything":
        return list(range(NUM))
    if pattern == "all but one":
        return [row for row in range(NUM) if row != (rank + peer) % NUM]
    if pattern == "one pair":
        return [2, 5] if (rank, peer) == (0, 1) else []
    return [row for row in range(NUM) if (row * 3 + rank * 5 + peer * 7) % 4 < 2]


def make_plan(group, pattern) -> HaloPlan:
    wanted = [torch.tensor(wanted_rows(group.rank, p, pattern)).long() for p in range(group.size)]
    return build_halo_plan(group, wanted, NUM)


def owned(rank: int) -> torch.Tensor:
    return torch.stack([torch.arange(NUM) + 100.0 * rank, -torch.arange(NUM) - 100.0 * rank], 1)


def case_rotation(group, pattern, num_rounds, keep):
    plan = make_plan(group, pattern)
    steps = plan.rounds(plan.num_rounds(sar.Policy(rounds=num_rounds), 16))
    assert len(steps) == min(num_rounds, max(1, group.size - 1)) or group.size == 1
    rows = owned(group.rank).double()
    seen, kept = {}, []
    for step, halo in fetch(plan, rows, steps, keep=keep):
        kept.append((halo, halo.clone()))
        for peer, part in zip(step.sources, halo.split(step.recv_rows), strict=True):
            assert peer not in seen, "a peer came twice"
            seen[peer] = part.tolist()
    if keep:
        assert all(torch.equal(halo, copy) for halo, copy in kept)
    asked = []

    def local() -> torch.Tensor:
        asked.append(True)
        return torch.full((NUM, 2), 0.5, dtype=torch.float64)

    back = GradientReturn(GradientMessages(plan, 2, torch.float64, add_rows), local)
    for step in steps:
        grads = back.buffer(step)
        start = 0
        for peer in step.sources:  # the gradient of row i of a peer is i + 1, and my rank + 1
            for row in wanted_rows(group.rank, peer, pattern):
                grads[start] = torch.tensor([row + 1.0, group.rank + 1.0])
                start += 1
        assert start == step.num_recv
        back.send(step, grads)
    home = back.finish()
    assert asked == [True], "the owned rows' own gradient is computed once"
    return seen, home.tolist()


def check_rotation(size: int, pattern: str, results: list) -> None:
    for rank, (seen, home) in enumerate(results):
        peers = [p for p in range(size) if p != rank]
        assert seen == {
            p: [owned(p)[row].tolist() for row in wanted_rows(rank, p, pattern)] for p in peers
        }
        expected = [[0.5, 0.5] for _ in range(NUM)]
        for peer in peers:
            for row in wanted_rows(peer, rank, pattern):
                expected[row][0] += row + 1.0
                expected[row][1] += peer + 1.0
        assert home == expected


@by_pairs(
    size=[1, 2, 3, 4, 8],
    pattern=["mixed", "everything", "all but one", "nothing", "one pair"],
    keep=[False, True],
    run=[run_threads, run_late],
)
def test_rotation_brings_each_row_and_gradient(
    size: int, pattern: str, keep: bool, run: Any
) -> None:
    for num_rounds in sorted({1, 2, max(1, size // 2), max(1, size - 1), 20}):
        check_rotation(size, pattern, run(size, case_rotation, pattern, num_rounds, keep))


@pytest.mark.parametrize("num_rounds", [1, 2, 3])
def test_rotation_over_processes(num_rounds: int, either: WorkerPool) -> None:
    for pattern in ("mixed", "everything"):
        results = either.run(4, case_rotation, pattern, num_rounds, False)
        check_rotation(4, pattern, results)


def case_window(group, num_rounds):
    """Bytes that stay for reuse after some streams."""
    plan = make_plan(group, "everything")
    for _ in range(3):
        for _ in fetch(plan, owned(group.rank), plan.rounds(num_rounds)):
            pass
    return group.pool.idle_bytes / group.pool.limit


def test_buffers_are_reused_and_bounded() -> None:
    size, row_bytes = 8, 2 * 4
    for num_rounds in (1, 2, 7):
        for idle in run_threads(size, case_window, num_rounds):
            largest = math.ceil((size - 1) / num_rounds) * NUM * row_bytes
            assert 0 < idle <= largest


def case_rows_to_oneself(group):
    before = group.counters.sent_bytes, group.counters.received_bytes
    counts = [2 + peer for peer in range(group.size)]
    group.all_to_all(torch.zeros(sum(counts), 3), counts, [2 + group.rank] * group.size)
    after = group.counters.sent_bytes, group.counters.received_bytes
    return tuple(b - a for a, b in zip(before, after))


def test_rows_to_oneself_are_no_traffic() -> None:
    width = 3 * 4
    for rank, (sent, received) in enumerate(run_threads(3, case_rows_to_oneself)):
        assert sent == width * (2 + 3 + 4 - (2 + rank))
        assert received == width * 2 * (2 + rank)


def test_wrong_row_counts_are_refused() -> None:
    """One rank expects more rows than its peer sends: an error, not a hang or garbage."""

    def case(group):
        counts = [0, 2] if group.rank == 0 else [2, 0]
        expected = [0, 3] if group.rank == 0 else [2, 0]
        group.all_to_all(torch.zeros(2, 1), counts, expected)

    with pytest.raises(sar.CommError, match="expected"):
        run_threads(2, case)


# The original library's exchanges.


def case_legacy(group, largest):
    rank, size = group.rank, group.size
    sar.Config.max_collective_size = largest
    send = [torch.full((rank + 1, 2), float(10 * rank + p)) for p in range(size)]
    receive = [torch.zeros(p + 1, 2) for p in range(size)]
    legacy.all_to_all(receive, send)
    exchanged = legacy.exchange_tensors([part.clone() for part in send])
    known = legacy.exchange_tensors(send, [p + 1 for p in range(size)])
    single = torch.zeros(3)
    right, left = (rank + 1) % size, (rank - 1) % size
    legacy.exchange_single_tensor(left, right, single, torch.full((3,), float(rank)))
    total = torch.tensor([1.0])
    legacy.all_reduce(total)
    as_lists = [[part.tolist() for part in parts] for parts in (receive, exchanged, known)]
    return as_lists, single.tolist(), total.item()


def test_exchanges_with_the_original_names(
    processes: WorkerPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sar.Config, "max_collective_size", 0)
    found = [run_threads(3, case_legacy, 3)]
    found += [processes.run(3, case_legacy, largest) for largest in (3, 0)]  # as it was, at last
    for ranks in found:
        for rank, (lists, single, total) in enumerate(ranks):
            expected = [[[float(10 * p + rank)] * 2] * (p + 1) for p in range(3)]
            assert lists == [expected] * 3
            assert single == [float((rank - 1) % 3)] * 3
            assert total == 3


def test_exchanges_are_cut_to_the_largest_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """18 elements in two exchanges of at most 10; of 40 in four, where 10 rows make 3, 3, 2, 2."""
    monkeypatch.setattr(sar.Config, "max_collective_size", 10)

    def case(group, rows):
        send = [torch.arange(float(rows[abs(p - group.rank)])) for p in range(2)]
        receive = [torch.zeros_like(part) for part in send]
        sizes, whole = [], group.all_to_all

        def counting(values, sent, received):
            sizes.append(sum(sent) + sum(received))
            return whole(values, sent, received)

        group.all_to_all = counting
        legacy.all_to_all(receive, send)
        return sizes, all(map(torch.equal, receive, send))

    assert run_threads(2, case, (5, 4)) == [([10, 8], True)] * 2
    assert run_threads(2, case, (10, 10)) == [([12, 12, 8, 8], True)] * 2


def test_exchanges_name_bad_lists() -> None:
    with pytest.raises(ValueError, match="one per rank"):
        legacy.exchange_tensors([torch.zeros(1), torch.zeros(1)])
    with pytest.raises(ValueError, match="SUM, MAX or MIN"):
        legacy.all_reduce(torch.zeros(1), dist.ReduceOp.PRODUCT)


def test_initialize_refuses_bad_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with monkeypatch.context() as half:
        half.setenv("WORLD_SIZE", "2")
        with pytest.raises(ValueError, match="^rank: got nothing, .* RANK from torchrun"):
            sar.initialize_comms()
    with pytest.raises(ValueError, match="WORLD_SIZE"):
        sar.initialize_comms(0)
    for call in (
        lambda: sar.initialize_comms(3, 2),
        lambda: sar.initialize_comms(rank=3, world_size=2, comm_device="cpu"),
        lambda: sar.initialize_comms(_rank=3, _world_size=2, _comm_device="cpu"),  # as old scripts
    ):
        with pytest.raises(ValueError, match="got 3 of 2"):
            call()
    with pytest.raises(TypeError, match="rank: got it twice"):
        sar.initialize_comms(rank=3, _rank=3)
    with pytest.raises(ValueError, match="'smoke'.*gloo, nccl, ccl, mpi"):
        sar.initialize_comms(0, 1, backend="smoke")
    with pytest.raises(ValueError, match="timeout"):
        sar.initialize_comms(0, 1, backend="gloo", timeout=0)
    monkeypatch.setitem(sys.modules, blocking.NAME, None)  # also where it is installed
    with pytest.raises(sar.MissingDependencyError, match=blocking.NAME):
        sar.initialize_comms(0, 1, backend="ccl")
    if not dist.is_mpi_available():
        with pytest.raises(sar.MissingDependencyError, match="mpi"):
            sar.initialize_comms(0, 1, backend="mpi")
    monkeypatch.setenv("MASTER_PORT", "abc")
    with pytest.raises(ValueError, match="MASTER_PORT: got 'abc', expected a non-negative integer"):
        sar.initialize_comms(0, 1, backend="gloo")
    with pytest.raises(ValueError, match="got 65536, expected 0 to 65535"):
        sar.initialize_comms(0, 1, backend="gloo", master_port_number=65536)
    with pytest.raises(ValueError, match="got 0, any free port, which only one rank alone"):
        sar.initialize_comms(0, 2, backend="gloo", master_port_number=0)
    for call in (sar.rank, sar.world_size, sar.comm_device):
        with pytest.raises(sar.CommError, match="initialize_comms"):
            call()


def test_waiting_for_an_address_ends(tmp_path: Path) -> None:
    with pytest.raises(sar.CommError, match="ip_file: got no address in .*none' for 0.1 seconds"):
        sar.nfs_ip_init(1, str(tmp_path / "none"), timeout=0.1)


def case_joined(group):
    assert (sar.rank(), sar.world_size()) == (group.rank, 2)
    assert (str(sar.comm_device()), sar.comm.backend()) == ("cpu", dist.get_backend())
    with pytest.raises(sar.CommError, match="second time, expected sar.shutdown()"):
        sar.initialize_comms(group.rank, group.size)
    with pytest.raises(ValueError, match="got . of 5, but the process group says rank . of 2"):
        sar.initialize_comms(group.rank, 5)
    assert sar.comm.current_group() is group
    return float(group.all_reduce(torch.ones(1)))


def test_a_process_joins_once(processes: WorkerPool) -> None:
    assert processes.run(2, case_joined) == [2.0, 2.0]


def case_users_group(group):
    """A default group that the user made outlives ``shutdown``, and can be joined again."""

    def threads() -> int:
        return len(os.listdir("/proc/self/task"))

    def sum_of_ones() -> float:
        ones = torch.ones(1)
        dist.all_reduce(ones)
        return float(ones)

    before = threads()
    sar.shutdown()
    kept = sum_of_ones()
    fewer = threads() < before or group.backend == "ccl"  # whose are the process'
    for use in (
        lambda: group.all_reduce(torch.ones(1)),
        lambda: group.all_gather(torch.ones(1)),
        lambda: group.broadcast(torch.ones(1)),
        lambda: group.all_to_all(torch.ones(2), [1, 1], [1, 1]),
        lambda: group.begin_sum(torch.ones(1)),
        lambda: group.prepare_sums(),
    ):
        with pytest.raises(sar.CommError, match="was shut down"):
            use()
    sar.shutdown()  # a no-op
    again = sar.initialize_comms(group.rank, group.size, timeout=30)
    return kept, fewer, float(again.all_reduce(torch.ones(1)))


def case_own_group(group):
    """A default group that ``initialize_comms`` made ends with it; the user's next one does not."""

    def join() -> None:
        sar.initialize_comms(0, 1, "127.0.0.1", "gloo", master_port_number=0)

    def users() -> None:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

    sar.shutdown()
    dist.destroy_process_group()
    join()
    sar.shutdown()
    found = [dist.is_initialized()]
    join()
    dist.destroy_process_group()
    users()
    sar.shutdown()
    found.append(dist.is_initialized())
    sar.initialize_comms(0, 1, backend="gloo")
    return found


def test_shutdown_ends_what_initialize_made(processes: WorkerPool) -> None:
    assert processes.run(2, case_users_group) == [(2.0, True, 2.0)] * 2
    assert processes.run(1, case_own_group) == [[False, True]]


@pytest.mark.parametrize("already", [None, "eth9"])
def test_gloo_listens_where_the_master_is(already: str | None, monkeypatch: Any) -> None:
    """Not at the address of the host's own name, which others may reach; a user's choice stays."""
    from sar.comm import network

    def chosen(master: str, **launched: str) -> str:
        for name in ("SAR_SOCKET_NAME", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
            monkeypatch.delenv(name, raising=False)
        for name, value in launched.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", already or "")
        if already is None:
            monkeypatch.delenv("GLOO_SOCKET_IFNAME")
        own = network.choose_interface(master)
        assert own == ([] if already else ["GLOO_SOCKET_IFNAME"])
        return os.environ["GLOO_SOCKET_IFNAME"]

    assert chosen("127.0.0.1") == (already or "lo")
    monkeypatch.setattr(network, "interface_of", lambda address: "eth3")
    assert chosen("192.0.2.1") == (already or "eth3")
    assert chosen("192.0.2.1", WORLD_SIZE="4", LOCAL_WORLD_SIZE="2") == (already or "eth3")
    assert chosen("192.0.2.1", WORLD_SIZE="4", LOCAL_WORLD_SIZE="4") == (already or "lo")
