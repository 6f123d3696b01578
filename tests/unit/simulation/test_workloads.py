"""Workloads: synthetic requests, traces in Mooncake's format, agent sessions."""

from __future__ import annotations

import json
import math
import random
import statistics
from typing import TYPE_CHECKING, Any

import pytest

from cacheflow.errors import ConfigError
from cacheflow.simulation.agents import Agents, AgentSettings
from cacheflow.simulation.jobs import Job
from cacheflow.simulation.records import Record
from cacheflow.simulation.traces import generate_trace, load_trace, parse_trace
from cacheflow.simulation.workloads import parse_lengths, parse_tokens, poisson, synthetic

if TYPE_CHECKING:
    from pathlib import Path


def test_lognormal_lengths_have_the_mean_asked_for() -> None:
    """Mean and sigma are those of the option, nothing is longer than 131,072 tokens."""
    lengths, chance = parse_lengths("lognormal:15000:0.5"), random.Random(1)
    drawn = [lengths.draw(i, chance) for i in range(20000)]
    assert statistics.fmean(drawn) == pytest.approx(15000, rel=0.03)
    assert statistics.stdev(map(math.log, drawn)) == pytest.approx(0.5, rel=0.03)
    wide = parse_lengths("lognormal:100k:3")
    assert max(wide.draw(i, chance) for i in range(2000)) == 131072


def test_fixed_and_uniform_lengths() -> None:
    """A list is taken in turn; uniform ones lie between both ends."""
    chance = random.Random(2)
    fixed = parse_lengths("512, 1k,2k")
    assert [fixed.draw(i, chance) for i in range(4)] == [512, 1024, 2048, 512]
    drawn = [parse_lengths("uniform:1k:2k").draw(i, chance) for i in range(500)]
    assert 1024 <= min(drawn) < 1100
    assert 1950 < max(drawn) <= 2048


@pytest.mark.parametrize(
    "text",
    [
        "",
        "lognormal:15000",
        "lognormal:15000:x",
        "lognormal:1:9",
        "uniform:2k:1k",
        "8kk",
        "a",
        "-1",
    ],
)
def test_bad_lengths_are_named(text: str) -> None:
    """The error repeats what was given."""
    with pytest.raises(ConfigError, match=r"--lengths|number of tokens"):
        parse_lengths(text)


def test_tokens_in_thousands() -> None:
    """`4k` is 4,096; halves must be whole tokens."""
    assert (parse_tokens("4k"), parse_tokens("1.5k"), parse_tokens("7")) == (4096, 1536, 7)
    with pytest.raises(ConfigError):
        parse_tokens("1.0001k")


def test_synthetic_requests_state_what_is_stored() -> None:
    """Coverage moves the end of the prefix, the rest is suffix; holes lie inside the prefix."""
    jobs = synthetic(
        200,
        parse_lengths("uniform:4k:16k"),
        chunk_tokens=512,
        suffix_tokens=100,
        coverage=0.5,
        holes=0.2,
        seed=3,
    )
    for job in jobs:
        chunks = (job.total_tokens - 100) // 512
        assert job.prefix_tokens == chunks // 2 * 512
        assert all(0 <= hole < chunks // 2 for hole in job.holes)
    holes, stored = sum(len(j.holes) for j in jobs), sum(j.prefix_tokens // 512 for j in jobs)
    assert holes / stored == pytest.approx(0.2, rel=0.2)


def test_poisson_arrivals_keep_the_jobs() -> None:
    """Only the arrivals change; their mean gap is the one asked for; the seed decides."""
    jobs = synthetic(4000, parse_lengths("1k"), chunk_tokens=512)
    arriving = poisson(jobs, 0.25, seed=1)
    assert [job.id for job in arriving] == [job.id for job in jobs]
    assert arriving[-1].arrival / 4000 == pytest.approx(0.25, rel=0.05)
    assert arriving == poisson(jobs, 0.25, seed=1) != poisson(jobs, 0.25, seed=2)


@pytest.mark.parametrize(
    ("change", "option"),
    [
        ({"suffix_tokens": 0}, "--suffix"),
        ({"coverage": 1.5}, "--coverage"),
        ({"holes": -0.1}, "--holes"),
        ({"count": 0}, "--requests"),
    ],
)
def test_impossible_synthetic_settings_are_refused(change: dict[str, Any], option: str) -> None:
    """Each is named by its option."""
    settings = {"count": 5, "lengths": parse_lengths("1k"), "chunk_tokens": 512, **change}
    with pytest.raises(ConfigError, match=f"^{option} "):
        synthetic(**settings)


def test_a_job_leaves_something_to_compute() -> None:
    """A prefix as long as the prompt is a mistake of whoever made the job."""
    with pytest.raises(ValueError, match="nothing to compute"):
        Job("r", 0.0, 512, prefix_tokens=512)


# -- traces ------------------------------------------------------------------------------------


def line(**changes: Any) -> str:
    entry = {"timestamp": 1500, "input_length": 1100, "output_length": 7, "hash_ids": [3, 4, 5]}
    return json.dumps({**entry, **changes})


def test_a_trace_line_becomes_a_request() -> None:
    """Milliseconds become seconds, ids name blocks, only whole blocks are left behind."""
    (job,) = parse_trace([line(), "\n"], "t", speed=2.0)
    assert (job.arrival, job.total_tokens, job.output_tokens) == (0.75, 1100, 7)
    assert (job.hash_ids, job.leaves) == ((3, 4, 5), (3, 4))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "not JSON"),
        ("[1]", "not a JSON object"),
        (line(timestamp=-1), "timestamp"),
        (line(timestamp="soon"), "timestamp"),
        (line(input_length=0, hash_ids=[]), "input_length"),
        (line(input_length=1.5), "input_length"),
        (line(output_length=-3), "output_length"),
        (line(output_length=True), "output_length"),
        (line(hash_ids=[1, 2]), r"3 blocks of 512 tokens but hash_ids has 2"),
        (line(hash_ids=[1, 2, "x"]), "hash_ids"),
        (line(hash_ids=None), "hash_ids"),
        (json.dumps({"timestamp": 0}), "input_length"),
    ],
)
def test_a_bad_trace_line_is_named(text: str, says: str) -> None:
    """File, line number and key are in the error."""
    with pytest.raises(ConfigError, match=rf"line 2.*{says}") as error:
        list(parse_trace([line(), text], "trace.jsonl"))
    assert "trace.jsonl" in str(error.value)


