"""The operator lists: which rule each operator follows, per device type, and why.

Pure data and one fold. A list is a tuple of `Group`s; `fold` turns groups into `{OpOverload: Rule}` and
refuses unknown names and duplicates, so a list that loads is a list whose every line means something.

Names are ATen's: ``conv2d`` is the overload ``aten::conv2d`` (``torch.ops.aten.conv2d.default``),
``conv2d.padding`` is that overload. In-place and ``out=`` overloads are never listed: the caller chose the
dtype of what they write to.

`TORCH` is torch.amp's own list for each device, version by version; a test compares it with the dispatcher.
`DEFAULT_EXTRA` is what ampkit's default policy lays on top. `OPAQUE` and `DECOMPOSED` classify the composite
operators (see `_composites`).

Source of `TORCH`: ATen/autocast_mode.h and autocast_mode.cpp of torch 2.11 to 2.13.
"""

import difflib
from collections.abc import Iterable
from enum import Enum
from typing import NamedTuple

import torch
from torch._ops import OpOverload

from ampkit._composites import DECOMPOSED, OPAQUE

__all__ = ["DECOMPOSED", "DEFAULT_EXTRA", "OPAQUE", "TORCH", "Group", "Rule", "fold", "resolve"]


class Rule(Enum):
    """What autocast does with an operator's eligible arguments.

    Eligible is a floating-point tensor on the region's device, float64 excepted.
    """

    LOWER = "lower"                            # cast every eligible tensor to the region's dtype
    FLOAT32 = "float32"                        # cast every eligible tensor to float32
    FLOAT32_DTYPE_ARG = "float32_dtype_arg"    # leave tensors alone, ask for float32 through `dtype=`
    PROMOTE = "promote"                        # cast all of them to the widest dtype among them
    BANNED = "banned"                          # raise, and say what to do instead
    DECOMPOSE = "decompose"                    # a composite: its own code runs, the region active inside
    KEEP = "keep"                              # call it on the arguments as they came


class Group(NamedTuple):
    """Operators that share one rule for one reason.

    `ops` holds ATen names separated by whitespace. A group applies to torch versions from `since` up to, not
    including, `until`, both ``(major, minor)``; outside that span its names may not even exist.
    """

    rule: Rule
    why: str
    ops: str
    since: tuple[int, int] = (0, 0)
    until: tuple[int, int] = (1000, 0)


_MATMUL = """
    addbmm addmm addmv addr baddbmm bmm chain_matmul einsum linalg_multi_dot linear matmul mm mv prelu
    _convolution _convolution.deprecated convolution conv1d conv2d conv3d conv_tbc conv_transpose1d
    conv_transpose2d.input scaled_dot_product_attention"""
_MATMUL_ACCELERATOR = """
    conv_transpose3d.input linalg_vecdot _scaled_dot_product_flash_attention"""
_CELLS = """
    _thnn_fused_gru_cell _thnn_fused_lstm_cell gru_cell lstm_cell rnn_relu_cell rnn_tanh_cell"""
_POINTWISE = """
    acos asin cosh erfinv exp expm1 log log10 log1p log2 pow.Scalar pow.Tensor_Scalar pow.Tensor_Tensor
    reciprocal rsqrt sinh softplus tan"""
_NORMALISATIONS = "group_norm layer_norm native_layer_norm"
_DISTANCES = """
    cdist cosine_similarity dist frobenius_norm.dim logsumexp nuclear_norm nuclear_norm.dim pdist renorm"""
_LOSSES = """
    binary_cross_entropy_with_logits cosine_embedding_loss hinge_embedding_loss huber_loss kl_div l1_loss
    margin_ranking_loss mse_loss multi_margin_loss multilabel_margin_loss nll_loss nll_loss2d poisson_nll_loss
    smooth_l1_loss soft_margin_loss triplet_margin_loss"""
_UPSAMPLING = """
    _upsample_bicubic2d_aa _upsample_bilinear2d_aa _upsample_nearest_exact1d _upsample_nearest_exact2d
    _upsample_nearest_exact3d upsample_bicubic2d upsample_bilinear2d upsample_linear1d upsample_nearest1d
    upsample_nearest2d upsample_nearest3d upsample_trilinear3d"""
_REDUCTIONS = """
    cumprod cumsum linalg_matrix_norm linalg_matrix_norm.str_ord linalg_vector_norm log_softmax.int prod
    prod.dim_int softmax.int sum sum.dim_IntList"""
