"""Faults from public threads, as people met them there; the answers were written down before any tool saw them.

The thread is beside each, as repository#number.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.debugging.models import filled
from tests.debugging.planted import B16, F16, FLOAT, LINES, POLICY, SGD, loss_of, planted, table, whole

INF = math.inf
WIDER = FLOAT + "|float32"


def in_16_bits() -> nn.Module:
    return nn.Linear(8, 8).bfloat16()


# --- in one line


# fmt: off
# A fault is a row of two or three lines, whose first has the line that the tools must find.
table(dtype=F16, rows=[
    ("normalised_padding", lambda x: F.normalize(x * 0, dim=-1) + x,
     "aten::div.Tensor", r"1e-12 is 0 in float16", FLOAT + "|eps"),  # pytorch/pytorch#33596
    ("reconstruction_of_a_graph", lambda x: -torch.log(torch.sigmoid(x - 200) + 1e-15) + x,
     "aten::log", r"1e-15 is 0 in float16", FLOAT),                 # pyg-team/pytorch_geometric#2106
    ("distance_of_boxes", lambda x: 1 - x * 0 / (x * 0).clamp(1e-16) + x,
     "aten::div.Tensor", r"1e-16 is 0 in float16", FLOAT),          # Megvii-BaseDetection/YOLOX#1565
])
table(dtype=F16, kind="ampkit", rows=[
    ("output_projection_of_t5", lambda x: F.linear(F.gelu(x * 0 + 400), torch.full((16, 16), 20.0)) * 1e-4 + x,
     "aten::(add)?mm", r"overflow", POLICY),                        # huggingface/transformers#5651
])
table(dtype=F16, kind="torch", rows=[
    ("decoder_of_a_vae", lambda x: F.conv2d((x * 20 + 300).view(8, 1, 4, 4), torch.full((1, 1, 3, 3), 50.0)) * 1e-5,
     "aten::convolution", r"overflow", LINES),                      # Comfy-Org/ComfyUI#1401
])
table(dtype=B16, tool="precision", rows=[
    ("positions_by_cumsum", lambda x: x * (torch.ones(1000, dtype=x.dtype).cumsum(0)[-16:] - 992),
     "aten::cumsum", r"cumsum|made|rounded", WIDER),                # huggingface/transformers#25431
])
table(rows=[
    # pytorch/pytorch#98276: the square of its length is 0 in float32
    ("phase_of_a_spectrum", lambda x: torch.angle(torch.complex(x * 1e-25, x * 1e-25)) + x,
     "in backward of aten::angle", r"underflow|0 in float32", r"atan2|where|eps|clamp"),
    ("log_of_a_cosh", lambda x: torch.log((torch.exp(x + 100) + torch.exp(-x - 100)) / 2),
     "aten::exp", r"overflow", r"logaddexp|softplus|clamp|logsumexp"),          # Lightning-AI/torchmetrics#3488
    # pytorch/pytorch#68425: the branch that is not taken
    ("where_of_an_exponential", lambda x: torch.where(x <= -100, torch.exp(x + 100), x + 101),
     "aten::exp", r"overflow", r"where|clamp"),
    ("aspect_of_a_box", lambda x: torch.atan((x[:, :8].abs() + 0.1) / (x[:, 8:] - 2).clamp(min=0)),
     "aten::div.Tensor", r"by 0|/ 0|is 0", r"clamp|eps|where"),                 # ultralytics/yolov5#13416
    ("focal_loss", lambda x: torch.pow(1 - torch.sigmoid(x * 0 + 100), 0.5) * x,
     "in backward of aten::pow.Tensor_Scalar", r"at 0|of 0", r"where|clamp|eps"),       # kornia/kornia#918
    # ronghuaiyang/arcface-pytorch#32: the product of two normalised vectors is a little more than 1
    ("sine_of_an_angle", lambda x: torch.sqrt(1.0 - torch.pow(x * 0 + 1.000001, 2)) * x,
     "aten::sqrt", r"negative|of -|below 0|less than 0", r"clamp"),
    ("squashed_action", lambda x: torch.log(1 - (2 * torch.tanh(x + 3)).pow(2) + 1e-6),
     "aten::log", r"negative|of -|below 0|less than 0", r"clamp"),      # cpnota/autonomous-learning-library#139
    ("divergence_of_probabilities",
     lambda x: F.kl_div((x + torch.arange(16.0) * 12).softmax(-1).log(), torch.full((8, 16), 1 / 16), reduction="none"),
     "aten::log", r"of 0|0 in float32", r"clamp|log_softmax"),          # harvardnlp/annotated-transformer#109
    ("binary_loss_of_masked_logits",
     lambda x: F.binary_cross_entropy_with_logits(x.masked_fill(torch.arange(16) > 12, -INF), torch.zeros(8, 16)),
     "aten::masked_fill.*", r"-inf", r"finfo|finite|clamp|torch\.where"),       # pytorch/pytorch#49844
    # sooftware/kospeech#37: the smallest number of float32 in its place is smoothed to inf, too
    ("smoothed_loss_of_masked_logits",
     lambda x: F.cross_entropy(x.masked_fill(torch.arange(16) > 12, -INF), torch.zeros(8).long(), label_smoothing=0.1),
     "aten::masked_fill.*", r"written explicitly", r"label_smoothing|-1e4"),
])


# --- overflows

@planted("aten::add.Tensor", r"overflow", FLOAT, dtype=F16)
def residual_of_long_t5(x: Tensor) -> Tensor:     # huggingface/transformers#19229
    hidden = x * 0 + 4e4
    forwarded = hidden * 0.9
    return (hidden + forwarded) * 1e-4 + x      # here

@planted("aten::pow.Tensor_Scalar", r"overflow", FLOAT, dtype=F16)
def gelu_by_tanh(x: Tensor) -> Tensor:     # huggingface/transformers#9295: tanh takes the inf, its gradient does not
    y = x + 300
    return 0.5 * y * (1 + torch.tanh(0.79788 * (y + 0.044715 * torch.pow(y, 3))))       # here

@planted("aten::sum", r"overflow", FLOAT, dtype=F16)
def dice_score(x: Tensor) -> Tensor:     # qubvel-org/segmentation_models.pytorch#463
    p, target = x * 0 + 600, torch.ones_like(x)
    intersection = (p * target).sum()       # here
    return x + 2 * intersection / (p.sum() + target.sum())

@planted("aten::mm", r"overflow", LINES, dtype=F16, kind="torch")
def linear_attention(x: Tensor) -> Tensor:     # idiap/fast-transformers#32
    q = F.elu(x + 100) + 1
    normalizer = 1 / (q.float() * q.float().sum(0)).sum(-1, keepdim=True)
    context = q.t() @ (x * 0 + 1)
    return (q @ context) * normalizer       # here

@planted("aten::mul.Tensor", r"overflow", FLOAT, dtype=F16)
def overlap_of_boxes(x: Tensor) -> Tensor:     # facebookresearch/fvcore#114
    width, height = x * 0 + 800, x * 0 + 1333
    area = width * height       # here
    return x + area / (area + area - area / 2)

@planted("aten::exp", r"overflow", r"clamp")
def ratio_of_policies(x: Tensor) -> Tensor:     # radixark/miles#1363
    old, advantage = x.detach() - 120, torch.zeros(8, 16)
    ratio = (x - old).exp()     # here
    return -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)

@planted("aten::exp", r"overflow", FLOAT + r"|clamp", dtype=F16)
def divergence_in_half(x: Tensor) -> Tensor:     # NVIDIA-NeMo/RL#876: the clamp is too wide for float16
    difference = (x + 15).clamp(-20, 20)
    return (difference.exp() - difference - 1) * 1e-6       # here


# --- constants that are 0 or 1 in float16

@planted("aten::div.Tensor", r"1e-20 is 0 in float16", FLOAT, dtype=F16)
def scores_of_experts(x: Tensor) -> Tensor:     # NVIDIA/Megatron-LM#2741
    scores = torch.sigmoid(x - 200)
    total = scores.sum(-1, keepdim=True) + 1e-20        # here
    return scores / total + x

@planted("aten::div.Tensor", r"0 in float16|underflow", FLOAT, dtype=F16)
def attention_by_sigmoid(x: Tensor) -> Tensor:     # qitianwu/DIFFormer#3
    weight = torch.sigmoid(x - 20)      # here
    return weight / weight.sum(-1, keepdim=True) * torch.arange(16).to(x.dtype)

# pytorch/pytorch#41663: torch.rand in float16 gives both ends now and then; -inf, of the first, the softmax takes
@planted("aten::log", r"row 7 of 8(.|\n)*1e-20 is 0 in float16", FLOAT, dtype=F16)
def gumbel_noise(x: Tensor) -> Tensor:
    u = torch.linspace(0, 1, 128).view(8, 16).to(x.dtype)
    noise = -torch.log(-torch.log(u + 1e-20) + 1e-20)       # here
    return (x + noise).softmax(-1) * torch.arange(16).to(x.dtype)

@planted("aten::atanh", r"0\.999999|is 1 in float16|rounded", FLOAT, dtype=F16)
def unsquashed_action(x: Tensor) -> Tensor:     # ray-project/ray#14878
    action = torch.tanh(x + 9)
    action = action.clamp(-1 + 1e-6, 1 - 1e-6)      # here
    return torch.atanh(action) + x

@planted("in backward of aten::sqrt", r"1e-12 is 0 in float16", r"that the dtype can represent|\.float\(\)", dtype=F16)
def penalty_of_a_critic(x: Tensor) -> Tensor:     # NVIDIA/apex#654
    gradient, = torch.autograd.grad((x.pow(3) * 0).sum(), x, create_graph=True)
    norm = torch.sqrt(torch.sum(gradient**2, -1) + 1e-12)       # here
    return (norm - 1) ** 2 + x.sum(-1)


# --- undefined in any precision

@planted("aten::log1p", r"at -1|of 0|-1|is 0", r"where|clamp")
def logarithm_of_chosen_values(x: Tensor) -> Tensor:     # pytorch/pytorch#152088
    y = x * (x > 0) - (x <= 0).float()
    return torch.log1p(y)[y > -1]       # here

@planted("in backward of aten::_linalg_svd", r"equal|repeated|0 / 0|by 0|is 0", r"svdvals|distinct|noise|perturb|eigh")
def directions_of_equal_strength(x: Tensor) -> Tensor:     # pytorch/pytorch#49886
    u, _, vh = torch.linalg.svd(x[:, :8] * 0 + torch.eye(8))        # here
    return u @ vh + x[:, 8:]

@planted("in backward of aten::sqrt", r"at 0", r"where|eps|clamp")
def deviation_over_equal_samples(x: Tensor) -> Tensor:     # pytorch/pytorch#4320
    y = x[:1].expand(8, 16)
    return y + (y - y.mean(0)).square().mean(0).sqrt()      # here

@planted("aten::div.Tensor", r"(0 / 0|by 0|is 0)(.|\n)*row 7|row 7(.|\n)*(0 / 0|by 0|is 0)", r"clamp|eps|where")
def weight_of_a_timestep(x: Tensor) -> Tensor:     # TiankaiHang/Min-SNR-Diffusion-Training#2
    alphas = torch.linspace(0.99, 0.0, 8)[:, None]
    snr = alphas / (1 - alphas)
    return x * (snr.clamp(max=5.0) / snr)       # here

@planted("aten::log", r"of 0|log.*0|is 0", r"clamp|eps|logsumexp|log_softmax")
def contrast_without_others(x: Tensor) -> Tensor:     # emadeldeen24/TS-TCC#25
    logits = (x * 60) @ (x * 60).t()
    logits = logits - logits.amax(-1, keepdim=True).detach()
    others = torch.exp(logits) * (1 - torch.eye(8))
    return logits - torch.log(others.sum(1, keepdim=True))      # here

@planted("aten::sub.Tensor", r"-inf|inf - inf", r"where|masked_fill|finfo|nan_to_num|isfinite")
def divergence_of_filtered_policies(x: Tensor) -> Tensor:     # NVIDIA-NeMo/RL#4154
    dropped = torch.arange(16) > 3
    policy = x.masked_fill(dropped, -INF).log_softmax(-1)
    reference = x.detach().masked_fill(dropped, -INF).log_softmax(-1)
    return policy.exp() * (policy - reference)      # here

@planted("aten::sub.Tensor", r"-inf|inf - inf", r"where|finfo|clamp|finite|nan_to_num")
def softmax_over_a_masked_block(x: Tensor) -> Tensor:     # NVIDIA/TensorRT-LLM#19220
    scores = x.masked_fill(torch.arange(16) < 4, -INF)
    best, total = torch.full((8, 1), -INF), torch.zeros(8, 1)
    for block in scores.split(4, -1):
        new = torch.maximum(best, block.amax(-1, keepdim=True))
        total = total * (best - new).exp() + (block - new).exp().sum(-1, keepdim=True)      # here
        best = new
    return total.log() + best

class Attends(nn.Module):
    """Attention, where the second sequence is padding throughout."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        padding = torch.tensor([[False] * 4, [True] * 4])
        out, _ = self.attention(x, x, x, key_padding_mask=padding)      # here
        return out[:1]

