"""Whole runs on a local Ray cluster of two nodes with simulated GPUs; real Ray, Tune, processes, scripted trainer."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster

from agent.cluster import Engine, sweep_nodes
from agent.ledger import Ledger, RunState, fold
from agent.objective import EntropyBand, judge
from scripted_workspace import agent_environment, build_scripted_workspace
from trials.guard import RUN_TAG
from trials.runner import read_history
from trials.script import TrainScript
from trials.trainable import Place, read_place

ROOT = Path(__file__).parents[2]
NODE = {"num_cpus": 8, "num_gpus": 8, "object_store_memory": 80 * 2**20}


@pytest.fixture(scope="module")
def two_nodes() -> Iterator[Cluster]:
    """Two nodes with eight GPUs each that are not there."""
    found = Cluster(initialize_head=True, head_node_args={**NODE, "include_dashboard": False})
    found.add_node(**NODE)
    found.wait_for_nodes()
    yield found
    found.shutdown()


@pytest.fixture
def cluster(two_nodes: Cluster) -> Iterator[Cluster]:
    """The two nodes; what the test itself puts there ends with it."""
    yield two_nodes
    ray.shutdown()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a workspace whose train.sh asks 8 GPUs."""
    build_scripted_workspace(tmp_path / "workspace", on_gpus=True)
    return tmp_path


def start(folder: Path, *settings: str, verb: str = "run", **behaviour: object) -> subprocess.Popen[str]:
    words = [word for setting in settings for word in ("--set", setting)]
    return subprocess.Popen(
        [sys.executable, str(ROOT / "run_agent.py"), verb, *words], cwd=folder,
        env={**agent_environment(**behaviour), "CUDA_VISIBLE_DEVICES": ""},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def finish(process: subprocess.Popen[str], timeout_s: float = 300) -> tuple[int, str]:
    output, _ = process.communicate(timeout=timeout_s)
    return process.returncode, output


def events(folder: Path, kind: str) -> list[dict[str, Any]]:
    path = folder / "runs" / "run-1" / "ledger.jsonl"
    return [event for event in Ledger(path).read() if event["event"] == kind] if path.exists() else []


def read_state(folder: Path) -> RunState:
    return fold(Ledger(folder / "runs" / "run-1" / "ledger.jsonl").read())


def place_of(folder: Path, trial: str, attempt: int = 1) -> Place:
    place = read_place(folder / "runs" / "run-1" / "trials" / trial / f"attempt_{attempt}")
    assert place is not None, trial
    return place


def wait_until(condition: Callable[[], object], process: subprocess.Popen[str], timeout_s: float = 120) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert process.poll() is None, finish(process)
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.1)


def processes_of(folder: Path) -> list[int]:
    tag, found = f"{RUN_TAG}={folder / 'runs' / 'run-1'}".encode(), []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if tag in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


def start_neighbour(**options: Any) -> Any:
    """An actor of somebody else, who answers 7."""

    class Neighbour:  # local, so that it travels with its code
        def ask(self) -> int:
            return 7

    actor = ray.remote(Neighbour).options(**options).remote()
    assert ray.get(actor.ask.remote()) == 7
    return actor


