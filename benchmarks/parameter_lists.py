"""The parameter lists that are measured: shapes of real models, and a list of very many tiny tensors."""

from collections.abc import Callable

Shape = tuple[int, ...]


def gpt2(width: int, layers: int, vocabulary: int = 50257, context: int = 1024) -> list[Shape]:
    """Parameters of GPT-2, the output layer tied to the embedding."""
    shapes: list[Shape] = [(vocabulary, width), (context, width)]
    for _ in range(layers):
        shapes += [(width,), (width,), (width, 3 * width), (3 * width,), (width, width), (width,)]
        shapes += [(width,), (width,), (width, 4 * width), (4 * width,), (4 * width, width), (width,)]
    return [*shapes, (width,), (width,)]


def resnet50() -> list[Shape]:
    """Parameters of ResNet-50: 53 convolutions with their batch norms, and the classifier."""
    shapes: list[Shape] = []

    def convolution(inputs: int, outputs: int, size: int) -> None:
        shapes.extend([(outputs, inputs, size, size), (outputs,), (outputs,)])

    convolution(3, 64, 7)
    inputs = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            convolution(inputs, width, 1)
            convolution(width, width, 3)
            convolution(width, 4 * width, 1)
            if block == 0:
                convolution(inputs, 4 * width, 1)
            inputs = 4 * width
    return [*shapes, (1000, 2048), (1000,)]


def tiny(n: int = 5000) -> list[Shape]:
    """Very many tensors of 1 to 199 elements, where launches cost all and bytes nothing."""
    return [(1 + (37 * i) % 199,) for i in range(n)]


LISTS: dict[str, Callable[[], list[Shape]]] = {
    "GPT-2 124M": lambda: gpt2(768, 12),
    "GPT-2 1.5B": lambda: gpt2(1600, 48),
    "ResNet-50": resnet50,
    "5000 tiny": tiny,
}
REHEARSAL: dict[str, Callable[[], list[Shape]]] = {
    "small GPT": lambda: gpt2(16, 2, vocabulary=64, context=16),
    "20 tiny": lambda: tiny(20),
}