_REDUCTIONS_NAMED = """
    cumprod.dimname cumsum.dimname log_softmax.Dimname prod.dim_Dimname softmax.Dimname sum.dim_DimnameList"""
_MIXED = "addcdiv addcmul atan2 bilinear cross dot grid_sampler index_put scatter_add tensordot"

_WHY_MATMUL = "matrix units multiply in half precision and accumulate in float32"
_WHY_RANGE = "leaves the range or the precision of half types for everyday inputs"
_WHY_NORM = "variance and its reciprocal root lose too much in half precision"
_WHY_LOSS = "a loss sums over a batch, and the gradient of everything starts from it"
_WHY_REDUCTION = "a long sum needs float32; an explicit dtype= from the caller is respected"
_WHY_MIXED = "needs one dtype for all its inputs and does not promote by itself"
_WHY_SCATTER = "the backward pass adds many small gradients into one place"
_WHY_SQUARES = "sums of squares or of exponentials"
_WHY_NAMED = "named-tensor overloads, gone from torch 2.13"
_WHY_HALF_KERNEL = "no kernel for half types here, or one too inexact to use"

_ACCELERATOR: tuple[Group, ...] = (
    Group(Rule.LOWER, _WHY_MATMUL, _MATMUL + _MATMUL_ACCELERATOR),
    Group(Rule.LOWER, "one step of a recurrent layer: two matrix products and cheap gates", _CELLS),
    Group(Rule.FLOAT32, _WHY_RANGE, _POINTWISE),
    Group(Rule.FLOAT32, _WHY_NORM, _NORMALISATIONS),
    Group(Rule.FLOAT32, _WHY_NORM, "rms_norm", since=(2, 12)),
    Group(Rule.FLOAT32, _WHY_SQUARES, _DISTANCES),
    Group(Rule.FLOAT32, _WHY_LOSS, _LOSSES),
    Group(Rule.FLOAT32, _WHY_SCATTER, _UPSAMPLING),
    Group(Rule.FLOAT32_DTYPE_ARG, _WHY_REDUCTION, _REDUCTIONS + " norm.Scalar norm.ScalarOpt_dim"),
    Group(Rule.FLOAT32_DTYPE_ARG, _WHY_NAMED, _REDUCTIONS_NAMED + " norm.names_ScalarOpt_dim", until=(2, 13)),
    Group(Rule.PROMOTE, _WHY_MIXED, _MIXED + " vdot"),
    Group(Rule.BANNED, "the sigmoid before it has already rounded to 0 or 1 in half precision; "
                       "binary_cross_entropy_with_logits has not", "binary_cross_entropy"),
)

_CUDA: tuple[Group, ...] = (
    *_ACCELERATOR,
    Group(Rule.LOWER, _WHY_MATMUL, "cudnn_convolution cudnn_convolution_transpose"),
    Group(Rule.LOWER, "recurrent layers of cuDNN and MIOpen, registered where the library is built in; torch "
                      "always casts to float16, even in a bfloat16 region", "_cudnn_rnn miopen_rnn"),
)

