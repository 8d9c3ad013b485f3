"""Estimators of expert iteration, one file each, and the registry that finds them by name."""

from viva.experts.estimators.apply import Estimate, choose_baseline, estimate
from viva.experts.estimators.balance import Balance
from viva.experts.estimators.base import (
    Baseline,
    Estimator,
    FloatArray,
    Need,
    Sample,
    context_gap,
    total_context_gap,
)
from viva.experts.estimators.distill import Distill
from viva.experts.estimators.importance_sampling import ImportanceSampling
from viva.experts.estimators.none import NoCorrection
from viva.experts.estimators.positives import Positives
from viva.experts.estimators.registry import DEFAULT_ESTIMATOR, ESTIMATORS, make_estimator
from viva.experts.estimators.seq_is import SequenceIS
from viva.experts.estimators.seq_tis import SequenceTIS
from viva.experts.estimators.shaped import Shaped
from viva.experts.estimators.token_tis import TokenTIS

__all__ = [
    "DEFAULT_ESTIMATOR",
    "ESTIMATORS",
    "Balance",
    "Baseline",
    "Distill",
    "Estimate",
    "Estimator",
    "FloatArray",
    "ImportanceSampling",
    "Need",
    "NoCorrection",
    "Positives",
    "Sample",
    "SequenceIS",
    "SequenceTIS",
    "Shaped",
    "TokenTIS",
    "choose_baseline",
    "context_gap",
    "estimate",
    "make_estimator",
    "total_context_gap",
]
