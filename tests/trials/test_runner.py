"""Attempts: environment, kinds of ending, resumed histories, without a trainer's cost."""

import json
import math
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from trials.guard import RUN_TAG
from trials.health import FailureKind, classify_exit
from trials.runner import (
    Attempt,
    Ended,
    TrialSpec,
    Validation,
    build_environment,
    read_history,
    recover_history,
    validations,
)

STEP = "echo 'step:{0} - actor/entropy:{1} - actor/pg_loss:0.1 - val-core/d/acc/mean@1:0.{0}'"


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., TrialSpec]:
    def make_spec(script: str, **options: object) -> TrialSpec:
        spec = TrialSpec(
            trial="t001",
            attempt=1,
            folder=str(tmp_path / "t001"),
            script=script,
            script_path=str(tmp_path / "script.sh"),
            cwd=str(tmp_path / "t001"),
            configuration=None,
            stop_step=None,
            total_steps=3,
            dev_rows={"d": 10},
            run_tag=str(tmp_path),
            grace_s=0.3,
        )
        return replace(spec, **options)  # type: ignore[arg-type]

    return make_spec


def run(spec: TrialSpec) -> tuple[list[Validation], Ended]:
    attempt = Attempt(spec)
    try:
        events = list(attempt.events())
    finally:
        attempt.close()
    ended = events[-1]
    assert isinstance(ended, Ended)
    return [event for event in events if isinstance(event, Validation)], ended


def steps(*numbers: int, entropy: str = "0.5") -> str:
    return "\n".join(STEP.format(number, entropy) for number in numbers)


def test_a_whole_run_completes(make: Callable[..., TrialSpec], tmp_path: Path) -> None:
    found, ended = run(make(steps(1, 2, 3)))
    assert [validation.step for validation in found] == [1, 2, 3]
    assert found[2].accuracy == pytest.approx(0.3) and found[2].entropy == pytest.approx(0.5)
    assert (ended.outcome, ended.last_step, ended.failure) == ("completed", 3, None)
    assert not (tmp_path / "script.sh").exists() and (tmp_path / "t001/attempt_1/train.sh").exists()
    assert [metrics.step for metrics in read_history(tmp_path / "t001")] == [1, 2, 3]


NVIDIA_SMI = """#!/bin/sh
case "$1" in -L) exit 0;; esac
used=$(cat "{0}/used")
printf '0, GPU-aa, H100, 81559, %s\\n1, GPU-bb, H100, 81559, 4\\n' "$used"
[ "$used" -lt 20000 ] || echo $((used - 30000)) > "{0}/used"
"""


