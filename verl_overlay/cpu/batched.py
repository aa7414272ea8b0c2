"""A batched agent loop manager for single-turn, text-only tasks with rule rewards.

    +actor_rollout_ref.rollout.agent.agent_loop_manager_class=verl_overlay.cpu.batched.BatchedAgentLoopManager
    reward.num_workers=0

verl's own manager runs one asyncio agent loop, one server call and one reward call per answer, in actors of
their own; with a tiny model that overhead is most of a step. This one lives in the trainer process: one
generation call per rollout server, verl's own reward manager called in place, and one TransferQueue put with
the keys, fields and tags of AgentLoopWorkerTQ._agent_loop_postprocess (verl/trainer/ppo/v1/agent_loop_tq.py).
"""

import asyncio
import time
from dataclasses import dataclass
from typing import Any

import ray
import torch
import transfer_queue as tq
from tensordict import NonTensorData, NonTensorStack
from verl.experimental.agent_loop.agent_loop import AgentLoopOutput, DictConfigWrap
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop
from verl.experimental.reward_loop.reward_loop import RewardLoopWorker
from verl.trainer.ppo.v1.agent_loop_tq import apply_greedy_sampling_params
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.tensordict_utils import list_of_dict_to_tensordict

from verl_overlay.cpu.rollout import server_name

TRAIN_FIELDS = frozenset(
    "prompts responses response_mask rollout_log_probs rm_scores loss_mask input_ids position_ids num_turns "
    "uid reward_model data_source".split()
)
"""All that trainer and engine read of a training row when no option needs more (see _wants_all_fields)."""


@dataclass
class _Request:
    """One answer to make: the prompt's dataset row, which of its n answers this is, and how to sample it."""

    sample: dict[str, Any]
    session: int
    prompt_ids: list[int]
    sampling: dict[str, Any]


class _InPlaceLoop:
    """Stands in for the reward manager's event loop: RewardManagerBase.run_single hands decoding and the
    reward function to a thread pool; here they run at once."""

    async def run_in_executor(self, _executor: Any, function: Any, *args: Any) -> Any:
        return function(*args)


class _OneRow:
    """What RewardManagerBase.run_single reads of a one-row DataProto, without building one."""

    def __init__(self, batch: dict[str, Any], non_tensor_batch: dict[str, Any]) -> None:
        self.batch, self.non_tensor_batch = batch, non_tensor_batch

    def __getitem__(self, _: Any) -> "_OneRow":
        return self

    def __len__(self) -> int:
        return 1


