"""Objectives: advantages into a loss, one a file."""

from collections.abc import Mapping

from flowgrpo.objectives.awm import Awm
from flowgrpo.objectives.clipped_ratio import ClippedRatio
from flowgrpo.objectives.contract import ForwardBatch, StepBatch, check_objective
from flowgrpo.objectives.crd import Crd
from flowgrpo.objectives.dgpo import Dgpo
from flowgrpo.objectives.dpo import Dpo
from flowgrpo.objectives.dppo import Dppo
from flowgrpo.objectives.guard import Guard
from flowgrpo.objectives.nft import Nft
from flowgrpo.objectives.rwr import Rwr
from flowgrpo.objectives.sequence_mean import SequenceMean
from flowgrpo.objectives.sft import Sft
from flowgrpo.objectives.trajectory_ratio import TrajectoryRatio
from flowgrpo.objectives.vgrpo import VGrpo

__all__ = ["OBJECTIVES", "ForwardBatch", "StepBatch", "check_objective"]

OBJECTIVES: Mapping[str, type] = {
    "clipped_ratio": ClippedRatio,
    "trajectory_ratio": TrajectoryRatio,
    "sequence_mean": SequenceMean,
    "guard": Guard,
    "dppo": Dppo,
    "awm": Awm,
    "nft": Nft,
    "vgrpo": VGrpo,
    "dgpo": Dgpo,
    "crd": Crd,
    "dpo": Dpo,
    "rwr": Rwr,
    "sft": Sft,
}
