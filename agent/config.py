"""The configuration of a run: typed, every field documented, read from `agent.yaml` and overrides."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, StrictInt, ValidationError, field_validator, model_validator

from agent.errors import ConfigError
from agent.objective import EntropyBand
from search_spaces.space import SearchSpace, SpaceError, describe_validation, read_space, shipped_space
from search_spaces.strict_yaml import YamlError, parse_scalar, read_yaml
from trials.environment import default_prefix, find_python


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class BudgetConfig(_Section):
    """Limits of the user's task."""

    total_hours: float = Field(48.0, gt=0, strict=True)
    """Wall clock from the first start to the submission; down-time counts."""
    training_hours: float = Field(24.0, gt=0, strict=True)
    """Training summed over all trials."""
    inference_minutes: float = Field(10.0, gt=0, strict=True)
    """One run of inference.sh."""
    evaluations: StrictInt = Field(3, ge=1)
    """So often a submission may be handed in; `export --count-evaluation` counts."""
    checkpoint_gb: float | None = Field(None, gt=0, strict=True)
    """Most disk for the checkpoints of one training, in GB: beyond it, those that can no longer be chosen are deleted. By
    default only the checkpoints of trials that lost the search are deleted, and others when the disk runs full."""

    @field_validator("total_hours", "training_hours", "inference_minutes", mode="before")
    @classmethod
    def _no_clock_times(cls, value: Any) -> Any:
        if isinstance(value, str) and ":" in value:
            raise ValueError(f"'{value}' is a clock time; write a plain number in the unit of the key's name")
        return value


class SearchConfig(_Section):
    """The search over loss variants."""

    trials: StrictInt = Field(8, ge=1)
    """Search trials, presets included, baseline not."""
    concurrent: StrictInt | None = Field(None, ge=1)
    """Most trials that run side by side; by default as many as the GPUs hold, and 2 where the CPU trains."""
    gpus_per_trial: StrictInt | None = Field(None, ge=1)
    """GPUs of one trial; by default what train.sh asks. With fewer, cheaper *proxies* run side by side, and the best of
    them are measured again with train.sh's number before one is promoted."""
    remeasured_proxies: StrictInt = Field(2, ge=1)
    """So many of the best proxies are measured again."""
    space: str = "overlay"
    """Name of a shipped search space or path of a YAML file."""
    first_rung_steps: StrictInt | None = Field(None, ge=1)
    """Step at which a trial is judged first; by default an eighth of train.sh's steps."""
    last_rung_steps: StrictInt | None = Field(None, ge=1)
    """Step at which every trial is interrupted; by default half of train.sh's steps."""
    reduction_factor: StrictInt = Field(2, ge=2)
    """ASHA's factor: rungs are this far apart, and one trial in so many goes on at each."""
    startup_trials: StrictInt = Field(6, ge=0)
    """Optuna's TPE samples at random until so many trials, presets included, have ended."""
    startup_timeout_s: float = Field(1800.0, gt=0)
    """A trial without a training step for so long counts as hung."""
    stall_timeout_s: float = Field(600.0, gt=0)
    """A trial silent for so long counts as stalled (or for twenty steps, if that is longer)."""
    failures_in_a_row: StrictInt = Field(3, ge=1)
    """So many trials failing one after the other with the same cause stop the run."""


class ObjectiveConfig(_Section):
    """Dev accuracy, and the entropy band as multiples of the untrained policy's entropy H0."""

    dev_metric: str | None = None
    """Name of the one logged metric that is the dev accuracy, e.g. `val-core/openai/gsm8k/acc/mean@4`; by default all dev
    sources, weighted by their rows."""
    collapsed: float = Field(0.05, gt=0)
    """Score 0 at and below."""
    healthy_low: float = Field(0.50, gt=0)
    """Score 1 from here …"""
    healthy_high: float = Field(1.25, gt=0)
    """… to here."""
    exploded: float = Field(2.5, gt=0)
    """Score 0 at and above."""

    @model_validator(mode="after")
    def _check_order(self) -> "ObjectiveConfig":
        if not self.collapsed < self.healthy_low <= self.healthy_high < self.exploded:
            raise ValueError(
                f"collapsed {self.collapsed} < healthy_low {self.healthy_low} <= healthy_high {self.healthy_high} < "
                f"exploded {self.exploded} does not hold"
            )
        return self

    def band(self) -> EntropyBand:
        return EntropyBand(self.collapsed, self.healthy_low, self.healthy_high, self.exploded)


