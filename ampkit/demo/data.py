"""Real data without a download: handwritten digits from scikit-learn, English from the standard library."""

from typing import NamedTuple

import torch
from torch import Tensor


class Digits(NamedTuple):
    """scikit-learn's 1,797 handwritten digits; every fifth one is held out.

    Images are fp32 `[n, 1, 8, 8]` in 0..1, labels int64 `[n]`.
    """

    train_images: Tensor
    train_labels: Tensor
    held_out_images: Tensor
    held_out_labels: Tensor


class Text(NamedTuple):
    """The language reference that Python carries for `help()`, as int64 character codes `[n]`.

    `held_out` is the last tenth of the paragraphs. `alphabet[code]` is the character of a code.
    """

    train: Tensor
    held_out: Tensor
    alphabet: str


def load_digits(device: torch.device) -> Digits:
    """Read the digits from the installed scikit-learn and place them on `device`."""
    from sklearn.datasets import load_digits as sklearn_digits

    images, labels = sklearn_digits(return_X_y=True)
    pixels = torch.as_tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16
    classes = torch.as_tensor(labels, dtype=torch.int64)
    held_out = torch.arange(len(classes)) % 5 == 0
    parts = (pixels[~held_out], classes[~held_out], pixels[held_out], classes[held_out])
    return Digits(*(part.to(device) for part in parts))


def load_text(device: torch.device) -> Text:
    """Read `pydoc_data.topics` and place its character codes on `device`.

    Topics quote one another: a fifth of the paragraphs occur more than once. Each is kept once, otherwise
    the held-out text would have been seen in training.
    """
    from pydoc_data.topics import topics

    joined = "\n\n".join(topics[name] for name in sorted(topics))
    paragraphs = list(dict.fromkeys(part for part in joined.split("\n\n") if part.strip()))
    cut = len(paragraphs) * 9 // 10
    train, held_out = ("\n\n".join(part) for part in (paragraphs[:cut], paragraphs[cut:]))
    alphabet = "".join(sorted(set(train) | set(held_out)))
    code_of = {character: code for code, character in enumerate(alphabet)}

    def encode(text: str) -> Tensor:
        return torch.tensor([code_of[character] for character in text], dtype=torch.int64, device=device)

    return Text(encode(train), encode(held_out), alphabet)