@whole("nonfinite", r"mask", r"nan_to_num|where|mask", "aten::_softmax", "attention",
       model=Attends, source=Attends.forward)
def padding_throughout(model: nn.Module) -> None:     # pytorch/pytorch#41508
    model(torch.ones(2, 4, 8)).sum().backward()

def normalised_zeros() -> nn.Module:
    layer: Any = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8, bias=False))
    nn.init.zeros_(layer.parametrizations.weight.original1)
    return nn.Sequential(layer, nn.Linear(8, 1))

@whole("nonfinite", r"0 / 0|is 0|by 0|of 0", r"eps|init|not 0", "aten::_weight_norm_interface",
       "0.parametrizations.weight.0", model=normalised_zeros)
def weight_norm_of_zeros(model: nn.Module) -> Tensor:     # pytorch/pytorch#19126
    loss: Tensor = model(torch.ones(2, 8)).sum()        # here
    loss.backward()
    return loss.detach()


# --- rounding

# pytorch/pytorch#133085: 1 / sqrt(inf) is 0, and so is every gradient
@planted("aten::pow.Tensor_Scalar", r"overflow", WIDER, dtype=F16, tool="precision")
def norm_that_overflows_in_silence(x: Tensor) -> Tensor:
    y = x * 600
    variance = y.pow(2).mean(-1, keepdim=True)      # here
    return y * torch.rsqrt(variance + 1e-6)

