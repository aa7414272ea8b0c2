"""Compares an installed overlay with the verl that it was installed in: a script, run once per verl version.

Usage: ``python version_checks.py CORE_ALGOS_PY FOLDER PRESETS_JSON`` with that verl first on PYTHONPATH. The last line
of its standard output is ``RESULT`` and a JSON object: what is compared -> [number of comparisons, what differed].

Nothing of this project is imported here: the block in ``core_algos.py`` must stand alone.
"""

import ast
import inspect
import itertools
import json
import os
import sys
from collections import defaultdict
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch

CORE_ALGOS = Path(sys.argv[1])
FOLDER = Path(sys.argv[2])
PRESETS: dict[str, dict[str, Any]] = json.loads(sys.argv[3])
CODE = compile(CORE_ALGOS.read_text(), str(CORE_ALGOS), "exec")
SHARED_NAMES = ("old_log_prob", "log_prob", "advantages")
BATCH_INFO = {"dp_size": 2, "batch_num_tokens": 71, "global_batch_size": 12, "loss_scale_factor": None}

results: dict[str, list[Any]] = defaultdict(lambda: [0, []])


def note(name: str, holds: bool, case: object) -> None:
    """Count one comparison; keep the first cases that differ."""
    results[name][0] += 1
    if not holds and len(results[name][1]) < 5:
        results[name][1].append(str(case))


def live(values: dict[str, Any], folder: Path | None = None, **environment: str) -> ModuleType:
    """``core_algos.py`` as a training with this overlay configuration imports it."""
    chosen = {"VERL_OVERLAY": json.dumps(values), "VERL_OVERLAY_FOLDER": str(folder or ""), "RANK": "0", **environment}
    os.environ.update(chosen)
    module = ModuleType("verl.trainer.ppo.core_algos")
    module.__file__ = str(CORE_ALGOS)
    exec(CODE, module.__dict__)
    return module


def argument_names(function: Any) -> list[str]:
    return list(inspect.signature(function).parameters)


def shape_of(core: ModuleType) -> str:
    """Which of verl's three call shapes a module has, told from verl's own functions."""
    if hasattr(core, "compute_policy_loss_vanilla"):
        return "registry"
    return "four" if hasattr(core, "agg_loss") else "three"


def aggregation_modes(core: ModuleType) -> list[str]:
    """The modes that verl's ``agg_loss`` knows, read from its source; one in a verl without it."""
    if SHAPE == "three":
        return ["token-mean"]
    defined = [node for node in ast.parse(CORE_ALGOS.read_text()).body if isinstance(node, ast.FunctionDef)]
    function = next(node for node in defined if node.name == "agg_loss")
    compared = [node for node in ast.walk(function) if isinstance(node, ast.Compare)]
    of_mode = [node for node in compared if ast.unparse(node.left) == "loss_agg_mode"]
    constants = [item for node in of_mode for part in node.comparators for item in ast.walk(part)]
    return sorted({str(item.value) for item in constants if isinstance(item, ast.Constant)})


# ---- inputs ----


def batch(seed: int, drift: float, rows: int = 6, width: int = 9, shortest: int = 1) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    old = -torch.rand(rows, width, generator=generator) * 3
    new = old + drift * torch.randn(rows, width, generator=generator)
    lengths = torch.randint(shortest, width + 1, (rows, 1), generator=generator)
    mask = torch.arange(width)[None] < lengths
    advantages = torch.randn(rows, 1, generator=generator) * mask
    return dict(zip((*SHARED_NAMES, "response_mask"), (old, new, advantages, mask), strict=True))


def actor_config(**values: Any) -> Any:
    """verl's actor configuration where the loss reads one."""
    clip = {"clip_ratio": 0.2, "clip_ratio_low": 0.2, "clip_ratio_high": 0.28} | values
    if SHAPE != "registry":
        return SimpleNamespace(**clip)
    from verl.workers.config import ActorConfig, PolicyLossConfig

    if "policy_loss" in clip:
        clip["policy_loss"] = PolicyLossConfig(**vars(clip["policy_loss"]))
    return ActorConfig(strategy="fsdp", rollout_n=8, ppo_micro_batch_size_per_gpu=1, **clip)


