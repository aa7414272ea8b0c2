"""The rollout `torch_cpu`: generation with torch and transformers in a Ray actor of its own.

TorchCPUServer    Ray actor that holds the rollout copy of the policy
TorchCPUReplica   verl's handle on one server
ServerAdapter     lives in the actor worker and sends the trained weights to the server
"""

import asyncio
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ray
import torch
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.replica import RolloutReplica, TokenOutput

from verl_overlay.cpu.generator import Generation, SamplingParams, generate

BATCH_WINDOW_S = 0.02
MAX_BATCH = 256


def server_name(replica_rank: int) -> str:
    return f"torch_cpu_server_{replica_rank}"


class TorchCPUServer:
    """Holds the rollout weights and answers generation requests.

    `generate` serves verl's per-answer agent loop: requests that arrive within a short window share a batch.
    `generate_batch` serves BatchedAgentLoopManager with a whole rollout batch at once.
    """

    def __init__(self, config: Any, model_config: Any, replica_rank: int) -> None:
        from transformers import AutoModelForCausalLM
        from verl.utils.config import omega_conf_to_dataclass
        from verl.workers.config import HFModelConfig

        self._config = config
        self._model_config: Any = omega_conf_to_dataclass(model_config, dataclass_type=HFModelConfig)
        torch.manual_seed(int(config.seed) + replica_rank)
        # Random weights, as vLLM's load_format=dummy: the first update_weights fills them in.
        hf_config = self._model_config.hf_config
        self._model: Any = AutoModelForCausalLM.from_config(hf_config, dtype=torch.float32).eval()
        self._eos_ids = _eos_ids(self._model_config)
        pad = self._model_config.tokenizer.pad_token_id
        self._pad_id: int = pad if pad is not None else next(iter(self._eos_ids))
        self._global_steps: int | None = None
        self._thread = ThreadPoolExecutor(1)
        self._waiting: list[tuple[list[int], SamplingParams, asyncio.Future[Generation]]] = []
        self._drain: asyncio.Task[None] | None = None

    async def generate(
        self, prompt_ids: Sequence[int], sampling_params: dict[str, Any], request_id: str, **_: Any
    ) -> Any:
        """One answer (the call verl's LLMServerClient makes)."""
        answer: asyncio.Future[Generation] = asyncio.get_running_loop().create_future()
        self._waiting.append((list(prompt_ids), self._params(prompt_ids, sampling_params), answer))
        if self._drain is None or self._drain.done():
            self._drain = asyncio.create_task(self._answer_waiting())
        return self._output(await answer, sampling_params)

    async def generate_batch(self, prompts: list[list[int]], sampling_params: list[dict[str, Any]]) -> list[Any]:
        """One answer per prompt, in order."""
        params = [self._params(ids, p) for ids, p in zip(prompts, sampling_params, strict=True)]
        answers: list[Generation] = []
        for start in range(0, len(prompts), MAX_BATCH):
            answers += await self._run(prompts[start : start + MAX_BATCH], params[start : start + MAX_BATCH])
        return [self._output(a, p) for a, p in zip(answers, sampling_params, strict=True)]

    async def _answer_waiting(self) -> None:
        await asyncio.sleep(BATCH_WINDOW_S)
        while self._waiting:
            batch, self._waiting = self._waiting[:MAX_BATCH], self._waiting[MAX_BATCH:]
            try:
                answers = await self._run([ids for ids, _, _ in batch], [p for _, p, _ in batch])
            except Exception as error:
                for _, _, future in batch:
                    future.set_exception(error)
                continue
            for (_, _, future), answer in zip(batch, answers, strict=True):
                future.set_result(answer)

    async def _run(self, prompts: list[list[int]], params: list[SamplingParams]) -> list[Generation]:
        loop = asyncio.get_running_loop()
        args = (self._model, prompts, params, self._eos_ids, self._pad_id)
        return await loop.run_in_executor(self._thread, generate, *args)

    def _params(self, prompt_ids: Sequence[int], given: dict[str, Any]) -> SamplingParams:
        limit = self._config.response_length
        wanted = int(given.get("max_tokens", given.get("max_new_tokens", limit)))
        room = self._config.prompt_length + limit - len(prompt_ids)
        return SamplingParams(
            max_tokens=max(1, min(wanted, room, limit)),
            temperature=float(given.get("temperature", 1.0)),
            top_k=int(given.get("top_k", -1)),
            top_p=float(given.get("top_p", 1.0)),
        )

    def _output(self, answer: Generation, given: dict[str, Any]) -> Any:
        return TokenOutput(
            token_ids=answer.token_ids,
            log_probs=answer.log_probs if given.get("logprobs") else None,
            stop_reason="completed" if answer.finished else "length",
            num_preempted=0,
            extra_fields={"global_steps": self._global_steps},
        )

    async def load_weights(self, weights: dict[str, torch.Tensor], global_steps: int | None) -> None:
        """Take over the trained weights; anything missing or unknown is an error."""
        missing, unexpected = self._model.load_state_dict(weights, strict=False)
        tied = {"lm_head.weight"} if self._model_config.hf_config.tie_word_embeddings else set()
        if set(missing) - tied or unexpected:
            raise RuntimeError(f"rollout weights do not match: missing={missing} unexpected={unexpected}")
        self._model.tie_weights()
        self._global_steps = global_steps

    async def set_global_steps(self, global_steps: int) -> None:
        self._global_steps = global_steps

    # verl's server controls; there is no device memory to hand back and nothing to abort on a CPU.
    async def wake_up(self, tags: Any = None) -> None: ...
    async def sleep(self) -> None: ...
    async def clear_kv_cache(self) -> None: ...
    async def release_kv_cache(self) -> None: ...
    async def resume_kv_cache(self) -> None: ...
    async def abort_all_requests(self, reject_request: bool = False) -> None: ...
    async def resume_generation(self) -> None: ...
    async def start_profile(self, **_: Any) -> None: ...
    async def stop_profile(self) -> None: ...


