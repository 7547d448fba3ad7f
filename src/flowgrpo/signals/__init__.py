"""How the k scores of a sample become one number, one rule a file: functions of a score table, group ids and weights.

A column of weight 0 is a monitor and is ignored. A sample that lacks a weighted score gets NaN: it does not train. Statistics
are those of whole groups, and a group's signal does not depend on the others present, unless the rule's docstring says so.
"""

from collections.abc import Callable, Mapping

from flowgrpo.signals.contract import PairwiseSignal, Signal, check_signal
from flowgrpo.signals.gdpo import Gdpo
from flowgrpo.signals.history import Calibrated, Calibration
from flowgrpo.signals.preference_walk import PreferenceWalk
from flowgrpo.signals.quantile import Quantile
from flowgrpo.signals.saturation_aware import SaturationAware
from flowgrpo.signals.standardized_sum import StandardizedSum
from flowgrpo.signals.taros import Taros
from flowgrpo.signals.tournament import Tournament
from flowgrpo.signals.weighted_sum import WeightedSum
from flowgrpo.signals.win_rate import WinRate

__all__ = [
    "SIGNALS",
    "Calibrated",
    "Calibration",
    "PairwiseSignal",
    "Signal",
    "StandardizedSum",
    "WeightedSum",
    "check_signal",
]

SIGNALS: Mapping[str, Callable[..., Signal]] = {
    "weighted_sum": WeightedSum,
    "standardized_sum": StandardizedSum,
    "gdpo": Gdpo,
    "taros": Taros,
    "saturation_aware": SaturationAware,
    "quantile": Quantile,
    "win_rate": WinRate,
    "tournament": Tournament,
    "preference_walk": PreferenceWalk,
}
