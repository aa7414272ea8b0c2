"""State of the overlay in one training process, and the rules that move it once per rollout batch.

Mean entropy
    Exact, when the trainer's process publishes it (``sidefiles``): then all ranks see the same number. Else the
    surprisal estimate: ``mean(-old_log_prob)`` over response tokens is unbiased for the token-mean entropy of
    the behaviour policy when tokens were sampled at the temperature of the log-probabilities without top-p or
    top-k. It is noisy on one micro-batch, so it is kept as a bias-corrected exponential moving average whose
    half-life is one mini-batch update: a micro-batch holding the share ``s`` of its mini-batch's tokens decays
    the history by ``2 ** -s``. The state is the pair (weighted sum, weight); the estimate is their quotient, in
    nats. The metric ``overlay/entropy_exact`` tells which of the two is in use.

When the controllers move
    Once per rollout batch. The loss function is called once per micro-batch and is told neither the step nor
    the mini-batch. What verl does guarantee is that one rollout batch is one remote call of ``update_actor`` on
    each worker, with all mini-batches, epochs and micro-batches inside it. Ray gives every remote call its own
    task id, which is therefore an exact, rank-consistent name of the rollout batch. Statistics of the tensors
    are not: they neither differ reliably between rollout batches nor agree between micro-batches of one.
    A change of the id means that a new rollout batch begins: the controllers then make one step before its
    first loss.
    Outside Ray (a test, another launcher) there is no id. Then each call moves the controllers by its share
    of the mini-batch, so that the shares of one mini-batch add up to one step; with several mini-batches per
    rollout batch this is correspondingly faster.

Limits
    Without published entropies the estimates are local to a data-parallel rank, so two ranks may step
    differently while the entropy is close to the target; the reported metrics are means over ranks. A training
    that goes on from a checkpoint takes its state from the side files, and without them starts from the
    configured values: every moving value is reported as a metric, so that this is visible.

Standard library only: the source of this module becomes part of the block in verl's ``core_algos.py``.
"""

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from verl_overlay.configuration import OverlayConfiguration, configuration_id
from verl_overlay.sidefiles import SideFiles


@dataclass(frozen=True)
class Drive:
    """How a controller moves one number, as published.

    ``effect`` is +1 when a larger value raises the entropy, -1 when it lowers it. ``step`` is added (additive,
    proportional) or is the factor (multiplicative) per rollout batch.
    """

    effect: int
    rule: str
    step: float
    low: float
    high: float


def drive_of(configuration: OverlayConfiguration) -> Drive | None:
    """The published drive of the controlled knob with the configuration's changes; None without a controller."""
    c = configuration
    published = {
        "positive_weight": Drive(-1, "additive", 0.05, 0.0, 1.0),
        "negative_weight": Drive(-1, "additive", 0.05, 0.0, 1.0),
        "clip_high": Drive(+1, "additive", 0.01, 0.1, 1.0),
        "stare": Drive(+1, "additive", 0.01, 0.5, 1.5),
        "kl_cov.coef": Drive(+1, "multiplicative", 1.1, 0.1, 10.0),
        "shaping.coef": {
            "repo_r": Drive(+1, "multiplicative", 2.0, 1e-4, 0.05),
            "bonus": Drive(+1, "additive", 1e-4, 0.0, 5e-3),
        }.get(c.shaping, Drive(+1, "additive", 0.01, 0.0, 1.0)),
    }
    base = published.get(c.controlled)
    if base is None:
        return None
    rule = base.rule if c.control_rule == "natural" else c.control_rule
    step = base.step
    if rule == "multiplicative":
        step = step if base.rule == "multiplicative" else 1.1
        step **= c.control_speed
    else:
        step = (step if base.rule != "multiplicative" else 0.1 * base.high) * c.control_speed
    start = {"shaping.coef": abs(c.shaping_coef), "kl_cov.coef": c.kl_cov_coef}.get(c.controlled, 0.0)
    low = base.low if c.control_low is None else c.control_low
    high = max(base.high, 3.0 * start) if c.control_high is None else c.control_high
    return Drive(base.effect, rule, step, low, max(low, high))


