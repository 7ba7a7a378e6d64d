"""The models that tests and benchmarks share; they live with the benchmarks, which run from a bare checkout too."""

from benchmarks.models import (
    CASES,
    Case,
    ConvNet,
    ConvNeXt,
    CustomFunctionNet,
    Decoder,
    DecoderBlock,
    Encoder,
    Recurrent,
    ResNet,
    UNet,
    custom_function_case,
    gated_linear,
)

__all__ = [
    "CASES", "Case", "ConvNeXt", "ConvNet", "CustomFunctionNet", "Decoder", "DecoderBlock", "Encoder", "Recurrent",
    "ResNet", "UNet", "custom_function_case", "gated_linear",
]
