"""Lightning datamodules that know their clients, and the partitions that make clients differ."""

from lightning_fed.data.ag_news import AGNews
from lightning_fed.data.augment import random_crop_flip
from lightning_fed.data.batches import BatchTransform, Inputs, SharedTensors, ShuffledBatches
from lightning_fed.data.client import ClientDataModule
from lightning_fed.data.dirichlet import DirichletPerClass, DirichletPerClient
from lightning_fed.data.e2e import E2E
from lightning_fed.data.federated import FederatedDataModule
from lightning_fed.data.generation import TextGeneration
from lightning_fed.data.glue import GLUE
from lightning_fed.data.images import CIFAR10, CIFAR100, Digits, FashionMNIST, ImageFiles, InMemory
from lightning_fed.data.partition import IID, ClassesPerClient, Partitioner
from lightning_fed.data.question_answering import QuestionAnswering, QuestionFiles
from lightning_fed.data.similarity import BySimilarity
from lightning_fed.data.squad import SQuAD
from lightning_fed.data.text import TextClassification, TextFiles
from lightning_fed.data.tiny_imagenet import TinyImageNet
from lightning_fed.data.webnlg import WebNLG
from lightning_fed.data.whole_labels import WholeLabels

__all__ = [
    "CIFAR10",
    "CIFAR100",
    "E2E",
    "GLUE",
    "IID",
    "AGNews",
    "BatchTransform",
    "BySimilarity",
    "ClassesPerClient",
    "ClientDataModule",
    "Digits",
    "DirichletPerClass",
    "DirichletPerClient",
    "FashionMNIST",
    "FederatedDataModule",
    "ImageFiles",
    "InMemory",
    "Inputs",
    "Partitioner",
    "QuestionAnswering",
    "QuestionFiles",
    "SQuAD",
    "SharedTensors",
    "ShuffledBatches",
    "TextClassification",
    "TextFiles",
    "TextGeneration",
    "TinyImageNet",
    "WebNLG",
    "WholeLabels",
    "random_crop_flip",
]