def vanilla_call(
    function: Any, inputs: dict[str, torch.Tensor], mode: str = "token-mean", config: Any = None, weights: Any = None
) -> tuple[torch.Tensor, torch.Tensor, Any]:
    """Loss, gradient and the rest of what verl's vanilla loss returns, called by keyword as verl's actor does."""
    leaf = inputs["log_prob"].clone().requires_grad_()
    named: dict[str, Any] = {**inputs, "log_prob": leaf}
    if SHAPE == "three":
        named["eos_mask"] = named.pop("response_mask")
        named["cliprange"] = 0.2
    elif SHAPE == "four":
        high = 0.28 if config is None else config.clip_ratio_high
        named |= {"cliprange": 0.2, "cliprange_low": 0.2, "cliprange_high": high, "clip_ratio_c": 3.0}
        named["loss_agg_mode"] = mode
    else:
        named |= {"loss_agg_mode": mode, "config": actor_config() if config is None else config}
        named["rollout_is_weights"] = weights
    loss, *rest = function(**named)
    loss.backward()
    assert leaf.grad is not None
    return loss.detach(), leaf.grad, rest[0] if SHAPE == "registry" else [number.item() for number in rest]


def live_loss(core: ModuleType) -> Any:
    """The loss that verl's actor reaches."""
    return core.get_policy_loss_fn("vanilla") if SHAPE == "registry" else core.compute_policy_loss


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    return left.dtype == right.dtype == torch.float32 and torch.equal(left.view(torch.int32), right.view(torch.int32))


def close(left: torch.Tensor, right: torch.Tensor) -> bool:
    return torch.allclose(left, right, rtol=1e-6, atol=1e-6, equal_nan=True)


# ---- the policy loss ----


def check_vanilla() -> None:
    """All-off is verl's own bit for bit; the composed path with verl's own values is verl's own to 1e-6."""
    off = live({})
    neutral = live({"clip_high": 0.2 if SHAPE == "three" else 0.28})
    has_info = SHAPE == "registry" and "dp_size" in argument_names(off._overlay.aggregate)
    cases = itertools.product(
        MODES,
        range(3),
        (0.0, 0.4, 30.0),
        (torch.bool, torch.int64, torch.float32),
        (False, True) if SHAPE == "registry" else (False,),
        (False, True) if has_info else (False,),
    )
    for mode, seed, drift, dtype, weighted, informed in cases:
        case = (mode, seed, drift, dtype, weighted, informed)
        inputs = batch(seed, drift)
        inputs["response_mask"] = inputs["response_mask"].to(dtype)
        weights = torch.rand_like(inputs["advantages"]) * 2 if weighted else None
        config = actor_config()
        if informed:
            config.global_batch_info.update(BATCH_INFO)
        loss, gradient, rest = vanilla_call(off._overlay.vanilla, inputs, mode, config, weights)
        same, same_gradient, same_rest = vanilla_call(live_loss(off), inputs, mode, config, weights)
        note("all-off loss", same_bits(loss, same), case)
        note("all-off gradient", same_bits(gradient, same_gradient) and bool(gradient.abs().sum() > 0), case)
        shown = {key: same_rest[key] for key in rest} if SHAPE == "registry" else same_rest
        note("all-off metrics", shown == rest, case)
        if SHAPE == "three" and drift > 1.0:
            continue  # verl 0.3 does not limit the log-ratio, the overlay does
        near, near_gradient, _ = vanilla_call(live_loss(neutral), inputs, mode, config, weights)
        note("neutral loss", close(loss, near), (case, float(loss), float(near)))
        note("neutral gradient", close(gradient, near_gradient), case)


def check_masked_rows() -> None:
    """A response without tokens: whatever verl makes of it, all-off makes the same."""
    off = live({})
    for mode, seed in itertools.product(MODES, range(3)):
        inputs = batch(seed, 0.4, shortest=0)
        inputs["response_mask"][seed] = False
        loss, gradient, _ = vanilla_call(off._overlay.vanilla, inputs, mode)
        same, same_gradient, _ = vanilla_call(live_loss(off), inputs, mode)
        note("all-off with an empty response", same_bits(loss, same) and same_bits(gradient, same_gradient), mode)


def check_plain_configuration() -> None:
    """verl's actor configuration may also be a plain OmegaConf object."""
    from omegaconf import OmegaConf

    values = {"clip_ratio": 0.2, "clip_ratio_low": 0.2, "clip_ratio_high": 0.28, "global_batch_info": {}}
    config = OmegaConf.create(values)
    OmegaConf.set_struct(config, True)
    inputs = batch(0, 0.4)
    loss, gradient, _ = vanilla_call(live({})._overlay.vanilla, inputs, config=config)
    for values, equal in (({}, same_bits), ({"clip_high": 0.28}, close)):
        found, found_gradient, _ = vanilla_call(live_loss(live(values)), inputs, config=config)
        note("OmegaConf configuration", equal(loss, found) and equal(gradient, found_gradient), values)