class BatchedAgentLoopManager:
    """See the module's docstring."""

    @classmethod
    def create(cls, **kwargs: Any) -> "BatchedAgentLoopManager":
        """Called by verl's TaskRunnerV1.init_agent_loop_manager."""
        return cls(**kwargs)

    def __init__(
        self, config: Any, llm_client: Any, teacher_client: Any = None, reward_loop_worker_handles: Any = None
    ) -> None:
        model = omega_conf_to_dataclass(config.actor_rollout_ref.model)
        if teacher_client or config.reward.reward_model.enable or model.processor is not None:
            raise ValueError("BatchedAgentLoopManager does text-only tasks with rule rewards and no teacher")
        self._config, self._rollout = config, config.actor_rollout_ref.rollout
        self._loop = asyncio.new_event_loop()
        asyncio.set_event_loop(self._loop)
        self._agent = SingleTurnAgentLoop(
            trainer_config=DictConfigWrap(config),
            server_manager=llm_client,
            tokenizer=model.tokenizer,
            processor=None,
            dataset_cls=None,
            data_config=DictConfigWrap(config.data),
            hf_model_type=getattr(model.hf_config, "model_type", None),
        )
        self._reward: Any = RewardLoopWorker(config)  # the plain class: scores in this process
        self._reward.reward_manager.loop = _InPlaceLoop()
        self._keep_all = _wants_all_fields(config)
        self._servers: list[Any] = []

    def generate_sequences(self, batch: Any) -> None:
        """Answer every prompt of the batch, score the answers and put them into the TransferQueue."""
        validate = bool(batch["validate"]) if "validate" in batch else False
        batch.pop("validate", None)
        samples = [_row(batch, i) for i in range(len(batch))]
        requests = [request for sample in samples for request in self._requests(sample, validate)]
        started = time.perf_counter()
        answers = self._generate(requests)
        seconds = time.perf_counter() - started
        outputs = [self._as_output(r, a, seconds) for r, a in zip(requests, answers, strict=True)]
        self._loop.run_until_complete(self._score(requests, outputs))
        partition = "val" if validate else "train"
        self._store(requests, outputs, partition, keep_all=validate or self._keep_all)
        prompts = [sample["uid"] for sample in samples]
        tq.kv_batch_put(keys=prompts, partition_id=partition, tags=[{"status": "finished"}] * len(prompts))

    def _requests(self, sample: dict[str, Any], validate: bool) -> list[_Request]:
        """AgentLoopWorkerTQ._run_prompt: n answers, with the sampling settings of this kind of batch."""
        agent = sample.pop("agent_name", self._rollout.agent.default_agent_loop)
        if agent != "single_turn_agent":
            raise ValueError(f"BatchedAgentLoopManager runs single_turn_agent only, not {agent}")
        source = self._rollout.val_kwargs if validate else self._rollout
        count = int(sample.pop("__rollout_n__", source.n))
        sampling = {
            "temperature": source.temperature,
            "top_p": source.top_p,
            "top_k": source.top_k,
            "repetition_penalty": 1.0,
            "logprobs": self._rollout.calculate_log_probs,
        }
        if not sample.pop("__do_sample__", True) and not validate:
            apply_greedy_sampling_params(sampling)
        ids = self._agent.continuous_token_builder.build_initial_tokens(list(sample["raw_prompt"]))
        ids = self._agent._cap_text_prompt_length(ids)
        return [_Request(sample, session, ids, sampling) for session in range(count)]

    def _generate(self, requests: list[_Request]) -> list[Any]:
        """The requests in equal shares over the rollout servers."""
        if not self._servers:
            replicas = self._config.trainer.n_gpus_per_node * self._config.trainer.nnodes
            self._servers = [ray.get_actor(server_name(rank)) for rank in range(replicas)]
        share = -(-len(requests) // len(self._servers))
        calls = []
        for server, start in zip(self._servers, range(0, len(requests), share), strict=False):
            part = requests[start : start + share]
            prompts, sampling = [r.prompt_ids for r in part], [r.sampling for r in part]
            calls.append(server.generate_batch.remote(prompts, sampling))
        return [answer for part in ray.get(calls) for answer in part]

    def _as_output(self, request: _Request, answer: Any, seconds: float) -> Any:
        """What SingleTurnAgentLoop.run returns for this answer."""
        limit = self._rollout.response_length
        tokens, version = answer.token_ids[:limit], answer.extra_fields["global_steps"]
        versions = {name: version for name in ("global_steps", "min_global_steps", "max_global_steps")}
        return AgentLoopOutput(
            prompt_ids=request.prompt_ids,
            response_ids=tokens,
            response_mask=[1] * len(tokens),
            response_logprobs=answer.log_probs[:limit] if answer.log_probs else None,
            routed_experts=None,
            multi_modal_data={},
            mm_processor_kwargs={},
            mm_processor_output=None,
            num_turns=2,
            metrics={"generate_sequences": seconds, "num_preempted": answer.num_preempted},
            extra_fields={**versions, "turn_scores": [], "tool_rewards": []},
        )

    async def _score(self, requests: list[_Request], outputs: list[Any]) -> None:
        """AgentLoopWorker._compute_score, one answer after the other, in this process."""
        for request, output in zip(requests, outputs, strict=True):
            started = time.perf_counter()
            result = await self._reward.reward_manager.run_single(_reward_row(request, output))
            output.reward_score = result["reward_score"]
            output.extra_fields["reward_extra_info"] = result["reward_extra_info"]
            output.metrics.compute_score = time.perf_counter() - started

    def _store(self, requests: list[_Request], outputs: list[Any], partition: str, keep_all: bool) -> None:
        """AgentLoopWorkerTQ._agent_loop_postprocess for all answers in one put."""
        keys, rows, tags = [], [], []
        for request, output in zip(requests, outputs, strict=True):
            fields = _fields(request, output)
            keys.append(f"{request.sample['uid']}_{request.session}_0")
            tags.append(_tag(fields))
            rows.append(fields if keep_all else {k: v for k, v in fields.items() if k in TRAIN_FIELDS})
        tq.kv_batch_put(keys=keys, fields=list_of_dict_to_tensordict(rows), tags=tags, partition_id=partition)


def _wants_all_fields(config: Any) -> bool:
    """Dynamic sampling and rollout dumps read further fields of the training rows."""
    groups = config.algorithm.get("filter_groups", None)
    return bool(config.trainer.get("rollout_data_dir", None) or (groups and groups.get("enable")))


def _row(batch: Any, index: int) -> dict[str, Any]:
    """Row `index` of a TensorDict as plain values (AgentLoopWorkerTQ.generate_sequences does the same)."""
    row: dict[str, Any] = {}
    for key, value in batch.items():
        if isinstance(value, NonTensorStack):
            row[key] = value[index].data
        elif isinstance(value, NonTensorData):
            row[key] = value.data
        else:
            row[key] = value[index]
    return row


def _reward_row(request: _Request, output: Any) -> _OneRow:
    responses = torch.tensor(output.response_ids, dtype=torch.int64)
    prompts = torch.tensor(output.prompt_ids, dtype=torch.int64)
    extra = {
        "session_id": request.session,
        "extra_info": dict(request.sample.get("extra_info") or {}),
        "__num_turns__": output.num_turns,
        "tool_extra_fields": dict(output.extra_fields),
        "prompt_len": len(prompts),
        "response_len": len(responses),
    }
    mask = torch.ones(len(prompts) + len(responses), dtype=torch.int64)
    tensors = {"responses": responses, "prompts": prompts, "attention_mask": mask}
    return _OneRow(tensors, {**request.sample, **extra})


def _fields(request: _Request, output: Any) -> dict[str, Any]:
    fields: dict[str, Any] = output.as_dict()
    fields.update(request.sample, session_id=request.session)
    fields.pop("multi_modal_data", None)
    fields["loss_mask"] = fields["response_mask"]
    fields["input_ids"] = torch.cat([fields["prompts"], fields["responses"]])
    fields["position_ids"] = torch.arange(len(fields["input_ids"]))
    fields["multi_modal_inputs"] = {}
    return fields


def _tag(fields: dict[str, Any]) -> dict[str, Any]:
    prompt_len, response_len = len(fields["prompts"]), len(fields["responses"])
    return {
        "status": "success",
        "prompt_len": prompt_len,
        "response_len": response_len,
        "seq_len": prompt_len + response_len,
        "global_steps": fields["global_steps"],
        "min_global_steps": fields["extra_fields"]["min_global_steps"],
        "max_global_steps": fields["extra_fields"]["max_global_steps"],
    }
