"""verl's replay buffer with a poll interval that fits sub-second steps.

trainer.v1.sampler.custom_sampler.path=pkg://verl_overlay.cpu.sampler
trainer.v1.sampler.custom_sampler.name=FastPollReplayBuffer
"""

from typing import Any

from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer


class FastPollReplayBuffer(ReplayBuffer):  # type: ignore[misc]
    """The stock buffer looks for finished answers every 2 s (replay_buffer.py: poll_interval), this one every
    20 ms."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs["poll_interval"] = 0.02
        super().__init__(*args, **kwargs)