def own_call(core: ModuleType, name: str, inputs: dict[str, torch.Tensor], mode: str, config: Any) -> Any:
    """Loss and gradient of another loss of verl's registry."""
    leaf = inputs["log_prob"].clone().requires_grad_()
    tensors = (inputs["old_log_prob"], leaf, inputs["advantages"], inputs["response_mask"])
    loss = core.get_policy_loss_fn(name)(*tensors, mode, config)[0]
    loss.backward()
    return loss.detach(), leaf.grad


def compare_preset(name: str, changes: dict[str, Any], config: Any, mode: str, drift: float) -> None:
    """A preset, with the given changes, against verl's own loss of that name."""
    off, preset = live({}), live(PRESETS[name] | changes)
    for seed in range(4):
        inputs = batch(seed, drift, rows=40, width=30)
        torch.manual_seed(seed)
        loss, gradient = own_call(off, name, inputs, mode, config)
        torch.manual_seed(seed)
        found, found_gradient, _ = vanilla_call(live_loss(preset), inputs, mode, config)
        plain, _, _ = vanilla_call(live_loss(off), inputs, mode, config)
        note(f"{name} acts", not close(loss, plain), (mode, seed))
        note(name, close(loss, found) and close(gradient, found_gradient), (mode, seed, float(loss), float(found)))


def check_presets_against_verl() -> None:
    policy_loss = SimpleNamespace(
        clip_cov_ratio=0.01, clip_cov_lb=0.2, clip_cov_ub=4.0, kl_cov_ratio=0.02, ppo_kl_coef=1.5
    )
    registered = live({}).POLICY_LOSS_REGISTRY if SHAPE != "three" else {}
    config = actor_config(clip_ratio_high=0.2, policy_loss=policy_loss)
    for mode in MODES:
        if "clip_cov" in registered:
            values = {"clip_cov.ratio": 0.01, "clip_cov.lower": 0.2, "clip_cov.upper": 4.0}
            compare_preset("clip_cov", values, config, mode, 0.4)
        if "kl_cov" in registered:
            compare_preset("kl_cov", {"kl_cov.ratio": 0.02, "kl_cov.coef": 1.5}, config, mode, 0.4)
        if "cispo" in registered:
            compare_preset("cispo", {}, actor_config(clip_ratio_low=1.0, clip_ratio_high=0.2), mode, 0.4)
    if "gspo" in registered:
        config = actor_config(clip_ratio_low=3e-4, clip_ratio_high=4e-4)
        compare_preset("gspo", {}, config, "seq-mean-token-mean", 2e-3)


def check_every_preset() -> None:
    """Each preset is either refused at import with a reason, or trains: finite loss and gradient."""
    for name, values in PRESETS.items():
        try:
            core = live(values)
        except Exception as error:
            results["refused presets"].append(f"{name}: {type(error).__name__}: {error}")
            continue
        inputs = batch(1, 0.3, rows=12, width=16, shortest=2)
        for _ in range(2):
            loss, gradient, _ = vanilla_call(live_loss(core), inputs)
            note("presets train", bool(torch.isfinite(loss) and torch.isfinite(gradient).all()), name)
        note("padding has no gradient", bool((gradient[~inputs["response_mask"]] == 0).all()), name)


# ---- the advantage ----


