"""Lightning datamodules for federated data, and the partitions that divide examples among clients."""

from lightning_fed.data.batches import BatchTransform, Inputs, SharedTensors, ShuffledBatches, random_crop_flip
from lightning_fed.data.client import ClientDataModule
from lightning_fed.data.federated import FederatedDataModule
from lightning_fed.data.files.array_files import ArrayFiles
from lightning_fed.data.files.csv_files import CSVFiles
from lightning_fed.data.files.hf_dataset import HFDataset
from lightning_fed.data.files.image_folder import ImageFolder
from lightning_fed.data.files.instructions import Instructions
from lightning_fed.data.files.table import Table, TableData
from lightning_fed.data.files.text_files import TextFiles
from lightning_fed.data.lazy import LazyInputs
from lightning_fed.data.partition.base import IID, ClassesPerClient, Partitioner
from lightning_fed.data.partition.dirichlet import DirichletPerClass, DirichletPerClient
from lightning_fed.data.partition.given_shares import GivenShares
from lightning_fed.data.partition.natural import ByColumn
from lightning_fed.data.partition.similarity import BySimilarity
from lightning_fed.data.partition.ways_and_shots import NWayKShot
from lightning_fed.data.partition.whole_labels import WholeLabels
from lightning_fed.data.public import PublicShare
from lightning_fed.data.tabular.hospitals import TCGABRCA, HeartDisease
from lightning_fed.data.tabular.scaled import ScaledColumns
from lightning_fed.data.tabular.scikit_learn import Diabetes, DigitAttributes
from lightning_fed.data.text.ag_news import AGNews
from lightning_fed.data.text.classification import TextClassification
from lightning_fed.data.text.e2e import E2E
from lightning_fed.data.text.generation import TextGeneration
from lightning_fed.data.text.glue import GLUE
from lightning_fed.data.text.question_answering import QuestionAnswering, QuestionFiles
from lightning_fed.data.text.squad import SQuAD
from lightning_fed.data.text.webnlg import WebNLG
from lightning_fed.data.vision.images import CIFAR10, CIFAR100, MNIST, Digits, FashionMNIST, ImageFiles, InMemory
from lightning_fed.data.vision.tiny_imagenet import TinyImageNet

__all__ = [
    "CIFAR10",
    "CIFAR100",
    "E2E",
    "GLUE",
    "IID",
    "MNIST",
    "TCGABRCA",
    "AGNews",
    "ArrayFiles",
    "BatchTransform",
    "ByColumn",
    "BySimilarity",
    "CSVFiles",
    "ClassesPerClient",
    "ClientDataModule",
    "Diabetes",
    "DigitAttributes",
    "Digits",
    "DirichletPerClass",
    "DirichletPerClient",
    "FashionMNIST",
    "FederatedDataModule",
    "GivenShares",
    "HFDataset",
    "HeartDisease",
    "ImageFiles",
    "ImageFolder",
    "InMemory",
    "Inputs",
    "Instructions",
    "LazyInputs",
    "NWayKShot",
    "Partitioner",
    "PublicShare",
    "QuestionAnswering",
    "QuestionFiles",
    "SQuAD",
    "ScaledColumns",
    "SharedTensors",
    "ShuffledBatches",
    "Table",
    "TableData",
    "TextClassification",
    "TextFiles",
    "TextGeneration",
    "TinyImageNet",
    "WebNLG",
    "WholeLabels",
    "random_crop_flip",
]