def test_proxies_use_both_nodes_and_only_exact_trials_are_promoted(cluster: Cluster, folder: Path) -> None:
    ray.init(address=cluster.address, namespace="a neighbour", log_to_driver=False)
    start_neighbour(num_cpus=1, name="neighbour", lifetime="detached")
    settings = (f"ray_address={cluster.address}", "search.gpus_per_trial=4", "search.trials=8")
    code, output = finish(start(folder, *settings, step_s=0.2))
    assert code == 0, output
    state = read_state(folder)

    planned = events(folder, "slots_planned")[0]
    assert (planned["slots"], planned["gpus"], planned["exact_gpus"]) == (4, 4, 8)
    assert "4 slots for proxies of train.sh's 8 GPUs" in output and "plain GRPO, proxy on 4 GPUs" in output

    proxies = state.search_trials
    assert len(proxies) == 8 and all(trial.is_proxy and trial.gpus == 4 for trial in proxies)
    assert proxies[0].origin == "plain GRPO" and proxies[1].origin == "preset:negative_damping_clip_cov"
    places = {trial.trial: place_of(folder, trial.trial) for trial in proxies}
    assert len({place.node_id for place in places.values()}) == 2
    assert {place.gpus for place in places.values()} == {"0,1,2,3", "4,5,6,7"}
    for first, second in combinations(proxies, 2):  # no two at the same time in one slot
        if first.started_s < (second.ended_s or 0) and second.started_s < (first.ended_s or 0):
            mine, other = places[first.trial], places[second.trial]
            assert (mine.node_id, mine.gpus) != (other.node_id, other.gpus)
    run = folder / "runs" / "run-1"
    script = TrainScript((run / "trials" / "t001" / "attempt_1" / "train.sh").read_text())
    environment = json.loads((run / "trials" / "t001" / "attempt_1" / "env.json").read_text())
    assert script.get("trainer.n_gpus_per_node") == "4"
    assert environment["CUDA_VISIBLE_DEVICES"] == places["t001"].gpus and "SCRIPTED" in environment

    exact = [trial for trial in state.trials.values() if trial.kind == "remeasure"]
    assert len(exact) == 2 and all(trial.outcome == "completed" and not trial.is_proxy for trial in exact)
    promoted = state.trials[next(d["chosen"] for d in state.decisions if d["what"] == "promotion")]
    assert promoted in [state.baseline, *exact]
    for name in ("t000", exact[0].trial, "full"):
        assert place_of(folder, name).gpus == "0,1,2,3,4,5,6,7"
        text = (run / "trials" / name / "attempt_1" / "train.sh").read_text()
        assert TrainScript(text).get("trainer.n_gpus_per_node") == "8"
    assert "proxy on 4 GPUs" in (run / "report.html").read_text()
    steps = [metrics.step for metrics in read_history(run / "trials" / "full")]
    assert steps == list(range(17))  # from the beginning: no shards of a trial, whatever it trained on, are taken over

    neighbour = ray.get_actor("neighbour", namespace="a neighbour")
    assert ray.get(neighbour.ask.remote()) == 7
    assert ray.available_resources()["GPU"] == 16 and processes_of(folder) == []
    ray.kill(neighbour)


def test_a_lost_node_costs_no_trial(cluster: Cluster, folder: Path) -> None:
    worker = cluster.add_node(**NODE)
    cluster.wait_for_nodes()
    settings = (f"ray_address={cluster.address}", "search.gpus_per_trial=8", "search.trials=4")
    process = start(folder, *settings, step_s=0.8)

    def runs_there() -> bool:
        found = [read_place(path) for path in (folder / "runs" / "run-1" / "trials").glob("t00[1-4]/attempt_1")]
        return len(found) >= 3 and worker.node_id in {place.node_id for place in found if place}

    wait_until(runs_there, process)
    cluster.remove_node(worker, allow_graceful=False)
    code, output = finish(process)
    assert code == 0, output
    lost = events(folder, "attempt_failed")
    assert lost and all("was lost" in event["reason"] for event in lost)
    state = read_state(folder)
    assert len(state.search_trials) == 4 and not any(trial.is_proxy for trial in state.trials.values())
    assert all(trial.outcome in ("completed", "stopped") for trial in state.trials.values())
    again = {event["trial"] for event in lost}
    assert {trial.trial for trial in state.search_trials if trial.attempts > 1} == again
    assert worker.node_id not in {place_of(folder, trial, 2).node_id for trial in again}
    assert processes_of(folder) == []


def test_two_searches_at_once_run_each_its_own_code(cluster: Cluster, tmp_path: Path) -> None:
    """On one cluster, in the same minute: scorer, environment and trials of one never reach the other's workers."""
    # scripted trainers halve their entropy every four steps: with these limits, h is a full score or none
    limits = {"kind": "objective.collapsed=0.01", "strict": "objective.healthy_low=0.99"}
    running = {}
    for name, limit in limits.items():
        build_scripted_workspace(tmp_path / name / "workspace", on_gpus=True)
        settings = (f"ray_address={cluster.address}", "search.gpus_per_trial=4", "search.trials=4", limit)
        running[name] = start(tmp_path / name, *settings, step_s=0.2, owner=name)

    searched: set[str] = set()
    deadline = time.monotonic() + 120
    while searched < running.keys() and time.monotonic() < deadline:
        for name in running.keys() - searched:
            if any(event["stage"] == "search" for event in events(tmp_path / name, "stage_done")):
                running[name].send_signal(signal.SIGINT)  # the full run is of no interest
                searched.add(name)
        time.sleep(0.1)
    ended = {name: finish(process) for name, process in running.items()}
    assert searched == limits.keys() and {code for code, _ in ended.values()} == {130}, ended
    spans = []
    for name, limit in limits.items():
        state, run = read_state(tmp_path / name), tmp_path / name / "runs" / "run-1"
        trials = state.search_trials
        assert len(trials) == 4 and all(trial.outcome in ("completed", "stopped") for trial in trials)
        band = EntropyBand(**{limit.split("=")[0].removeprefix("objective."): float(limit.split("=")[1])})
        for trial in trials:
            environment = json.loads((run / "trials" / trial.trial / "attempt_1" / "env.json").read_text())
            assert json.loads(environment["SCRIPTED"])["owner"] == name and environment[RUN_TAG] == str(run)
            for score in trial.scores:
                judged = judge(score.accuracy, score.entropy, state.initial_entropy or 0, score.step / 16, band)
                assert score.objective == judged.value
        spans.append((min(trial.started_s for trial in trials), max(trial.ended_s or 0 for trial in trials)))
    assert max(first for first, _ in spans) < min(last for _, last in spans)  # they did overlap
    scores = [read_state(tmp_path / name).search_trials[0].scores[-1].objective for name in limits]
    assert scores[0] != scores[1]