def test_an_attempt_waits_for_the_memory_of_its_gpus(
    make: Callable[..., TrialSpec], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of GPU 0 68000 MiB are held at first, and 30000 less each time somebody looks."""
    (tmp_path / "nvidia-smi").write_text(NVIDIA_SMI.format(tmp_path))
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")

    def hold(used: int) -> None:
        (tmp_path / "used").write_text(str(used))

    hold(68000)
    _, ended = run(make(f"cat {tmp_path}/used > {tmp_path}/seen\n" + steps(1, 2, 3), gpus=2))
    assert ended.outcome == "completed", ended.reason
    assert int((tmp_path / "seen").read_text()) == 8000
    hold(68000)
    assert run(make(steps(1, 2, 3), gpus=1))[1].outcome == "completed"  # one of the two is free
    hold(10**6)
    _, ended = run(make("exit 1", gpus=2, gpu_timeout_s=0.1))
    assert (ended.outcome, ended.failure) == ("failed", "startup_hang")
    assert "GPU 0 has 970000 of 81559 MiB in use" in ended.reason
    hold(10**6)
    (tmp_path / "stop").touch()
    assert run(make("exit 1", gpus=2, stop_file=str(tmp_path / "stop")))[1].outcome == "interrupted"


@pytest.mark.parametrize(
    ("script", "options", "kind", "words"),
    [
        (steps(1, 2), {}, "ended_early", "exit code 0 after step 2 of 3, although it reported success"),
        (
            steps(1) + "\necho 'RuntimeError: boom'; exit 3",
            {},
            "unknown",
            "exit code 3 after step 1 of 3: RuntimeError: boom",
        ),
        ("echo 'torch.OutOfMemoryError: CUDA out of memory. Tried'; exit 1", {}, "out_of_memory", "CUDA out of memory"),
        ("echo 'OSError: [Errno 28] No space left on device'; exit 1", {}, "disk_full", "No space left"),
        ("echo 'OSError: [Errno 122] Disk quota exceeded'; exit 1", {}, "disk_full", "Disk quota exceeded"),
        ("echo \"Could not override 'x.y'\"; exit 1", {}, "bad_configuration", "Could not override"),
        (
            "echo 'UserWarning: megatron: ModuleNotFoundError(\"No module named x\")'; echo 'ValueError: cause'; exit 1",
            {},
            "unknown",
            "ValueError: cause",
        ),
        ("kill -9 $$", {}, "killed", "killed by a signal"),
        (steps(1, 2, 3, entropy="nan"), {"total_steps": 9}, "non_finite", "not finite for 3 steps"),
        (
            steps(1, 2, 3).replace("pg_loss:0.1", "grad_norm:nan"),
            {"total_steps": 9},
            "non_finite",
            "not finite for 3 steps",
        ),
        ("sleep 60", {"startup_timeout_s": 0.5}, "startup_hang", "no training step within"),
        (steps(1, 2) + "\nsleep 60", {"stall_timeout_s": 0.5}, "stall", "no step line for"),
        (steps(1), {"configuration_id": 5}, "bad_configuration", "shows overlay configuration None, expected 5"),
    ],
)
def test_every_kind_of_failure_has_its_name(
    make: Callable[..., TrialSpec], script: str, options: dict[str, object], kind: str, words: str
) -> None:
    _, ended = run(make(script, **options))
    assert ended.outcome == "failed" and ended.failure == kind and words in ended.reason


def test_a_trainer_that_dies_silently_on_a_full_disk_is_understood(
    make: Callable[..., TrialSpec], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trials.runner.is_full", lambda folder: folder.name == "attempt_1")
    _, ended = run(make("exit 1"))
    assert ended.failure == "disk_full" and "the log is empty; no space is left beside its log" in ended.reason


def test_a_line_that_a_full_disk_tore_costs_no_other(make: Callable[..., TrialSpec], tmp_path: Path) -> None:
    run(make(steps(1, 2)))
    metrics = tmp_path / "t001" / "metrics.jsonl"
    metrics.write_bytes(metrics.read_bytes()[:-20])
    run(make(steps(2, 3), attempt=2))
    assert [step.step for step in read_history(tmp_path / "t001")] == [1, 2, 3]


def test_a_trial_is_interrupted_at_its_last_rung(make: Callable[..., TrialSpec]) -> None:
    found, ended = run(make(steps(1, 2) + "\nsleep 60\n" + steps(3), stop_step=2))
    assert [validation.step for validation in found] == [1, 2]
    assert ended.outcome == "completed" and ended.last_step == 2 and ended.seconds < 10


def test_a_time_limit_stops_and_keeps_what_was_done(make: Callable[..., TrialSpec]) -> None:
    found, ended = run(make(steps(1, 2) + "\nsleep 60", time_limit_s=5.0))
    assert ended.outcome == "stopped" and ended.last_step == 2 and len(found) == 2


def test_a_stop_file_interrupts_at_once(make: Callable[..., TrialSpec], tmp_path: Path) -> None:
    (tmp_path / "stop").touch()
    _, ended = run(make("sleep 60", stop_file=str(tmp_path / "stop")))
    assert ended.outcome == "interrupted"


def test_a_resumed_attempt_goes_on_where_the_first_left(make: Callable[..., TrialSpec], tmp_path: Path) -> None:
    run(make(steps(1, 2, entropy="0.8")))
    found, ended = run(make(steps(2, 3, entropy="0.4"), attempt=2))
    assert ended.outcome == "completed"
    assert found[-1].entropy == pytest.approx((0.8 + 0.4 + 0.4) / 3)
    history = read_history(tmp_path / "t001")
    assert [(metrics.step, metrics.entropy) for metrics in history] == [(1, 0.8), (2, 0.4), (3, 0.4)]
    assert [validation.step for validation in validations(history, {"d": 10})] == [1, 2, 3]


def test_what_a_killed_driver_had_not_read_is_recovered_from_the_log(
    make: Callable[..., TrialSpec], tmp_path: Path
) -> None:
    run(make(steps(1, 2, entropy="0.8")))
    log = tmp_path / "t001" / "attempt_2" / "log"
    log.parent.mkdir()
    unread = ["step:2 - val-core/d/acc/mean@1:0.2", "step:3 - actor/entropy:0.4", "step:4 - actor/entropy:0.3 - acto"]
    log.write_text("\n".join(unread))
    for _ in range(2):  # a second time adds nothing
        history = recover_history(tmp_path / "t001", 2)
        assert [(metrics.step, metrics.entropy) for metrics in history] == [(1, 0.8), (2, 0.8), (3, 0.4)]
    assert len((tmp_path / "t001" / "metrics.jsonl").read_text().splitlines()) == 3


def test_of_a_repeated_step_the_newest_attempt_wins_and_odd_lines_are_skipped(tmp_path: Path) -> None:
    lines = [
        '{"attempt": 1, "step": 2, "actor/entropy": 0.5}',
        '{"attempt": 2, "step": 2, "actor/entropy": 0.4}',
        '{"attempt": 1, "step": 1, "actor/entropy": null}',
        "[1]",
        "7",
        '{"step": "x"}',
        '{"attempt": 2, "st',
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    history = read_history(tmp_path)
    assert [metrics.step for metrics in history] == [1, 2] and history[1].entropy == 0.4
    assert history[0].entropy is not None and math.isnan(history[0].entropy)
    assert read_history(tmp_path / "nowhere") == []


def test_the_environment_is_the_childs_own(make: Callable[..., TrialSpec], tmp_path: Path) -> None:
    inherited = {
        "PATH": "/usr/bin", "HOME": "/h", "RAY_ADDRESS": "10.0.0.1:6379", "RAY_JOB_ID": "1", "PYTHONPATH": "/agent",
        "VIRTUAL_ENV": "/agent/venv", "VERL_OVERLAY": "{}", "CUDA_VISIBLE_DEVICES": "0,1",
    }  # fmt: skip
    spec = make("", configuration={"clip_high": 0.28}, training_env="/conda", environment={"OMP_NUM_THREADS": "3"})
    environment = build_environment(spec, inherited)
    assert environment["RAY_ADDRESS"] == "local" and environment["RAY_DEDUP_LOGS"] == "0"
    assert environment["PATH"] == "/conda/bin:/usr/bin" and environment["CUDA_VISIBLE_DEVICES"] == "0,1"
    assert not {"RAY_JOB_ID", "PYTHONPATH", "VIRTUAL_ENV"} & environment.keys()
    assert json.loads(environment["VERL_OVERLAY"]) == {"clip_high": 0.28}
    assert environment[RUN_TAG] == str(tmp_path) and environment["OMP_NUM_THREADS"] == "3"
    assert len(environment["RAY_TMPDIR"]) < 40
    assert "VERL_OVERLAY" not in build_environment(make(""), inherited)
    assert make("", trial="t002").ray_tmpdir != make("").ray_tmpdir != make("", attempt=2).ray_tmpdir


def test_the_decisive_line_is_quoted() -> None:
    tail = ["noise", "\x1b[36m(TaskRunner pid=3)\x1b[0m ValueError: micro batch 16 > 5", "  at frame", "Shutting down"]
    kind, reason = classify_exit(1, tail, 0, 10)
    assert kind is FailureKind.UNKNOWN and "ValueError: micro batch 16 > 5" in reason
    assert classify_exit(-11, [], 4, 10)[0] is FailureKind.KILLED
    assert "the log is empty" in classify_exit(1, [], 4, 10)[1]


def test_a_killed_guard_leaves_no_trainer_beside_the_next_trial(make: Callable[..., TrialSpec], tmp_path: Path) -> None:
    script = f"echo $$ > {tmp_path}/pid; sleep 600 & kill -9 $(python3 -c 'import json; " + (
        f'print(json.load(open("{tmp_path}/t001/attempt_1/process.json"))["guard_pid"])\'); wait'
    )
    attempt = Attempt(make("sleep 0.5; " + script))
    ended = list(attempt.events())[-1]
    assert isinstance(ended, Ended) and ended.failure == "killed"
    assert not attempt.spec.ray_tmpdir.exists()
    pid = int((tmp_path / "pid").read_text())
    with suppress(FileNotFoundError):
        assert Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"


def test_the_stall_limit_follows_the_median_step(make: Callable[..., TrialSpec]) -> None:
    """One slow validation among the steps must not make the limit longer."""
    slow = steps(1) + "\n" + "\n".join(f"sleep {pause}\n{steps(step)}" for step, pause in ((2, 0.1), (3, 0.1), (4, 3)))
    _, ended = run(make(slow + "\nsleep 60", total_steps=9, stall_timeout_s=0.5))
    assert ended.failure in ("stall",) and "after step" in ended.reason
    limit = float(ended.reason.split("the limit is ")[1].split(" s")[0])
    assert 1 <= limit <= 20, (
        ended.reason
    )  # twenty times about 0.1 s on a busy machine, not twenty times the mean of 1 s


def test_the_file_logger_alone_is_enough(make: Callable[..., TrialSpec]) -> None:
    line = '{{"step":{0},"data":{{"actor/entropy":0.5,"actor/pg_loss":0.1,"val-core/d/acc/mean@1":0.{0}}}}}'
    script = "\n".join(f"""echo '{line.format(step)}' >> "$VERL_FILE_LOGGER_PATH\"""" for step in (1, 2, 3))
    found, ended = run(make(script))
    assert ended.outcome == "completed" and [validation.accuracy for validation in found] == [0.1, 0.2, 0.3]


