"""A task is data, a model and a yardstick; the lanes of the demo all train the same one."""

import math
from abc import ABC, abstractmethod
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ampkit.demo.data import load_digits, load_text
from ampkit.demo.models import CharGPT, DigitsNet

Batch = tuple[Tensor, Tensor]


class Task(ABC):
    """What is trained: batches from a generator, a loss, and one number on data kept out of training."""

    name: ClassVar[str]
    title: ClassVar[str]
    steps: ClassVar[int]
    peak_lr: ClassVar[float]
    cpu_dtype: ClassVar[Literal["fp16", "bf16"]]
    metric: ClassVar[str]

    @abstractmethod
    def model(self) -> nn.Module:
        """A fresh model, on the CPU, from torch's global random state."""

    @abstractmethod
    def batch(self, generator: torch.Generator) -> Batch:
        """Inputs and targets of one step, on the task's device."""

    @abstractmethod
    def held_out(self, model: nn.Module) -> float:
        """The task's metric on the held-out data. Reads the result back from the device."""

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Mean cross entropy of a batch, in nats."""
        inputs, targets = batch
        return F.cross_entropy(model(inputs).flatten(0, -2), targets.flatten())


class DigitsTask(Task):
    """Classify handwritten digits; the metric is accuracy in percent.

    In fp16 by default, also on a CPU: it is the task that shows the loss scale at work, and it is small
    enough for processors on which fp16 arithmetic is slow.
    """

    name = "digits"
    title = "handwritten digits, small CNN"
    steps = 300
    peak_lr = 5e-3
    cpu_dtype = "fp16"
    metric = "held-out accuracy, %"

    def __init__(self, device: torch.device, batch_size: int = 64) -> None:
        self.data = load_digits(device)
        self.batch_size = batch_size

    def model(self) -> nn.Module:
        return DigitsNet()

    def batch(self, generator: torch.Generator) -> Batch:
        chosen = torch.randint(len(self.data.train_labels), (self.batch_size,), generator=generator)
        chosen = chosen.to(self.data.train_labels.device)
        return self.data.train_images[chosen], self.data.train_labels[chosen]

    def held_out(self, model: nn.Module) -> float:
        hits = model(self.data.held_out_images).argmax(-1) == self.data.held_out_labels
        return 100 * hits.float().mean().item()


class TextTask(Task):
    """Predict the next character of English text; the metric is bits per character."""

    name = "gpt"
    title = "Python's language reference, character-level GPT"
    steps = 400
    peak_lr = 5e-3
    cpu_dtype = "bf16"
    metric = "held-out bits per character"

    def __init__(self, device: torch.device, batch_size: int = 32, context: int = 32) -> None:
        self.data = load_text(device)
        self.batch_size, self.context = batch_size, context

    def model(self) -> nn.Module:
        return CharGPT(len(self.data.alphabet), self.context)

    def batch(self, generator: torch.Generator) -> Batch:
        starts = torch.randint(len(self.data.train) - self.context, (self.batch_size,), generator=generator)
        return self._windows(self.data.train, starts)

    def held_out(self, model: nn.Module) -> float:
        starts = torch.arange(0, len(self.data.held_out) - self.context, self.context)
        losses = [
            self.loss(model, self._windows(self.data.held_out, part)) * len(part)
            for part in starts.split(4 * self.batch_size)
        ]
        return (torch.stack(losses).sum() / len(starts) / math.log(2)).item()

    def _windows(self, text: Tensor, starts: Tensor) -> Batch:
        window = (starts[:, None] + torch.arange(self.context + 1)).to(text.device)
        return text[window[:, :-1]], text[window[:, 1:]]


TASKS: dict[str, type[DigitsTask] | type[TextTask]] = {task.name: task for task in (DigitsTask, TextTask)}