@planted("aten::(_to_copy|mul.Tensor)", r"cast|made|rounded", WIDER, dtype=B16, tool="precision")
def rotary_positions(x: Tensor) -> Tensor:     # EleutherAI/gpt-neox#1003
    frequency = 0.1 ** (torch.arange(8) / 8)
    angle = torch.arange(1000, 1008).type_as(x)[:, None] * frequency.type_as(x)     # here
    return torch.cat([x[:, :8] * angle.cos(), x[:, 8:] * angle.sin()], -1)

@planted("aten::_to_copy", r"cast|made|rounded", WIDER, dtype=B16, tool="precision")
def embedding_of_a_timestep(x: Tensor) -> Tensor:     # modelscope/DiffSynth-Studio#562
    timestep = torch.tensor([999.4, 988.5, 987.2, 962.6, 937.5, 833.3, 750.1, 625.9])
    timestep = timestep.to(x.dtype)     # here
    angle = timestep.float()[:, None] * 0.5 ** torch.arange(16)
    return x * angle.sin().to(x.dtype)

@planted("aten::(elu|add.Tensor)", r"aten::elu.* in 16 bits", WIDER + "|exp", dtype=B16, tool="precision")
def feature_map_of_attention(x: Tensor) -> Tensor:     # fla-org/flash-linear-attention#1261
    q = F.elu(x - 6) + 1        # here
    return q / q.sum(-1, keepdim=True) * torch.arange(16)