_CPU: tuple[Group, ...] = (
    Group(Rule.LOWER, _WHY_MATMUL, """
        _addmm_activation _convolution.deprecated _native_multi_head_attention addbmm addmm baddbmm bmm conv1d
        conv1d.padding conv2d conv2d.padding conv3d conv3d.padding conv_tbc conv_transpose1d
        conv_transpose2d.input conv_transpose3d.input linalg_vecdot linear matmul mkldnn_rnn_layer mm prelu
        scaled_dot_product_attention"""),
    Group(Rule.FLOAT32, _WHY_LOSS, """
        binary_cross_entropy binary_cross_entropy_with_logits cosine_embedding_loss cross_entropy_loss
        ctc_loss.IntList ctc_loss.Tensor hinge_embedding_loss huber_loss kl_div l1_loss margin_ranking_loss
        mse_loss multi_margin_loss multilabel_margin_loss multilabel_margin_loss_forward nll_loss nll_loss2d
        poisson_nll_loss smooth_l1_loss soft_margin_loss triplet_margin_loss"""),
    Group(Rule.FLOAT32, _WHY_HALF_KERNEL, """
        _grid_sampler_2d_cpu_fallback _lu_with_info adaptive_avg_pool3d adaptive_max_pool3d avg_pool3d cdist
        cholesky cholesky_inverse cholesky_solve fake_quantize_per_tensor_affine fractional_max_pool2d
        fractional_max_pool3d geqrf grid_sampler grid_sampler_2d grid_sampler_3d inverse lu_solve max_pool3d
        max_unpool2d max_unpool3d nanquantile nanquantile.scalar orgqr ormqr pinverse polar qr quantile
        quantile.scalar reflection_pad1d reflection_pad2d replication_pad1d replication_pad2d
        replication_pad3d svd trace triangular_solve view_as_complex"""),
    Group(Rule.FLOAT32, "Fourier transforms have no half kernels on CPU", """
        fft_fft fft_fft2 fft_fftn fft_hfft fft_ifft fft_ifft2 fft_ifftn fft_ihfft fft_irfft fft_irfft2
        fft_irfftn fft_rfft fft_rfft2 fft_rfftn stft stft.center"""),
    Group(Rule.FLOAT32, "LAPACK works in float32 and float64", """
        linalg_cholesky linalg_cholesky_ex linalg_cond linalg_cond.p_str linalg_eig linalg_eigh linalg_eigvals
        linalg_eigvalsh linalg_householder_product linalg_inv linalg_inv_ex linalg_lstsq linalg_matrix_rank
        linalg_matrix_rank.atol_rtol_float linalg_matrix_rank.atol_rtol_tensor linalg_matrix_rank.tol_tensor
        linalg_qr linalg_solve linalg_svd linalg_svdvals linalg_tensorinv linalg_tensorsolve"""),
    Group(Rule.FLOAT32, "a long product needs float32", "prod prod.dim_int"),
    Group(Rule.FLOAT32, _WHY_NAMED, "prod.dim_Dimname", until=(2, 13)),
    Group(Rule.PROMOTE, _WHY_MIXED, "cat index_copy stack"),
    Group(Rule.PROMOTE, _WHY_NAMED, "index_copy.dimname", until=(2, 13)),
)

_MPS: tuple[Group, ...] = (
    Group(Rule.LOWER, _WHY_MATMUL, _MATMUL + " _mps_convolution lstm_cell"),
    Group(Rule.FLOAT32, _WHY_HALF_KERNEL, "conv_transpose3d.input"),
    Group(Rule.FLOAT32, _WHY_RANGE, _POINTWISE),
    Group(Rule.FLOAT32, _WHY_NORM, _NORMALISATIONS + " batch_norm"),
    Group(Rule.FLOAT32, _WHY_SQUARES, _DISTANCES),
    Group(Rule.FLOAT32, _WHY_LOSS, _LOSSES),
    Group(Rule.FLOAT32, "a long sum needs float32; here torch casts the input instead of asking for a dtype",
          _REDUCTIONS),
    Group(Rule.FLOAT32, _WHY_NAMED, _REDUCTIONS_NAMED, until=(2, 13)),
    Group(Rule.PROMOTE, _WHY_MIXED, _MIXED),
)

TORCH: dict[str, tuple[Group, ...]] = {
    "cpu": _CPU,
    "cuda": _CUDA,
    "mps": _MPS,
    "xpu": _ACCELERATOR,
    "mtia": _ACCELERATOR,
    "maia": _ACCELERATOR,
    # torch knows an autocast dtype for these and lists nothing; their plugins may.
    "hpu": (),
    "ipu": (),
    "xla": (),
    "privateuseone": (),
}

_RECURRENT = """
    gru.data gru.input gru_cell lstm.data lstm.input lstm_cell rnn_relu.data rnn_relu.input rnn_relu_cell
    rnn_tanh.data rnn_tanh.input rnn_tanh_cell"""
_WHY_RECURRENT = "matrix products and gates: the whole recurrent layer in the region's dtype, on every device"
_WHY_LIKE_CUDA = "as on CUDA, so that a model gets the same dtypes wherever it runs: "
_WHY_SAME_FUNCTION = "exp and logsumexp under another name, which torch's lists leave in half precision"
_WHY_FUSED = "an encoder layer's inference path in one operator; inside, it is matrix products"