def test_what_no_slot_can_hold_is_refused_at_once(cluster: Cluster, folder: Path) -> None:
    address = f"ray_address={cluster.address}"
    script = folder / "workspace" / "task" / "scripts" / "train.sh"
    original = script.read_text()
    script.write_text(original.replace("n_gpus_per_node=8", "n_gpus_per_node=16"))
    began = time.monotonic()
    code, output = finish(start(folder, address))
    assert code == 3 and "a trial asks 16 GPUs on one node, but none is that large" in output, output
    assert "has 8 GPUs (8 free)" in output and time.monotonic() - began < 40
    script.write_text(original)

    ray.init(address=cluster.address, log_to_driver=False)
    holders = [start_neighbour(num_gpus=5) for _ in range(2)]
    code, output = finish(start(folder, address, "search.gpus_per_trial=4"))
    assert code == 3 and "but others hold them" in output and "has 8 GPUs (3 free)" in output, output
    assert events(folder, "trial_started") == []
    assert all(ray.get(holder.ask.remote()) == 7 for holder in holders)


def test_what_a_killed_driver_leaves_on_a_node_is_swept(cluster: Cluster, tmp_path: Path) -> None:
    """As if the guard had been killed, too: a process that only its tag gives away, and its scratch folder."""
    tag, scratch = str(tmp_path / "run"), tmp_path / "scratch"
    scratch.mkdir()
    left = subprocess.Popen(["sleep", "300"], env={RUN_TAG: tag})
    other = subprocess.Popen(["sleep", "300"], env={RUN_TAG: f"{tag}-2"})
    sweep_nodes(Engine(cluster.address, None, tmp_path / "ray", tmp_path / "ray.log", tag), tag, [scratch])
    assert left.wait(5) < 0 and not scratch.exists()
    assert other.poll() is None
    other.kill()
    other.wait()


def test_a_killed_driver_leaves_nothing_and_the_run_goes_on(cluster: Cluster, folder: Path) -> None:
    settings = (f"ray_address={cluster.address}", "search.gpus_per_trial=8", "search.trials=3")
    process = start(folder, *settings, step_s=0.6)
    wait_until(lambda: len([e for e in events(folder, "trial_scored") if e["trial"] != "t000"]) >= 2, process)
    process.kill()
    process.communicate()
    deadline = time.monotonic() + 60
    while processes_of(folder):
        assert time.monotonic() < deadline, "the guards did not end the trials"
        time.sleep(0.2)
    code, output = finish(start(folder, verb="resume"))
    assert code == 0, output
    state = read_state(folder)
    assert [trial.attempts for trial in state.search_trials].count(2) >= 1 and len(state.search_trials) == 3
    assert all(trial.outcome in ("completed", "stopped") for trial in state.trials.values())


def test_a_machine_without_the_gpus_is_told_so(folder: Path) -> None:
    """Without a cluster the trials run here, and the checks before a run count the GPUs."""
    code, output = finish(start(folder))
    assert code == 3 and "asked 8" in output and "8 GPUs" in output.split("error:")[-1], output
    code, output = finish(start(folder, "search.gpus_per_trial=3", verb="run"))
    assert code == 3 and "search.gpus_per_trial=3 does not fit train.sh" in output, output


def test_no_cluster_at_the_address(folder: Path) -> None:
    code, output = finish(start(folder, "ray_address=127.0.0.1:1"))
    assert code == 3 and "no Ray cluster to join at ray_address=127.0.0.1:1: " in output and "Traceback" not in output
