"""Exporters: where the live signals of a training run can be sent."""

from auditor.record.exporters.jsonlines import JSONLines
from auditor.record.exporters.prometheus import Prometheus
from auditor.record.exporters.tensorboard import TensorBoard
from auditor.record.exporters.trackio import Trackio
from auditor.record.exporters.wandb import WandB

__all__ = ["JSONLines", "Prometheus", "TensorBoard", "Trackio", "WandB"]