@planted("aten::arange.*", r"arange|made|rounded", WIDER + "|int", dtype=B16, tool="precision")
def index_of_neighbours(x: Tensor) -> Tensor:     # RosettaCommons/foundry#236
    index = torch.arange(600, dtype=x.dtype)[-16:]      # here
    table = torch.arange(601).mul(0.7).sin().to(x.dtype)
    return x * table[index.long()]

# d8ahazard/sd_dreambooth_extension#1415
@whole("precision", r"update.*(nothing|lost|rounds)|copy_", WIDER, "aten::(copy_|add.*|mul.*)",
       model=in_16_bits, state=lambda parameters: [p.detach().clone() for p in parameters])
def average_of_a_bfloat16_model(model: nn.Module, average: list[Tensor]) -> None:
    model(torch.ones(2, 8, dtype=B16)).float().mean().backward()
    with torch.no_grad():
        for mean, p in zip(average, model.parameters(), strict=True):
            mean.copy_(0.9999 * mean + 0.0001 * (p + 0.5))      # here

@whole("precision", r"update.*(nothing|lost|rounds)|mul_", WIDER + "|master", "aten::mul_.*", model=in_16_bits)
def decay_in_bfloat16(model: Any) -> None:     # Nerogar/OneTrainer#996
    model.zero_grad()
    model(torch.ones(2, 8, dtype=B16)).float().sum().backward()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1 - 1e-4)        # here
            p.add_(p.grad, alpha=-0.1)