def rewards(seed: int, values: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor, np.ndarray]:
    """Token-level rewards, mask and groups of 4, 4, 4 and one response on its own."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 9, (13, 1), generator=generator)
    mask = torch.arange(8)[None] < lengths
    scores = torch.rand(13, generator=generator).round(decimals=1) if values is None else values
    token_level = torch.zeros(13, 8).scatter_(1, lengths - 1, scores[:, None])
    return token_level, mask, np.array([f"prompt {i // 4}" for i in range(13)], dtype=object)


def check_advantage() -> None:
    mask_name = "eos_mask" if SHAPE == "three" else "response_mask"
    off, off_std, on_std = live({}), live({"advantage.std": "off"}), live({"advantage.std": "on"})
    has_switch = "norm_adv_by_std_in_grpo" in argument_names(off._overlay.grpo)
    for seed, dtype in itertools.product(range(4), (torch.bool, torch.int64, torch.float32)):
        token_level, mask, index = rewards(seed)
        named = {"token_level_rewards": token_level, mask_name: mask.to(dtype), "index": index}
        own, own_returns = off._overlay.grpo(**named)
        for arguments, more in (((), named), (tuple(named.values()), {})):
            found, returns = off.compute_grpo_outcome_advantage(*arguments, **more)
            note("all-off advantage", same_bits(own, found) and same_bits(own_returns, returns), (seed, dtype))
            found, returns = on_std.compute_grpo_outcome_advantage(*arguments, **more)
            note("composed advantage", close(own, found) and close(own_returns, returns), (seed, dtype))
        if has_switch:
            plain, _ = off.compute_grpo_outcome_advantage(**named, norm_adv_by_std_in_grpo=False)
            found, _ = off_std.compute_grpo_outcome_advantage(**named, norm_adv_by_std_in_grpo=True)
            note("Dr.GRPO advantage", close(plain, found) and not close(own, found), (seed, dtype))


def check_gdpo() -> None:
    off, decoded = live({}), live(PRESETS["gdpo"])
    if not hasattr(off, "compute_gdpo_outcome_advantage"):
        return
    for seed in range(4):
        generator = torch.Generator().manual_seed(seed)
        parts = torch.randint(0, 2, (2, 13), generator=generator) * torch.tensor([[1.0], [0.1]])
        token_level, mask, index = rewards(seed, parts.sum(dim=0))
        attention = torch.cat([torch.ones(13, 3, dtype=torch.int64), mask.long()], dim=1)
        own, _ = off.compute_gdpo_outcome_advantage(
            token_level,
            mask,
            index,
            config={"gdpo_reward_keys": ["correct", "format"]},
            non_tensor_batch={"correct": parts[0].numpy(), "format": parts[1].numpy()},
            batch={"prompts": torch.zeros(13, 3), "attention_mask": attention},
        )
        found, _ = decoded.compute_grpo_outcome_advantage(token_level, mask, index)
        note("gdpo", close(own, found), (seed, float((own - found).abs().max())))


# ---- records and metrics ----


def records_in(folder: Path) -> list[dict[str, Any]]:
    path = folder / "overlay.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def check_records() -> None:
    """Where the loss returns no metrics, one record per training call; elsewhere the metrics themselves."""
    for number, values in enumerate(({}, {"token_rule": "cw"})):
        folder = FOLDER / f"records-{number}"
        core = live(values, folder)
        losses, shown = [], []
        for seed in range(3):
            loss, _, rest = vanilla_call(live_loss(core), batch(seed, 0.4))
            losses.append(float(loss))
            shown.append(rest)
            with torch.no_grad():
                call_without_gradient(core)
        kept = [record for record in records_in(folder) if record["kind"] == "loss"]
        identity = core._overlay_names["configuration_id"](core._overlay.state.configuration)
        if SHAPE == "registry":
            note("no loss records", kept == [], kept)
            kept = shown
        else:
            note("recorded losses", [record["actor/pg_loss"] for record in kept] == losses, kept)
        note("calls", [item.get("overlay/calls") for item in kept] == [1, 2, 3], kept)
        note("identity", [item.get("overlay/configuration_id") for item in kept] == [identity] * 3, kept)
        shares = [item.get("overlay/reweighted_share", 0.0) for item in kept]
        note("reweighted share", [share > 0.5 for share in shares] == [bool(values)] * 3, shares)
    silent = FOLDER / "silent"
    for folder, rank in ((None, "0"), (silent, "1")):
        vanilla_call(live_loss(live({"token_rule": "cw"}, folder, RANK=rank)), batch(0, 0.4))
    written = [path.name for path in (*Path.cwd().iterdir(), *silent.glob("*"))]
    note("no records without a folder, none of other ranks", written == [], written)


def call_without_gradient(core: ModuleType) -> None:
    """What does not train is not counted."""
    inputs = batch(9, 0.4)
    mask = inputs.pop("response_mask")
    if SHAPE == "registry":
        live_loss(core)(*inputs.values(), mask, config=actor_config())
    else:
        live_loss(core)(*inputs.values(), mask, 0.2)


def main() -> None:
    torch.set_num_threads(1)
    check_vanilla()
    check_masked_rows()
    if SHAPE == "registry":
        check_plain_configuration()
    check_presets_against_verl()
    check_every_preset()
    check_advantage()
    check_gdpo()
    check_records()
    assert "verl_overlay" not in sys.modules
    results["modes"] = MODES
    results["shape"] = [SHAPE]
    print("RESULT " + json.dumps(results))


import verl.trainer.ppo.core_algos as imported  # noqa: E402

assert Path(imported.__file__) == CORE_ALGOS, imported.__file__
SHAPE = shape_of(imported)
MODES = aggregation_modes(imported)

if __name__ == "__main__":
    main()