def test_an_explicit_dev_metric_is_the_accuracy(make: Callable[..., TrialSpec], tmp_path: Path) -> None:
    script = "echo 'step:1 - actor/entropy:0.5 - val-core/d/acc/mean@1:0.9 - val-core/e/acc/mean@4:0.25'\n" + steps(2)
    found, _ = run(make(script, dev_metric="val-core/e/acc/mean@4", total_steps=2))
    assert [(validation.step, validation.accuracy) for validation in found] == [(1, 0.25)]
    again = validations(read_history(tmp_path / "t001"), {"d": 10}, "val-core/e/acc/mean@4")
    assert [(validation.step, validation.accuracy) for validation in again] == [(1, 0.25)]


def test_a_resumed_attempt_that_makes_no_step_says_so(make: Callable[..., TrialSpec], tmp_path: Path) -> None:
    run(make(steps(1, 2) + "\nkill -9 $$", total_steps=9))
    _, ended = run(make("echo 'step:2 - val-core/d/acc/mean@1:0.2'", attempt=2, total_steps=9))
    assert (ended.outcome, ended.failure, ended.last_step) == ("failed", "no_progress", 2)
    assert "went on from step 2 of 9, made no step and reported success" in ended.reason
    step = read_history(tmp_path / "t001")[-1]  # validated again: its training facts stay
    assert (step.step, step.get("attempt"), step.entropy, step.dev_accuracies()) == (2, 2.0, 0.5, {"d": 0.2})