@whole("precision", r"updates.* are rounded away", WIDER + "|[mM]aster", "aten::.*", model=in_16_bits,
       state=functools.partial(torch.optim.AdamW, lr=6e-7))
def optimizer_in_bfloat16(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:     # meta-pytorch/torchtune#2254
    optimizer.zero_grad()
    model(torch.ones(2, 8, dtype=B16)).float().sum().backward()
    optimizer.step()        # here

@whole("precision", r"updates.* are rounded away", WIDER + "|[mM]aster", "aten::.*", model=in_16_bits,
       state=functools.partial(torch.optim.AdamW, lr=1e-7, betas=(0.9, 0.9999)), before=1)
def moments_in_bfloat16(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:     # NVIDIA-NeMo/Automodel#2248
    optimizer.zero_grad()
    model(torch.ones(2, 8, dtype=B16)).float().square().sum().backward()
    optimizer.step()        # here

@whole("precision", r"add_|accumul", r"(accumul|gradients|keep what).*float32", "aten::add.*",
       model=lambda: nn.Linear(8, 1, bias=False).bfloat16())
def accumulation_in_bfloat16(model: nn.Module) -> None:     # deepspeedai/DeepSpeed#2768
    model.zero_grad()
    for tokens in [400] + [1] * 40:
        model(torch.ones(tokens, 8, dtype=B16)).float().sum().backward()        # here

# facebookresearch/fairscale#263: the norm is inf, and every gradient is clipped to 0
@whole("precision", r"overflow", WIDER, "aten::pow.Tensor_Scalar", model=lambda: nn.Linear(8, 8).half())
def clipping_by_hand_in_half(model: nn.Module) -> None:
    model.zero_grad()
    model(torch.full((2, 8), 500.0, dtype=F16)).float().sum().backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    total = torch.stack([one.norm() ** 2 for one in gradients]).sum().sqrt()        # here
    for one in gradients:
        one.mul_(1 / (total + 1e-6))


# --- the loop

# Haian-Jin/LVSM#19
@whole("loop", r"unscale_.*(twice|2 times|without|again)|update.*(missing|not called)", r"update\(\)",
       model=lambda: nn.Linear(8, 1), state=SGD, scale=256.0)
def skipped_without_an_update(model: nn.Module, optimizer: torch.optim.Optimizer, scaler: Any) -> None:
    for i in range(6):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, torch.randn(4, 8))).backward()
        scaler.unscale_(optimizer)      # here
        if i % 3 != 1:      # the norm is small enough
            scaler.step(optimizer)
            scaler.update()

