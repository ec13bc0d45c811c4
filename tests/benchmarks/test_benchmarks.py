"""The benchmarks' own logic: no number without a check, and no rival breaks a run."""

from dataclasses import replace

import pytest

from benchmarks import rivals
from benchmarks.contest import OURS, Contender, as_record, race
from benchmarks.kernels import pad_job, returns_job
from benchmarks.packing import (
    bench_extend,
    bench_micro_batches,
    bench_pack,
    bench_promises,
    bench_trainer_inputs,
    bench_tree,
    bench_tree_model,
    plan_job,
)
from benchmarks.packing.whole_job import RIVALS, assert_same_fields, by_lists, by_numpy_again
from benchmarks.promises import LOADED, SAVED, targets
from benchmarks.tables import render
from benchmarks.workloads import (
    MULTI_TURN,
    WORKLOADS,
    as_lists,
    conversations,
)
from tests.benchmarks.contest_cases import LENGTHS, SMALL, contest, results_of, says
from tests.support.slow import slow_after

# --- the contest


def test_a_result_that_was_not_checked_or_failed_its_check_has_no_number():
    entries = race(
        contest(),
        [
            Contender(OURS, says("right"), "all"),
            Contender("liar", says("wrong"), "all"),
            Contender("absent", None, "all", missing="not installed (absent)"),
        ],
    )
    ours, liar, absent = entries
    assert ours.checked
    assert ours.best > 0
    assert (liar.best, liar.seconds) == (None, [])
    assert "wrong result, not timed" in liar.note
    assert (absent.best, absent.note) == (None, "not installed (absent)")
    entries[1].seconds.append(1.0)  # not even if something had timed it
    record = as_record(contest(), entries)
    assert [entry["best_ms"] is None for entry in record["entries"]] == [False, True, True]
    table = render(results_of(record))
    row = next(line for line in table.splitlines() if line.startswith("| liar"))
    assert row.split("|")[2].strip() == "-"
    assert "liar: wrong result, not timed: wrong is not right: A." in table
    assert "absent: not installed (absent): A." in table


def test_a_wrong_result_or_an_error_of_ours_fails_the_benchmark_and_of_a_rival_is_noted():
    def fail():
        raise RuntimeError("no such operator\nat line 1")

    with pytest.raises(AssertionError):
        race(contest(), [Contender(f"{OURS}, merged", says("wrong"), "all")])
    with pytest.raises(RuntimeError, match="no such operator"):
        race(contest(), [Contender(OURS, fail, "all")])
    (entry,) = race(contest(), [Contender("rival", fail, "all")])
    assert (entry.best, entry.note) == (None, "failed: no such operator")


def test_contenders_take_turns_and_each_round_is_released():
    calls = []

    def noting(name):
        return Contender(
            name,
            lambda: calls.append(name) or "right",
            "all",
            release=lambda: calls.append(f"{name} released"),
        )

    race(contest(rounds=2), [noting("a"), noting("b")])
    assert calls == ["a", "a released", "b", "b released"] * 3


# --- rivals


def test_a_package_that_is_missing_or_does_not_load_is_named_and_its_contender_never_made(
    tmp_path, monkeypatch
):
    (tmp_path / "breaks_on_import.py").write_text("raise OSError('no such symbol')")
    monkeypatch.syspath_prepend(tmp_path)
    for module, said in (
        ("no_such_package_of_any_kind", "not installed (no_such_package_of_any_kind)"),
        ("breaks_on_import", "does not load here: no such symbol"),
    ):
        missing = rivals.contender(module, "rival", pytest.fail, "all")
        assert (missing.work, missing.missing) == (None, said)


# --- the jobs, each contender against the reference


@pytest.mark.parametrize("workload", WORKLOADS)
def test_every_way_of_packing_writes_the_same_fields(workload):
    arrays = conversations(workload, SMALL)
    expected = by_lists(arrays)
    again = by_numpy_again()
    for given in (arrays, as_lists(arrays)):
        for way in (*RIVALS.values(), again, again):
            assert_same_fields(way(given), expected)
        assert_same_fields(bench_pack.end_to_end(given)(), expected)


@pytest.mark.parametrize("job", [bench_pack.FROM_ARRAYS, bench_pack.FROM_LISTS])
def test_everybody_who_takes_part_in_packing_passes_the_check(job):
    arrays, lists, expected = bench_pack.inputs(MULTI_TURN, 0.01)
    given = arrays if job == bench_pack.FROM_ARRAYS else lists
    entries = race(*bench_pack.whole_job(job, MULTI_TURN, given, expected))
    assert [entry.contender for entry in entries if not entry.best] == []
    bench_pack.inputs.cache_clear()


