"""State of the overlay in one training process, and the rules that move it once per rollout batch.

Entropy estimate
    The loss never sees exact token entropies. ``mean(-old_log_prob)`` over response tokens, the surprisal
    estimate, is unbiased for the token-mean entropy of the behaviour policy when tokens were sampled at the
    temperature of the log-probabilities without top-p or top-k. It is noisy on one micro-batch, so it is kept
    as a bias-corrected exponential moving average whose half-life is one mini-batch update: a micro-batch
    holding the share ``s`` of its mini-batch's tokens decays the history by ``2 ** -s``. The state is the
    pair (weighted sum, weight); the estimate is their quotient, in nats.

When the controllers move
    PAR's lambda and STARE's W and M move once per rollout batch. The loss function is called once per
    micro-batch and is told neither the step nor the mini-batch. What verl 0.9.1 does guarantee is that one
    rollout batch is one remote call of ``update_actor`` on each worker (``ray_trainer`` and the V1 trainers),
    with all mini-batches, epochs and micro-batches inside it. Ray gives every remote call its own task id,
    which is therefore an exact, rank-consistent name of the rollout batch. Statistics of the tensors are not:
    they neither differ reliably between rollout batches nor agree between micro-batches of one.
    A change of the id means that the previous rollout batch is complete: the controllers then make one step,
    driven by the estimate up to that point, before the first loss of the new batch.
    Outside Ray (a test, another launcher) there is no id. Then each call moves the controllers by its share
    of the mini-batch, so that the shares of one mini-batch add up to one step; with several mini-batches per
    rollout batch this is correspondingly faster.

Limits
    The estimates are local to a data-parallel rank, so two ranks may step differently while the entropy is
    close to the target; the reported metrics are means over ranks. A restarted process starts from the
    configured values: every moving value is reported as a metric, so that a restart is visible and can be
    started from the last values.

Standard library only: the source of this module becomes part of the block in verl's ``core_algos.py``.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass, field

from verl_overlay.configuration import OverlayConfiguration


def ray_task_id() -> str | None:
    """The id of the remote call being executed, or None outside a Ray worker. Never loads Ray itself."""
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return None
    task_id = ray.get_runtime_context().get_task_id()
    return None if task_id is None else str(task_id)


def guided_positive_weight(
    weight: float, entropy: float, target_entropy: float, step: float, units: float = 1.0
) -> float:
    """PAR, schedule (c), arXiv 2511.05993: ``clip(lambda - step if H < target else lambda + step, 0, 1)``.

    Args:
        weight: lambda, the weight of the loss where A > 0.
        entropy, target_entropy: nats.
        step: change per rollout batch.
        units: rollout batches since the last move; fractions are allowed.
    """
    change = -step if entropy < target_entropy else step
    return min(1.0, max(0.0, weight + units * change))


def adapted_stare_weights(
    amplify: float, damp: float, entropy: float, configuration: OverlayConfiguration, units: float = 1.0
) -> tuple[float, float]:
    """STARE's adaptive schedule, arXiv 2606.19236.

    ``W <- clip(W + a sgn(T - H), 1, W_max)``, ``M <- clip(M - a sgn(T - H), M_min, 1)``, with a the step
    and T the target entropy.

    Args:
        amplify, damp: W and M.
        entropy: nats.
        units: rollout batches since the last move; fractions are allowed.
    """
    c = configuration
    sign = (c.stare_target_entropy > entropy) - (c.stare_target_entropy < entropy)
    change = units * c.stare_step * sign
    return (
        min(c.stare_amplify_max, max(1.0, amplify + change)),
        min(1.0, max(c.stare_damp_min, damp - change)),
    )


@dataclass
class ControlState:
    """What one training process remembers between calls of the loss. Plain Python numbers only."""

    configuration: OverlayConfiguration
    rollout_batch_id: Callable[[], str | None] = ray_task_id
    calls: int = 0
    steps: float = 0.0
    entropy_sum: float = 0.0
    entropy_weight: float = 0.0
    positive_weight: float = field(init=False)
    amplify: float = field(init=False)
    damp: float = field(init=False)
    _batch_id: str | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.positive_weight = self.configuration.positive_weight
        self.amplify = self.configuration.stare_amplify
        self.damp = self.configuration.stare_damp

    @property
    def is_controlled(self) -> bool:
        """True when some weight moves during training."""
        c = self.configuration
        return c.positive_control == "entropy_guided" or (c.token_rule == "stare" and c.stare_adaptive)

    @property
    def entropy(self) -> float | None:
        """The surprisal estimate in nats, or None before the first token."""
        return self.entropy_sum / self.entropy_weight if self.entropy_weight > 0.0 else None

    def begin_call(self) -> None:
        """Count a call; when it is the first of a new rollout batch, make the previous batch's step."""
        self.calls += 1
        if not self.is_controlled:
            return
        batch_id = self.rollout_batch_id()
        if batch_id is not None and self._batch_id is not None and batch_id != self._batch_id:
            self._move(1.0)
        self._batch_id = batch_id

    def end_call(self, entropy_sum: float, entropy_weight: float, share: float) -> None:
        """Remember the estimate; without rollout-batch ids also move by this call's share.

        Args:
            entropy_sum, entropy_weight: the moving average after this call.
            share: this call's share of its mini-batch's tokens.
        """
        self.entropy_sum, self.entropy_weight = entropy_sum, entropy_weight
        if self.is_controlled and self._batch_id is None:
            self._move(share)

    def _move(self, units: float) -> None:
        c, entropy = self.configuration, self.entropy
        if entropy is None:
            return
        self.steps += units
        if c.positive_control == "entropy_guided":
            self.positive_weight = guided_positive_weight(
                self.positive_weight, entropy, c.positive_target_entropy, c.positive_step, units
            )
        if c.token_rule == "stare" and c.stare_adaptive:
            self.amplify, self.damp = adapted_stare_weights(self.amplify, self.damp, entropy, c, units)