# What every device gets, whatever torch lists for it.
_EVERYWHERE: tuple[Group, ...] = (
    Group(Rule.FLOAT32, _WHY_SAME_FUNCTION, "exp2 logaddexp logaddexp2 logcumsumexp"),
    Group(Rule.PROMOTE, "raises on mixed dtypes in torch.amp, on every device", """
        index_add lerp.Scalar lerp.Tensor masked_scatter scatter.reduce scatter.src scatter_reduce.two"""),
    Group(Rule.LOWER, _WHY_FUSED, "_transformer_encoder_layer_fwd"),
)
# Half precision has no kernel for these on any accelerator: torch.amp raises, float32 answers.
_NO_HALF_KERNEL: tuple[Group, ...] = (
    Group(Rule.FLOAT32, "linear algebra libraries work in float32 and float64; torch.amp raises here", """
        _lu_with_info cholesky cholesky_inverse cholesky_solve geqrf inverse linalg_cholesky
        linalg_cholesky_ex linalg_cond linalg_cond.p_str linalg_eig linalg_eigh linalg_eigvals linalg_eigvalsh
        linalg_householder_product linalg_inv linalg_inv_ex linalg_lstsq linalg_matrix_rank
        linalg_matrix_rank.atol_rtol_float linalg_matrix_rank.atol_rtol_tensor linalg_matrix_rank.tol_tensor
        linalg_qr linalg_solve linalg_svd linalg_svdvals linalg_tensorinv linalg_tensorsolve lu_solve orgqr
        ormqr pinverse qr svd triangular_solve"""),
    Group(Rule.FLOAT32, "half transforms exist for a few sizes only; torch.amp raises for the others", """
        fft_fft fft_fft2 fft_fftn fft_hfft fft_ifft fft_ifft2 fft_ifftn fft_ihfft fft_irfft fft_irfft2
        fft_irfftn fft_rfft fft_rfft2 fft_rfftn stft stft.center"""),
    Group(Rule.FLOAT32, "no half kernel; torch.amp raises", "ctc_loss.IntList ctc_loss.Tensor polar "
          "nanquantile nanquantile.scalar quantile quantile.scalar"),
    Group(Rule.PROMOTE, "raises on mixed dtypes in torch.amp", "index_copy"),
)

_EXTRA_CPU: tuple[Group, ...] = (
    Group(Rule.LOWER, _WHY_RECURRENT, _RECURRENT),
    Group(Rule.LOWER, _WHY_LIKE_CUDA + _WHY_MATMUL,
          "_convolution addmv addr chain_matmul convolution einsum linalg_multi_dot mv"),
    Group(Rule.FLOAT32, _WHY_LIKE_CUDA + _WHY_RANGE, _POINTWISE),
    Group(Rule.FLOAT32, _WHY_LIKE_CUDA + _WHY_NORM, _NORMALISATIONS + " rms_norm"),
    Group(Rule.FLOAT32, _WHY_LIKE_CUDA + _WHY_SQUARES,
          "cosine_similarity dist frobenius_norm.dim logsumexp nuclear_norm nuclear_norm.dim pdist renorm"),
    Group(Rule.FLOAT32, _WHY_LIKE_CUDA + _WHY_SCATTER, _UPSAMPLING),
    Group(Rule.FLOAT32_DTYPE_ARG, _WHY_LIKE_CUDA + _WHY_REDUCTION, """
        cumprod cumsum linalg_matrix_norm linalg_matrix_norm.str_ord linalg_vector_norm log_softmax.int
        norm.Scalar norm.ScalarOpt_dim softmax.int sum sum.dim_IntList"""),
    Group(Rule.PROMOTE, _WHY_LIKE_CUDA + _WHY_MIXED,
          "addcdiv addcmul atan2 bilinear cross dot index_put scatter_add tensordot vdot"),
    *_EVERYWHERE,
)
_EXTRA_ACCELERATOR: tuple[Group, ...] = (
    Group(Rule.LOWER, _WHY_RECURRENT, """
        gru.data gru.input lstm.data lstm.input rnn_relu.data rnn_relu.input rnn_tanh.data rnn_tanh.input"""),
    Group(Rule.LOWER, _WHY_FUSED, "_native_multi_head_attention"),
    Group(Rule.FLOAT32, _WHY_NORM, "rms_norm", until=(2, 12)),
    *_NO_HALF_KERNEL,
    *_EVERYWHERE,
)
_EXTRA_MPS: tuple[Group, ...] = (
    Group(Rule.LOWER, _WHY_RECURRENT, """
        gru.data gru.input gru_cell lstm.data lstm.input rnn_relu.data rnn_relu.input rnn_relu_cell
        rnn_tanh.data rnn_tanh.input rnn_tanh_cell"""),
    Group(Rule.LOWER, _WHY_FUSED, "_native_multi_head_attention"),
    Group(Rule.LOWER, _WHY_LIKE_CUDA + _WHY_MATMUL, "linalg_vecdot"),
    Group(Rule.FLOAT32, _WHY_LIKE_CUDA + _WHY_NORM, "rms_norm"),
    Group(Rule.FLOAT32, "unlisted by torch here, and too short of range in float16", "binary_cross_entropy"),
    Group(Rule.FLOAT32_DTYPE_ARG, _WHY_LIKE_CUDA + _WHY_REDUCTION, "norm.Scalar norm.ScalarOpt_dim"),
    Group(Rule.PROMOTE, _WHY_LIKE_CUDA + _WHY_MIXED, "vdot"),
    *_NO_HALF_KERNEL,
    *_EVERYWHERE,
)
_EXTRA_UNLISTED: tuple[Group, ...] = (
    *(group for group in _ACCELERATOR if group.rule is not Rule.BANNED and group.since == (0, 0)),
    Group(Rule.FLOAT32, _WHY_NORM, "rms_norm"),
    Group(Rule.FLOAT32, "too short of range in half precision; torch bans nothing on this device",
          "binary_cross_entropy"),
    *(group for group in _EXTRA_ACCELERATOR if group.until == (1000, 0)),
)