def moved(value: float, distance: float, drive: Drive, units: float = 1.0, may_flip: bool = False) -> float:
    """One step of a controlled number.

    Args:
        value: the number before the step.
        distance: (target entropy - entropy) / target entropy.
        drive: rule, step and limits.
        units: rollout batches since the last step; fractions are allowed.
        may_flip: multiplicative only: past its smallest size the number changes sign (REPO-R, arXiv 2603.11682).

    Additive and multiplicative rules use the sign of the distance, the proportional one its size, at most 1.
    """
    push = (distance > 0) - (distance < 0)
    if drive.rule == "proportional":
        value += units * drive.step * drive.effect * max(-1.0, min(1.0, distance))
    elif drive.rule == "additive":
        value += units * drive.step * drive.effect * push
    else:
        return _scaled(value, push * drive.effect, drive, units, may_flip)
    return min(drive.high, max(drive.low, value))


def _scaled(value: float, push: int, drive: Drive, units: float, may_flip: bool) -> float:
    sign = -1.0 if value < 0 else 1.0
    size = abs(value) * float(drive.step ** (units * push * sign))
    if size < drive.low:
        return -sign * drive.low if may_flip else sign * drive.low
    return sign * min(drive.high, size)


def annealed(start: float, end: float | None, progress: float) -> float:
    """Linear from ``start`` at progress 0 to ``end`` at progress 1; constant when ``end`` is None."""
    return start if end is None else start + (end - start) * min(1.0, max(0.0, progress))


def scheduled_share(configuration: OverlayConfiguration, progress: float) -> float:
    """PAR's schedules (a) and (b), arXiv 2511.05993: the share of ``positive_weight`` in force, in [0, 1].

    Args:
        progress: share of the run that is over, in [0, 1).
    """
    c = configuration
    if c.positive_schedule == "stage":
        return max(0.0, 2.0 * min(progress, 1.0) - 1.0)
    if c.positive_schedule == "epoch":
        epoch = min(math.floor(progress * c.positive_epochs), c.positive_epochs - 1)
        return epoch / (c.positive_epochs - 1)
    return 1.0


def ray_task_id() -> str | None:
    """The id of the remote call being executed, or None outside a Ray worker. Never loads Ray itself."""
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return None
    task_id = ray.get_runtime_context().get_task_id()
    return None if task_id is None else str(task_id)