def test_traces_are_read_from_files(tmp_path: Path) -> None:
    """Generated lines are valid, the seed decides them, and a limit is kept."""
    path = tmp_path / "trace.jsonl"
    lines = list(generate_trace(50, seed=4))
    assert lines == list(generate_trace(50, seed=4)) != list(generate_trace(50, seed=5))
    path.write_text("\n".join(lines) + "\n")
    jobs = load_trace(path).first()
    assert len(jobs) == 50
    assert [job.arrival for job in jobs] == sorted(job.arrival for job in jobs)
    assert len(load_trace(path, limit=7).first()) == 7
    shared = set(jobs[0].hash_ids) & set(jobs[1].hash_ids)
    assert shared >= {0, 1, 2, 3}


def test_unusable_trace_files_are_named(tmp_path: Path) -> None:
    """Missing, empty or binary: one ConfigError with the path."""
    empty, binary = tmp_path / "empty", tmp_path / "binary"
    empty.touch()
    binary.write_bytes(b"\xff\xfe\x00")
    for path in (tmp_path / "none", empty, binary):
        with pytest.raises(ConfigError, match=rf"--trace .*{path.name}"):
            load_trace(path)
    with pytest.raises(ConfigError, match="--speed"):
        list(parse_trace([line()], "t", speed=0))


# -- agents ------------------------------------------------------------------------------------


def answered(job: Job, when: float) -> Record:
    return Record(job.id, 0, job.arrival, 0, 1, restored=when, first_token=when)


def test_an_agents_context_grows_by_answers_and_tools() -> None:
    """Each turn's prompt begins with the whole blocks of the turn before, arrives after decode and
    tool, and the blocks of the answer are stored too."""
    agents = Agents(AgentSettings(sessions=3, turns=5), seed=1)
    assert len(agents) == 15
    job: Job | None = agents.first()[2]
    turns = 0
    while job is not None:
        turns += 1
        following = agents.then(job, answered(job, job.arrival + 1.0))
        if following is not None:
            assert following.arrival >= job.arrival + 1.0 + job.output_tokens * 0.02
            assert following.total_tokens > job.total_tokens + job.output_tokens
            whole = job.total_tokens // 512
            assert following.hash_ids[:whole] == job.hash_ids[:whole]
            assert set(job.leaves) <= set(following.hash_ids)
            assert len(job.leaves) == (job.total_tokens + job.output_tokens) // 512
        assert len(job.hash_ids) == -(-job.total_tokens // 512)
        job = following
    assert turns == 5


def test_agents_share_the_system_prompt_only() -> None:
    """Two sessions have the blocks of the system prompt in common and no other."""
    first, second, *_ = Agents(AgentSettings(sessions=2, system_tokens=2048), seed=1).first()
    assert set(first.hash_ids) & set(second.hash_ids) == {0, 1, 2, 3}


def test_agent_draws_do_not_depend_on_the_order_of_turns() -> None:
    """The same session has the same turns whichever is asked for first."""
    settings = AgentSettings(sessions=2, turns=3)
    one, other = Agents(settings, seed=5), Agents(settings, seed=5)
    a, b = one.first()
    after_b, after_a = one.then(b, answered(b, 9.0)), one.then(a, answered(a, 9.0))
    c, d = other.first()
    assert other.then(c, answered(c, 9.0)) == after_a
    assert other.then(d, answered(d, 9.0)) == after_b


def test_impossible_agent_settings_are_refused() -> None:
    """No sessions, or time running backward."""
    with pytest.raises(ConfigError, match="--agents"):
        AgentSettings(sessions=0)
    with pytest.raises(ConfigError, match="--agents"):
        AgentSettings(pause_seconds=-1.0)