DEFAULT_EXTRA: dict[str, tuple[Group, ...]] = {
    "cpu": _EXTRA_CPU,
    "cuda": _EXTRA_ACCELERATOR,
    "mps": _EXTRA_MPS,
    "xpu": _EXTRA_ACCELERATOR,
    "mtia": _EXTRA_ACCELERATOR,
    "maia": _EXTRA_ACCELERATOR,
    "hpu": _EXTRA_UNLISTED,
    "ipu": _EXTRA_UNLISTED,
    "xla": _EXTRA_UNLISTED,
    "privateuseone": _EXTRA_UNLISTED,
}


def _torch_version() -> tuple[int, int]:
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


def resolve(name: str) -> OpOverload:
    """The operator that `name` means: ``"conv2d"``, ``"conv2d.padding"`` or ``"aten::conv2d.padding"``.

    Without a namespace the operator is ATen's; without an overload it is the one called ``default``.
    Raises `ValueError`, with the nearest names, if this torch has no such operator. Never syncs.

    >>> resolve("conv2d.padding")
    <OpOverload(op='aten.conv2d', overload='padding')>
    """
    namespace, _, rest = name.rpartition("::")
    namespace = namespace or "aten"
    base, _, overload = rest.partition(".")
    library = getattr(torch.ops, namespace)
    packet = getattr(library, base, None)
    if packet is None:
        near = difflib.get_close_matches(base, _names(namespace), n=3)
        raise ValueError(f"unknown operator {name!r} in torch {torch.__version__}; nearest: {near or 'none'}")
    found = getattr(packet, overload or "default", None)
    if found is None:
        raise ValueError(
            f"operator '{namespace}::{base}' has no overload {overload or 'default'!r}; "
            f"expected one of {packet.overloads()}"
        )
    return found


def _names(namespace: str) -> list[str]:
    """Base names of all operators of a namespace."""
    every = torch._C._dispatch_get_all_op_names()
    return sorted({name.split("::")[1].split(".")[0] for name in every if name.startswith(namespace + "::")})


def fold(groups: Iterable[Group]) -> dict[OpOverload, Rule]:
    """One layer of a policy: every operator of `groups` with its rule.

    Groups outside the running torch's version span are left out. Raises `ValueError` for a name that does not
    exist and for an operator listed twice, `TypeError` for a rule that is not a `Rule`. Layers are combined
    by the policy, later over earlier: ``fold(TORCH["cpu"]) | fold(DEFAULT_EXTRA["cpu"])``.
    """
    version = _torch_version()
    rules: dict[OpOverload, Rule] = {}
    for group in groups:
        if not isinstance(group.rule, Rule):
            raise TypeError(f"rule of {group.ops!r} is {group.rule!r}; expected a member of Rule")
        if not group.since <= version < group.until:
            continue
        for name in group.ops.split():
            op = resolve(name)
            if op in rules:
                raise ValueError(
                    f"operator {op.name()!r} is listed twice: as {rules[op].name} and as {group.rule.name}"
                )
            rules[op] = group.rule
    return rules