@dataclass
class ControlState:
    """What one training process remembers between calls of the loss. Plain Python numbers only."""

    configuration: OverlayConfiguration
    rollout_batch_id: Callable[[], str | None] = ray_task_id
    side_files: SideFiles = field(default_factory=SideFiles)
    calls: int = 0
    steps: float = 0.0
    """Rollout batches that are over."""
    entropy_sum: float = 0.0
    entropy_weight: float = 0.0
    exact_entropy: float | None = None
    """Published for the current rollout batch, nats."""
    configuration_id: int = field(init=False)
    initial_entropy: float | None = field(init=False)
    positive: float = field(init=False)
    negative: float = field(init=False)
    clip_high: float | None = field(init=False)
    coef: float = field(init=False)
    amplify: float = field(init=False)
    damp: float = field(init=False)
    kl_coef: float = field(init=False)
    integral: float = 0.0
    """EntroPIC: sum of (entropy - target) over rollout batches, nats."""
    _batch_id: str | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        c = self.configuration
        self.configuration_id = configuration_id(c)
        self.initial_entropy = c.target_h0
        self.positive, self.negative = c.positive_weight, c.negative_weight
        self.clip_high, self.coef, self.kl_coef = c.clip_high, c.shaping_coef, c.kl_cov_coef
        self.amplify, self.damp = c.stare_amplify, c.stare_damp
        self.drive = drive_of(c)
        self.steps = float(self.side_files.resumed_step)
        record = self.side_files.last_control(self.configuration_id) or {}
        for name in ("initial_entropy", *_MOVING):
            setattr(self, name, record.get(name, getattr(self, name)))

    @property
    def moves(self) -> bool:
        """True when something changes during training."""
        c = self.configuration
        return c.needs_schedule or c.uses_target or c.sign_gate != "none" or c.positive_schedule != "constant"

    @property
    def entropy(self) -> float | None:
        """Mean entropy of the behaviour policy, nats: exact where published, else estimated; None before data."""
        if self.exact_entropy is not None:
            return self.exact_entropy
        return self.entropy_sum / self.entropy_weight if self.entropy_weight > 0.0 else None

    @property
    def progress(self) -> float:
        """Share of the run that is over."""
        return self.steps / self.configuration.schedule_steps if self.configuration.schedule_steps > 0 else 0.0

    def nats(self, value: float) -> float | None:
        """A target or band edge in nats; None while the initial entropy that it refers to is unknown."""
        if self.configuration.target_unit == "nats":
            return value
        initial = self.entropy if self.initial_entropy is None else self.initial_entropy
        return None if initial is None else value * initial

    @property
    def target(self) -> float | None:
        """The target entropy of this moment, nats."""
        c = self.configuration
        return self.nats(annealed(c.target_entropy, c.target_end, self.progress))

    @property
    def is_below_target(self) -> bool:
        """True when the entropy is known and below its target."""
        entropy, target = self.entropy, self.target
        return entropy is not None and target is not None and entropy < target

    def weights(self) -> tuple[float, float]:
        """(weight where A > 0, weight where A < 0) in force, with schedule and band."""
        c = self.configuration
        positive, negative = self.positive * scheduled_share(c, self.progress), self.negative
        if c.sign_gate == "band":
            edge = annealed(c.band_low, c.band_low_end, self.progress)
            entropy, low, high = self.entropy, self.nats(edge), self.nats(edge + c.band_width)
            if entropy is not None and low is not None and high is not None:
                positive = 0.0 if entropy < low else positive
                negative = 0.0 if entropy > high else negative
        return positive, negative

    def entropic_coefficient(self) -> float:
        """EntroPIC, arXiv 2511.15248: ``clip(Kp (H - T) + Ki sum(H - T), -1, 1)``, sums over rollout batches."""
        c, entropy, target = self.configuration, self.entropy, self.target
        if entropy is None or target is None:
            return 0.0
        return min(1.0, max(-1.0, c.entropic_kp * (entropy - target) + c.entropic_ki * self.integral))

    def begin_call(self) -> None:
        """Count a call; when it is the first of a new rollout batch, make a step."""
        self.calls += 1
        batch_id = self.rollout_batch_id()
        if batch_id is not None and batch_id != self._batch_id:
            before, self.exact_entropy = self.entropy, self.side_files.new_entropy()
            if self.initial_entropy is None:
                self.initial_entropy = self.exact_entropy if before is None else before
            if self._batch_id is not None:
                self._move(1.0)
            if self.moves:
                self._record()
        self._batch_id = batch_id

    def observe(self, surprisal: float, share: float) -> None:
        """Blend a micro-batch's surprisal into the moving average.

        ``k = 2^-share``; ``sum <- k sum + (1 - k) surprisal``; ``weight <- k weight + (1 - k)``.

        Args:
            surprisal: masked mean of ``-old_log_prob``, nats.
            share: this micro-batch's share of its mini-batch's tokens.
        """
        new = -math.expm1(-math.log(2.0) * share)
        self.entropy_sum = (1 - new) * self.entropy_sum + new * surprisal
        self.entropy_weight = (1 - new) * self.entropy_weight + new

    def end_call(self, share: float) -> None:
        """Without rollout-batch ids, move by this call's share of its mini-batch."""
        if self._batch_id is None:
            if self.initial_entropy is None:
                self.initial_entropy = self.entropy
            self._move(share)

    def _move(self, units: float) -> None:
        self.steps += units
        entropy, target = self.entropy, self.target
        if entropy is None or target is None or target <= 0.0:
            return
        self.integral += units * (entropy - target)
        limit = 1.0 / max(self.configuration.entropic_ki, 1e-9)
        self.integral = min(limit, max(-limit, self.integral))
        if self.drive is not None:
            self._drive(self.drive, (target - entropy) / target, units)

    def _drive(self, drive: Drive, distance: float, units: float) -> None:
        knob = self.configuration.controlled
        if knob == "stare":
            self.amplify = moved(self.amplify, distance, replace(drive, low=1.0), units)
            self.damp = moved(self.damp, distance, replace(drive, effect=-drive.effect, high=1.0), units)
        elif knob == "shaping.coef":
            self.coef = moved(self.coef, distance, drive, units, self.configuration.shaping == "repo_r")
        elif knob == "positive_weight":
            self.positive = moved(self.positive, distance, drive, units)
        elif knob == "negative_weight":
            self.negative = moved(self.negative, distance, drive, units)
        elif knob == "kl_cov.coef":
            self.kl_coef = moved(self.kl_coef, distance, drive, units)
        elif self.clip_high is not None:
            self.clip_high = moved(self.clip_high, distance, drive, units)

    def _record(self) -> None:
        source = "exact" if self.exact_entropy is not None else "surprisal"
        values = {name: getattr(self, name) for name in ("entropy", "target", "initial_entropy", *_MOVING)}
        self.side_files.append(
            "control", step=int(self.steps), configuration_id=self.configuration_id, source=source, **values
        )


_MOVING = ("positive", "negative", "clip_high", "coef", "amplify", "damp", "kl_coef", "integral")
