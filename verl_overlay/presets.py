"""Published methods as points of the overlay's configuration space.

A preset holds the published values where they are public; where this project had to choose a value or reduce a
method to what a loss can see, its ``note`` says so. ``inert_on_policy`` marks what does nothing while each rollout
batch is used for one update: the importance ratio is then exactly 1.

Standard library only.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from verl_overlay.configuration import parse_configuration


@dataclass(frozen=True)
class Preset:
    """One method."""

    title: str
    source: str
    """arXiv id, or what it is without one."""
    formula: str
    acts: str
    """Where: the advantage, the token losses, ..."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    inert_on_policy: bool = False
    missing_in: str = ""
    """verl versions in which it cannot act, with the reason; empty when in all."""
    note: str = ""

    @property
    def needs_schedule(self) -> bool:
        """True when ``schedule.steps``, the length of the run, must be set beside the settings."""
        return parse_configuration({**self.settings, "schedule.steps": 1}).needs_schedule

    def complete(self, schedule_steps: float) -> dict[str, Any]:
        """The settings, with the length of the run (rollout batches) where they need it."""
        return dict(self.settings) | ({"schedule.steps": schedule_steps} if self.needs_schedule else {})


_NO_STASH = (
    "0.3 (no token entropies before the update); trainers with one advantage per response (0.8's main_ppo_sync, "
)
_NO_STASH += "0.9's default)"
_NO_AGGREGATION = "0.3 (always the token mean)"
_TOKENS = "token losses"
_ADVANTAGE = "advantage of the response, on the trainer's process"