# huggingface/accelerate#439
@whole("loop", r"update.*(twice|2 times|before)", r"once|after both|last", scale=256.0,
       model=lambda: nn.Linear(8, 1), state=lambda parameters: [SGD([p]) for p in parameters])
def updated_after_each_optimizer(model: nn.Module, optimizers: list[torch.optim.Optimizer], scaler: Any) -> None:
    for _ in range(6):
        model.zero_grad()
        scaler.scale(loss_of(model, torch.randn(4, 8))).backward()
        for optimizer in optimizers:
            scaler.step(optimizer)
            scaler.update()     # here


# --- written down like the others, and shown to the tools after these were mended for those above

# pytorch/pytorch#88474: the scaler skips the step, and the running statistics are lost
@whole("nonfinite", r"overflow", LINES, "aten::addmm", "0", state=SGD, scale=4.0,
       model=lambda: filled(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)), 100.0))
def statistics_after_a_skipped_step(model: nn.Module, optimizer: torch.optim.Optimizer, scaler: Any) -> None:
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=F16):
        loss = model(torch.randn(4, 8).abs() * 100 + 100).float().square().mean()       # here
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()

@planted("in backward of aten::logsumexp", r"-inf|inf - inf|masked", r"finfo|clamp|where")
def sum_over_no_path(x: Tensor) -> Tensor:     # pytorch/pytorch#31829
    paths = x + torch.where(torch.arange(8) == 5, -INF, 0.0)[:, None]
    total = torch.logsumexp(paths, -1)      # here
    return torch.where(total.isinf(), 0.0, total)

@planted("aten::div.Tensor", r"(0 / 0|by 0|is 0)(.|\n)*rows 0, 3", r"clamp")
def contrast_without_positives(x: Tensor) -> Tensor:     # HobbitLong/SupContrast#141
    labels = torch.tensor([0, 1, 1, 3, 4, 4, 4, 1])
    positive = (labels[:, None] == labels).float() - torch.eye(8)
    return -(positive * (x @ x.t()).log_softmax(-1)).sum(1) / positive.sum(1)       # here

@planted("aten::sqrt", r"negative", r"clamp|var\(|std\(")
def deviation_by_moments(x: Tensor) -> Tensor:     # NVIDIA-NeMo/RL#4161
    reward = x * 0 + 1000.35
    deviation = (reward.square().mean(-1, keepdim=True) - reward.mean(-1, keepdim=True).square() - 1e-3).sqrt()  # here
    return x / (deviation + 1e-4)

@planted("aten::log", r"0 in float16|underflow", FLOAT, dtype=F16)
def divergence_of_normals(x: Tensor) -> Tensor:     # NVIDIA/apex#812
    ratio = ((x * 1e-6 + 1e-4) / 1).pow(2)      # here
    return 0.5 * (ratio - 1 - ratio.log()) + x

@planted("aten::(sub.Tensor|kl_div)", r"-inf|inf - inf", r"where|mask|finfo|nan_to_num")
def divergence_of_suppressed_tokens(x: Tensor) -> Tensor:     # p-e-w/heretic#348
    logits = x.masked_fill(torch.arange(16) == 7, -INF)
    reference = logits.detach().log_softmax(-1)
    return F.kl_div(logits.log_softmax(-1), reference, log_target=True, reduction="none")       # here

# zhuchen03/FreeLB#8: what is divided by inf is 0, and the perturbation with it
@planted("aten::linalg_vector_norm", r"overflow", WIDER, dtype=F16, tool="precision")
def perturbation_of_an_embedding(x: Tensor) -> Tensor:
    gradient = x.detach().sign() * 3e4
    norm = torch.norm(gradient, dim=-1, keepdim=True)       # here
    return x * (gradient / norm * 4)

@planted("aten::linspace", r"linspace|made|rounded", WIDER, dtype=B16, tool="precision")
def schedule_in_bfloat16(x: Tensor) -> Tensor:     # Comfy-Org/ComfyUI#16001
    sigmas = torch.linspace(1.0, 0.9, 201, dtype=x.dtype)       # here
    return x * (sigmas[:16] - sigmas[1:17]) * 2000
