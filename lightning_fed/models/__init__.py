"""Networks that methods can train."""

from lightning_fed.models.adapters import Adapters
from lightning_fed.models.backbone import Backbone, BackboneFactory, Backbones, TrainableNetwork, Wrapped
from lightning_fed.models.causal_lm import CausalLM
from lightning_fed.models.cnn import CNN, CNN1, CNN2, CNN3, CNN4, CNN5
from lightning_fed.models.language_model import TransformerLM
from lightning_fed.models.linear import LinearModel
from lightning_fed.models.mlp import MLP, SoftmaxMLP
from lightning_fed.models.pretrained import backbone_of
from lightning_fed.models.question_answering import TransformerQA
from lightning_fed.models.resnet import CIFARResNet, ResNet8, ResNet10, ResNet18, ResNet34, ShallowResNet, SmallImageResNet
from lightning_fed.models.small_cnn import FedAvgCNN, FedProtoCNN, LeNet5, SmallCNN
from lightning_fed.models.text import TextTransformer
from lightning_fed.models.transformer import Transformer, TransformerClassifier
from lightning_fed.models.vision_transformer import VisionTransformer

__all__ = [
    "CNN",
    "CNN1",
    "CNN2",
    "CNN3",
    "CNN4",
    "CNN5",
    "MLP",
    "Adapters",
    "Backbone",
    "BackboneFactory",
    "Backbones",
    "CIFARResNet",
    "CausalLM",
    "FedAvgCNN",
    "FedProtoCNN",
    "LeNet5",
    "LinearModel",
    "ResNet8",
    "ResNet10",
    "ResNet18",
    "ResNet34",
    "ShallowResNet",
    "SmallCNN",
    "SmallImageResNet",
    "SoftmaxMLP",
    "TextTransformer",
    "TrainableNetwork",
    "Transformer",
    "TransformerClassifier",
    "TransformerLM",
    "TransformerQA",
    "VisionTransformer",
    "Wrapped",
    "backbone_of",
]
