"""A recurrent network in float16 whose forward makes float32 states.

The forward starts from `torch.zeros(...)`, which is float32 in a 16-bit model as well. `half(..., in_region=True)` runs
it in a region, where such tensors are cast if combined with 16-bit weights. Packed sequences are cast on entry.

    python examples/half_rnn.py
"""

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence, pad_packed_sequence

from ampkit.half_precision.half import half


class Tagger(nn.Module):
    """A label for each token of sequences of different lengths."""

    def __init__(self, cell: type[nn.LSTM] | type[nn.GRU]) -> None:
        super().__init__()
        self.rnn = cell(12, 24, num_layers=2)
        self.head = nn.Linear(24, 5)

    def forward(self, packed: nn.utils.rnn.PackedSequence) -> Tensor:
        n = int(packed.batch_sizes[0])
        state = torch.zeros(2, n, 24)  # made here, in float32
        first = (state, state) if isinstance(self.rnn, nn.LSTM) else state
        output, _ = self.rnn(packed, first)
        padded, _ = pad_packed_sequence(output)
        return self.head(padded)


def main() -> dict[str, float]:
    """Return the relative error of each cell and dtype against float32."""
    errors = {}
    for cell in (nn.LSTM, nn.GRU):
        for dtype in (torch.float16, torch.bfloat16):
            torch.manual_seed(0)
            model = Tagger(cell).eval()
            sequences = pack_sequence([torch.randn(n, 12) for n in (7, 5, 2)])
            low = half(model, dtype, in_region=True, cast_outputs=torch.float32)
            with torch.no_grad():
                expected, got = model(sequences), low(sequences)
            name = f"{cell.__name__} {str(dtype).removeprefix('torch.')}"
            errors[name] = ((got - expected).norm() / expected.norm()).item()
            print(f"{name}: error {errors[name]:.1e}, weights in {low.rnn.weight_hh_l0.dtype}")
    return errors


if __name__ == "__main__":
    main()