def _eos_ids(model_config: Any) -> set[int]:
    generation = model_config.generation_config
    eos = generation.eos_token_id if generation else None
    eos = model_config.hf_config.eos_token_id if eos is None else eos
    return set(eos) if isinstance(eos, list | tuple) else {eos}


class TorchCPUReplica(RolloutReplica):  # type: ignore[misc]
    """One TorchCPUServer; parallel sizes other than 1 make no sense here."""

    async def launch_servers(self) -> None:
        if self.world_size != 1:
            raise ValueError("torch_cpu: tensor, data and pipeline parallel sizes must be 1")
        rank = self.replica_rank
        actor: Any = ray.remote(TorchCPUServer).options(
            num_cpus=0, name=server_name(rank), max_concurrency=self.max_concurrency
        )
        server = actor.remote(config=self.config, model_config=self.model_config, replica_rank=rank)
        self.servers = [server]
        self._server_handle = server
        self._server_address = f"torch_cpu:{self.replica_rank}"
        await server.wake_up.remote()


class ServerAdapter(BaseRollout):  # type: ignore[misc]
    """The actor worker's side of the rollout: it only sends weights."""

    def __init__(self, config: Any, model_config: Any, device_mesh: Any, replica_rank: int = -1) -> None:
        super().__init__(config, model_config, device_mesh)
        self.replica_rank = int(os.environ["RANK"]) if replica_rank == -1 else replica_rank
        self.is_leader_rank = True
        self._server: Any = None

    async def resume(self, tags: list[str]) -> None:
        """Nothing was released."""

    async def release(self) -> None:
        """The rollout copy stays where it is."""

    @torch.no_grad()
    async def update_weights(
        self, weights: Any, wire_format: str = "named_tensors", global_steps: int | None = None, **_: Any
    ) -> None:
        from verl.workers.rollout.utils import ensure_async_iterator

        if wire_format != "named_tensors":
            raise ValueError(f"torch_cpu takes named_tensors, not {wire_format}")
        if self._server is None:
            self._server = ray.get_actor(server_name(self.replica_rank))
        full = {name: t.detach().float().cpu().clone() async for name, t in ensure_async_iterator(weights)}
        await self._server.load_weights.remote(full, global_steps)