@pytest.mark.parametrize("workload", [WORKLOADS[2], MULTI_TURN])
def test_everybody_beside_a_promise_passes_the_check(workload, tmp_path):
    contests = [
        bench_promises.from_arrays(workload, 0.01),
        bench_promises.from_lists(workload, 0.01),
        *(bench_promises.of_files(job, workload, tmp_path, 0.02) for job in (SAVED, LOADED)),
        *(bench_promises.rows_of(trainer, 0.005) for trainer in ("SkyRL", "verl")),
    ]
    records = []
    for held, entrants in contests:
        entries = race(held, entrants)
        missing = [one.name for one in entrants if one.missing]
        assert [one.contender for one in entries if not one.best] == missing
        records.append(as_record(held, entries))
    bench_promises.inputs.cache_clear()
    rows = targets(records)
    assert len(rows) == len(contests)
    assert {row[-1] for row in rows} <= {"yes", "no", ""}
    assert "| promise" in render(results_of(*records))


@pytest.mark.parametrize("workload", bench_tree.WORKLOADS)
def test_everybody_who_packs_trees_passes_the_check(workload):
    held, entrants = bench_tree.contest(workload, 0.01)
    peers = (bench_tree.TREE_ROW, bench_tree.TRIES)
    entries = race(held, [one for one in entrants if one.name not in peers])
    assert [entry.contender for entry in entries if not entry.best] == []


@pytest.mark.parametrize("workload", slow_after(2, [*bench_tree_model.WORKLOADS][::-1]))
def test_every_way_of_computing_a_tree_gives_the_gradients_of_rows(workload):
    held, entrants, facts = bench_tree_model.contest(workload, 0.1)
    record = as_record(held, race(replace(held, rounds=1), entrants))
    assert [entry["contender"] for entry in record["entries"] if not entry["best_ms"]] == []
    said = facts()["K/V rows that are gathered a layer: ours / TRL's"].replace(",", "").split(" / ")
    if bench_tree.has_trl():  # its row has each node at least once
        ours, theirs = map(int, said)
        assert theirs >= max(ours, int(entrants[2].wrote.replace(",", "")))
    turns, _, tree = record["entries"][:3]
    turns["best_ms"], tree["best_ms"] = 9.0, 2.0
    assert bench_tree_model.share_of_ratio(record, bench_tree_model.TURNS, 3.0) == 1.5


def test_extending_is_compared_with_copies_of_as_many_bytes():
    entries = race(*bench_extend.contest(MULTI_TURN, 0.01, rounds=1))
    assert all(entry.best for entry in entries)
    ids, logprobs = bench_extend.pieces_of(conversations(WORKLOADS[1], SMALL))
    assert sum(map(len, ids)) == 32_768
    assert len(ids[1]) == len(logprobs[0])


@pytest.mark.parametrize("job", [bench_trainer_inputs.FROM_ARRAYS, bench_trainer_inputs.FROM_LISTS])
def test_collators_agree_or_are_missing(job):
    entries = race(*bench_trainer_inputs.contest(job, MULTI_TURN, SMALL))
    assert all(entry.best or "not installed" in entry.note for entry in entries)
    bench_trainer_inputs.inputs.cache_clear()


@pytest.mark.parametrize("make", [returns_job.contest, pad_job.pad_contest, pad_job.unpad_contest])
def test_rivals_of_the_kernels_agree_or_are_missing(make):
    for entry in race(*make("small", LENGTHS)):
        assert entry.best or "not installed" in entry.note or "not load" in entry.note, entry


# --- micro-batches and plans


@pytest.mark.parametrize("workload", [WORKLOADS[2], MULTI_TURN])
@pytest.mark.parametrize("job", bench_micro_batches.MULTIPLES)
def test_everybody_writes_the_same_micro_batches(job, workload):
    entries = race(*bench_micro_batches.contest(job, workload, 0.01))
    assert [entry.contender for entry in entries if not entry.best] == []
    bench_micro_batches.inputs.cache_clear()


@pytest.mark.parametrize("mix", plan_job.MIXES)
@pytest.mark.parametrize("make", [plan_job.fewest_contest, plan_job.even_contest])
def test_every_way_of_planning_passes_or_is_missing(mix, make):
    noted = {}
    for entry in race(*make(mix, 300, noted, rounds=1)):
        assert entry.best or "not installed" in entry.note, entry
        assert entry.contender in noted or not entry.best
    assert noted[OURS]