PRESETS: dict[str, Preset] = {
    "grpo": Preset(
        "GRPO",
        "arXiv 2402.03300",
        "A = (R - mean) / (std + 1e-6); max(-A r, -A clip(r, 1 - e, 1 + e)), for A < 0 at most -A c",
        "everything as in verl",
    ),
    "dr_grpo": Preset(
        "Dr.GRPO",
        "arXiv 2503.20783",
        "A = R - mean; sum of a response's token losses / constant",
        f"{_ADVANTAGE}; aggregation",
        {"advantage.std": "off", "aggregation": "seq-mean-token-sum-norm"},
        missing_in=_NO_AGGREGATION,
        note="the step is smaller than GRPO's by about |A| times length / longest length: tune the learning rate",
    ),
    "clip_higher": Preset(
        "DAPO's clip-higher",
        "arXiv 2503.14476",
        "clip(r, 1 - 0.2, 1 + 0.28)",
        _TOKENS,
        {"clip_low": 0.2, "clip_high": 0.28, "aggregation": "token-mean"},
        inert_on_policy=True,
        note="DAPO's dynamic sampling and overlong shaping are not parts of a loss",
    ),
    "adaptive_clip_higher": Preset(
        "Entropy-controlled clip-higher, after ADAPO",
        "arXiv 2603.11682",
        "clip_high +- 0.01 per rollout batch towards the target entropy, in [0.1, 1]",
        _TOKENS,
        {"clip_high": 0.28, "control.knob": "clip_high", "target.entropy": 0.3},
        inert_on_policy=True,
        note="the paper's constants are not public; these are this project's",
    ),
    "tight_low_clip": Preset(
        "Tighter lower clip",
        "arXiv 2511.05993",
        "clip(r, 1 - 0.12, 1 + 0.2)",
        _TOKENS,
        {"clip_low": 0.12},
        inert_on_policy=True,
    ),
    "clip_cov": Preset(
        "Clip-Cov",
        "arXiv 2505.22617",
        "cov = (A - mean A)(log pi - mean log pi); loss 0 on a random share 2e-4 of tokens with 1 < cov < 5",
        _TOKENS,
        {"token_rule": "clip_cov", "ratio_rule": "clip"},
        note="the share is of the micro-batch, at least one token; scale it up for small batches",
    ),
    "kl_cov": Preset(
        "KL-Cov",
        "arXiv 2505.22617",
        "-A r + |log r| on the share 2e-3 of tokens of highest cov",
        _TOKENS,
        {"extra_term": "kl_cov", "ratio_rule": "none"},
        inert_on_policy=True,
    ),
    "cw_grpo": Preset(
        "CW-GRPO",
        "arXiv 2605.11538",
        "weight exp(-cov^2 / (2 sigma^2)), mean 1",
        _TOKENS,
        {"token_rule": "cw"},
        note="sigma is taken as the standard deviation of cov; the paper's estimator is not public",
    ),
    "par_stage": Preset(
        "PAR, stage",
        "arXiv 2511.05993",
        "weight of A > 0: 0 in the first half of the run, then linear to 1",
        _TOKENS,
        {"positive_schedule": "stage"},
    ),
    "par_epoch": Preset(
        "PAR, epoch-wise",
        "arXiv 2511.05993",
        "weight of A > 0 in epoch e of E: (e - 1) / (E - 1)",
        _TOKENS,
        {"positive_schedule": "epoch", "positive_schedule.epochs": 4},
    ),
    "par_entropy_guided": Preset(
        "PAR, entropy-guided",
        "arXiv 2511.05993",
        "weight of A > 0: -0.05 per rollout batch while H < 0.2, else +0.05, in [0, 1], from 0",
        _TOKENS,
        {"positive_weight": 0.0, "control.knob": "positive_weight", "target.entropy": 0.2},
    ),
    "entrocraft": Preset(
        "Entrocraft",
        "arXiv 2604.26326",
        "H below the band: only A < 0 trains; above it: only A > 0; band from [0.6, 0.7] down to [0.1, 0.2]",
        _TOKENS,
        {"sign_gate": "band", "band.low": 0.6, "band.low_end": 0.1, "band.width": 0.1},
    ),
    "stare_o1": Preset(
        "STARE, O1",
        "arXiv 2606.19236",
        "while H < 0.3: weight 1.1 on the 10 % most surprising tokens with A > 0",
        _TOKENS,
        {"token_rule": "stare", "stare.damp": 1.0},
    ),
    "stare_c2": Preset(
        "STARE, C2",
        "arXiv 2606.19236",
        "O1, and weight 0.9 on the 10 % most surprising tokens with A < 0",
        _TOKENS,
        {"token_rule": "stare"},
    ),
    "stare_adaptive": Preset(
        "STARE, C2 with adaptive weights",
        "arXiv 2606.19236",
        "W +- 0.01 in [1, 1.5] and M -+ 0.01 in [0.5, 1] per rollout batch towards H = 0.3",
        _TOKENS,
        {"token_rule": "stare", "control.knob": "stare"},
    ),
    "repo_r": Preset(
        "REPO-R, adaptive",
        "arXiv 2603.11682",
        "A + zeta |A| s, never across 0; s = -log pi; zeta doubles while H < 0.3, else halves, in 1e-4..0.05, then flips",
        _TOKENS,
        {"shaping": "repo_r", "shaping.coef": 1e-3, "control.knob": "shaping.coef"},
    ),
    "ce_gppo": Preset(
        "CE-GPPO",
        "arXiv 2509.20712",
        "-A k r, k = 0.5 (1 - e) / sg[r] for A < 0, r < 1 - e; (1 + e) / sg[r] for A > 0, r > 1 + e; else 1",
        _TOKENS,
        {"ratio_rule": "ce_gppo"},
        inert_on_policy=True,
    ),
    "entropic": Preset(
        "EntroPIC",
        "arXiv 2511.15248",
        "+ a (-r |A|) on tokens with pi > 0.95; a = clip(Kp (H - T) + Ki sum(H - T), -1, 1)",
        _TOKENS,
        {"extra_term": "entropic", "target.entropy": 0.25},
        note="the gains 3 and 2e-3 are a third party's; the sum runs over rollout batches",
    ),
    "qae": Preset(
        "QAE",
        "arXiv 2509.22611",
        "A = (R - inf{x: F(x) >= 0.4}) / (std + 1e-6)",
        _ADVANTAGE,
        {"advantage.baseline": "quantile"},
    ),
    "entropy_advantage": Preset(
        "Entropy advantage",
        "arXiv 2506.14758",
        "A + min(0.4 H, |A| / 2), H the token's entropy",
        "advantage of each token, on the trainer's process",
        {"shaping": "entropy_advantage", "shaping.coef": 0.4, "token_entropy": "exact"},
        missing_in=_NO_STASH,
        note="did not raise the entropy in its paper",
    ),
    "surprisal_advantage": Preset(
        "Entropy advantage by surprisal",
        "after arXiv 2506.14758",
        "A + min(0.4 s, |A| / 2), s = -log pi of the sampled token",
        _TOKENS,
        {"shaping": "entropy_advantage", "shaping.coef": 0.4},
        note="another estimator than the paper's: it adds an entropy bonus, limited by |A| / 2",
    ),
    "steer": Preset(
        "STEER",
        "arXiv 2510.10150",
        "weight exp(-k |A r (1 - pi)^2 (log pi + H)|) in [0.8, 1]",
        _TOKENS,
        {"token_rule": "steer"},
        note="H is the mean entropy instead of the token's",
    ),
    "opefo": Preset(
        "OPEFO, surrogate",
        "arXiv 2605.11491",
        "weight 1 +- lambda so that sum of -A pi (log pi + H) is 0, |lambda| <= 0.1",
        _TOKENS,
        {"token_rule": "opefo"},
        note="H is the mean entropy and the sampled token stands for its distribution; the limit is this project's",
    ),
    "entropy_bonus": Preset(
        "Score-function entropy bonus",
        "policy-gradient identity; coefficient as in arXiv 2505.22312",
        "A + beta (s - H), s = -log pi; E[(s - H) grad log pi] = grad H",
        _TOKENS,
        {"shaping": "bonus", "shaping.coef": 5e-3},
    ),
    "skywork": Preset(
        "Skywork-OR1's entropy control",
        "arXiv 2505.22312",
        "beta +- 1e-4 per rollout batch in [0, 5e-3] towards H = 0.2; the bonus acts only while H < 0.2",
        _TOKENS,
        {
            "shaping": "bonus",
            "shaping.coef": 0.0,
            "shaping.below_target": True,
            "control.knob": "shaping.coef",
            "target.entropy": 0.2,
        },
        note="the bonus is the score-function one, as the loss does not see token entropies",
    ),
    "aer": Preset(
        "Entropy bonus with a target anchored to the initial entropy, after AER",
        "after arXiv 2510.10959",
        "beta += 1e-4 (T - H) / T per rollout batch, in [0, 5e-3]; T = 0.4 H0",
        _TOKENS,
        {
            "shaping": "bonus",
            "shaping.coef": 0.0,
            "control.knob": "shaping.coef",
            "control.rule": "proportional",
            "target.entropy": 0.4,
            "target.unit": "h0",
        },
        note="the paper's formulas are not public: this project's; its coefficient by difficulty is left out",
    ),
    "w_reinforce": Preset(
        "W-REINFORCE",
        "arXiv 2506.01347",
        "A = 0.1 for correct answers, -1 for others",
        f"{_ADVANTAGE}; {_TOKENS}",
        {"advantage.baseline": "sign", "positive_weight": 0.1},
    ),
    "nsr": Preset(
        "Negative sample reinforcement",
        "arXiv 2506.01347",
        "A = 0 for correct answers, -1 for others",
        f"{_ADVANTAGE}; {_TOKENS}",
        {"advantage.baseline": "sign", "positive_weight": 0.0},
        note="drifts to random text when accuracy is low",
    ),
    "psr": Preset(
        "Positive sample reinforcement",
        "arXiv 2506.01347",
        "A = 1 for correct answers, 0 for others",
        f"{_ADVANTAGE}; {_TOKENS}",
        {"advantage.baseline": "sign", "negative_weight": 0.0},
    ),
    "high_entropy": Preset(
        "80/20",
        "arXiv 2506.01939",
        "only the 20 % of tokens with the highest entropy train, each with weight 5",
        "advantage of each token, on the trainer's process",
        {"token_rule": "high_entropy", "token_entropy": "exact", "clip_high": 0.28},
        missing_in=_NO_STASH,
    ),
    "high_surprisal": Preset(
        "80/20 by surprisal",
        "after arXiv 2506.01939",
        "only the 20 % most surprising tokens train, each with weight 5",
        _TOKENS,
        {"token_rule": "high_entropy", "clip_high": 0.28},
        note="picks rare sampled tokens, not uncertain states: another selection than the paper's",
    ),
    "gspo": Preset(
        "GSPO",
        "arXiv 2507.18071",
        "ratio exp(mean log r) of the response, clipped at 1 - 3e-4 and 1 + 4e-4",
        f"{_TOKENS}; aggregation",
        {"ratio_rule": "gspo", "clip_low": 3e-4, "clip_high": 4e-4, "aggregation": "seq-mean-token-mean"},
        inert_on_policy=True,
        missing_in=_NO_AGGREGATION,
    ),
    "cispo": Preset(
        "CISPO",
        "arXiv 2506.13585",
        "-A sg[clip(r, 0, 1.2)] log pi",
        _TOKENS,
        {"ratio_rule": "cispo", "clip_low": 1.0, "clip_high": 0.2},
        inert_on_policy=True,
    ),
    "lp_reg": Preset(
        "Lp-Reg, reduced",
        "after arXiv 2510.03222",
        "loss 0 on the 1 % least probable tokens with A < 0; clip at 0 and 10",
        _TOKENS,
        {"token_rule": "lp_reg", "clip_low": 1.0, "clip_high": 9.0},
        note="the paper's KL towards a filtered distribution needs logits, which the loss does not see",
    ),
    "gdpo": Preset(
        "GDPO, decoded",
        "arXiv 2601.05242",
        "each reward component normalised in its group, summed, whitened over the batch's tokens",
        _ADVANTAGE,
        {"advantage.components": [1.0, 0.1]},
        note="for rewards that are sums of 1 (correct) and 0.1 (format); others are refused with the value seen",
    ),
    "progrpo": Preset(
        "ProGRPO, reduced",
        "after arXiv 2602.05281",
        "A - 0.1 (c - mean c) for A > 0, c the mean probability of the response's 20 % least probable tokens",
        _TOKENS,
        {"shaping": "progrpo", "shaping.coef": 0.1},
        note="without the confidence in the prompt; centred over the micro-batch; the coefficient is this project's",
    ),
    "sent": Preset(
        "SENT, loss-only part",
        "after arXiv 2512.04359",
        "KL-Cov among the tokens of surprisal below the mean entropy",
        _TOKENS,
        {"extra_term": "sent"},
        inert_on_policy=True,
        note="its curriculum by semantic entropy is a matter of data; the coefficients are not public",
    ),
}