class AgentConfig(_Section):
    """Everything a run depends on."""

    workspace: Path = Path("workspace")
    """Root of the task. If it is the default and does not exist, the embedded workspace is created there."""
    runs: Path = Path("runs")
    """Folder of run folders."""
    seed: StrictInt = Field(0, ge=0, lt=2**31)
    """Seed of the sampler."""
    ray_address: str | None = Field(None, pattern=r"^(auto|[^:/\s]+:\d+)$")
    """`host:port` of a running Ray cluster (or `auto`) that shares this filesystem; by default a Ray of the run's own."""
    training_env: Path | None = None
    """Prefix of the Python environment that runs verl (a venv or conda prefix), which the agent never changes; by default
    the workspace's folder `conda` if there is one, else the agent's own."""
    budget: BudgetConfig = BudgetConfig()
    search: SearchConfig = SearchConfig()
    objective: ObjectiveConfig = ObjectiveConfig()

    def fingerprint(self) -> dict[str, Any]:
        """The fields that must not change within a run, flat: dotted name → value."""
        return {name: value for name, value in self.flat().items() if name not in _MAY_CHANGE}

    def flat(self) -> dict[str, Any]:
        """Dotted name → value."""
        return _flatten(self.model_dump(mode="json"))

    def training_prefix(self) -> str | None:
        """Prefix of the environment that runs train.sh, merger and inference.sh; None is the agent's own.

        Raises:
            ConfigError: there is no Python in it.
        """
        prefix = self.training_env or default_prefix(self.workspace)
        if prefix is not None and find_python(prefix) is None:
            fix = "name" if self.training_env else "restore it, or set training_env to"
            raise ConfigError(f"training_env {prefix} has no bin/python3; {fix} the folder of a venv or a conda prefix")
        return str(prefix) if prefix else None

    def read_space(self) -> SearchSpace:
        """The search space.

        Raises:
            ConfigError: the space file is wrong.
        """
        try:
            return read_space(self.space_path())
        except SpaceError as error:
            raise ConfigError(str(error)) from None

    def space_path(self) -> Path:
        shipped = shipped_space(self.search.space)
        return shipped if shipped.is_file() else Path(self.search.space).expanduser().resolve()


_MAY_CHANGE = {
    "runs", "ray_address", "search.trials", "search.concurrent", "search.startup_timeout_s", "search.stall_timeout_s",
    "budget.total_hours", "budget.training_hours", "budget.inference_minutes",
}  # fmt: skip
"""A resumed run may get more trials, other slots, another cluster, more hours and more patience."""


def _flatten(mapping: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in mapping.items():
        if isinstance(value, dict):
            flat.update(_flatten(value, f"{prefix}{key}."))
        else:
            flat[prefix + key] = value
    return flat


def load_config(path: Path | None, overrides: Sequence[str] = ()) -> AgentConfig:
    """Read a configuration file and `section.key=value` overrides; paths become absolute.

    Args:
        path: YAML file; None means all defaults.
        overrides: values are YAML.

    Raises:
        ConfigError: unreadable, unknown key, wrong type or range; the message names file, key and value.
    """
    where = str(path) if path else "command line"
    try:
        fields = read_yaml(path) if path else {}
    except YamlError as error:
        raise ConfigError(str(error)) from None
    base = path.parent if path else Path()
    try:
        for override in overrides:
            _set(fields, override)
        for key in ("workspace", "runs", "training_env"):
            if isinstance(fields.get(key), str):
                fields[key] = str(base / Path(fields[key]).expanduser())
    except (YamlError, RuntimeError) as error:
        raise ConfigError(f"{where}: {error}") from None
    try:
        config = AgentConfig.model_validate(fields)
    except ValidationError as error:
        raise ConfigError(f"{where}: {describe_validation(error)}; see agent/config.py for every key") from None
    absolute = {"workspace": config.workspace.resolve(), "runs": config.runs.resolve()}
    if config.training_env is not None:
        absolute["training_env"] = config.training_env.absolute()  # a venv's python is a link that must not be followed
    for key, place in absolute.items():
        if (shown := str(place).encode(errors="backslashreplace").decode()) != str(place):
            raise ConfigError(f"{key} {shown} is not UTF-8 and cannot be written into scripts; rename the folder")
    return config.model_copy(update=absolute)


def _set(fields: dict[str, Any], override: str) -> None:
    name, separator, text = override.partition("=")
    if not separator or not name:
        raise ConfigError(f"--set {override}: write section.key=value")
    *sections, key = name.split(".")
    for section in sections:
        fields = fields.setdefault(section, {})
        if not isinstance(fields, dict):
            raise ConfigError(f"--set {override}: {section} is not a section")
    fields[key] = parse_scalar(text)


def write_config(config: AgentConfig, path: Path) -> None:
    """Write the resolved configuration as YAML, whole or not at all."""
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.write_text(yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False), encoding="utf-8")
    temporary.rename(path)


def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Name → [value before, value after] of what differs, None for what is not there."""
    pairs = {key: [before.get(key), after.get(key)] for key in sorted(before.keys() | after.keys())}
    return {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}


def digest(value: Any) -> str:
    """A short stable hash of a JSON value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]
