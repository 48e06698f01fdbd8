"""Training and evaluation of a model on a partitioned graph."""

from sar.models import ModelOptions, Stack, build_model
from sar.train.callbacks import Callback
from sar.train.data import NodeData, load_node_data
from sar.train.embedding import load_embedding, save_embedding
from sar.train.loggers import Csv, JsonLines, TensorBoard, Wandb
from sar.train.metrics import score
from sar.train.options import DataOptions, TrainOptions
from sar.train.trainer import Trainer

__all__ = [
    "Callback",
    "Csv",
    "DataOptions",
    "JsonLines",
    "ModelOptions",
    "NodeData",
    "Stack",
    "TensorBoard",
    "TrainOptions",
    "Trainer",
    "Wandb",
    "build_model",
    "load_embedding",
    "load_node_data",
    "save_embedding",
    "score",
]
