"""torch.amp's own operator lists, per device type and version of torch. A test compares them with the dispatcher.

Source: ATen/autocast_mode.h and autocast_mode.cpp of torch 2.11 to 2.15.
"""

from ampkit.policy.rules import Group, Rule

_MATMUL = """
    addbmm addmm addmv addr baddbmm bmm chain_matmul einsum linalg_multi_dot linear matmul mm mv prelu
    _convolution _convolution.deprecated convolution conv1d conv2d conv3d conv_tbc conv_transpose1d
    conv_transpose2d.input scaled_dot_product_attention"""
_MATMUL_ACCELERATOR = """
    conv_transpose3d.input linalg_vecdot _scaled_dot_product_flash_attention"""
_CELLS = """
    _thnn_fused_gru_cell _thnn_fused_lstm_cell gru_cell lstm_cell rnn_relu_cell rnn_tanh_cell"""
POINTWISE = """
    acos asin cosh erfinv exp expm1 log log10 log1p log2 pow.Scalar pow.Tensor_Scalar pow.Tensor_Tensor
    reciprocal rsqrt sinh softplus tan"""
NORMALIZATIONS = "group_norm layer_norm native_layer_norm"
_DISTANCES = """
    cdist cosine_similarity dist frobenius_norm.dim logsumexp nuclear_norm nuclear_norm.dim pdist renorm"""
_LOSSES = """
    binary_cross_entropy_with_logits cosine_embedding_loss hinge_embedding_loss huber_loss kl_div l1_loss
    margin_ranking_loss mse_loss multi_margin_loss multilabel_margin_loss nll_loss nll_loss2d poisson_nll_loss
    smooth_l1_loss soft_margin_loss triplet_margin_loss"""
UPSAMPLING = """
    _upsample_bicubic2d_aa _upsample_bilinear2d_aa _upsample_nearest_exact1d _upsample_nearest_exact2d
    _upsample_nearest_exact3d upsample_bicubic2d upsample_bilinear2d upsample_linear1d upsample_nearest1d
    upsample_nearest2d upsample_nearest3d upsample_trilinear3d"""
_REDUCTIONS = """
    cumprod cumsum linalg_matrix_norm linalg_matrix_norm.str_ord linalg_vector_norm log_softmax.int prod
    prod.dim_int softmax.int sum sum.dim_IntList"""
_REDUCTIONS_NAMED = """
    cumprod.dimname cumsum.dimname log_softmax.Dimname prod.dim_Dimname softmax.Dimname sum.dim_DimnameList"""
_MIXED = "addcdiv addcmul atan2 bilinear cross dot grid_sampler index_put scatter_add tensordot"

WHY_MATMUL = "matrix units multiply in half precision and accumulate in float32"
WHY_RANGE = "leaves the range or the precision of half types for everyday inputs"
WHY_NORM = "variance and its reciprocal root lose too much in half precision"
_WHY_LOSS = "a loss sums over a batch, and the gradient of everything starts from it"
WHY_REDUCTION = "a long sum needs float32; an explicit dtype= from the caller is respected"
WHY_MIXED = "needs one dtype for all its inputs and does not promote by itself"
WHY_SCATTER = "the backward pass adds many small gradients into one place"
WHY_SQUARES = "sums of squares or of exponentials"
WHY_LAPACK = "LAPACK works in float32 and float64"
_WHY_NAMED = "named-tensor overloads, gone from torch 2.13"
_WHY_HALF_KERNEL = "no kernel for half types here, or one too inexact to use"

ACCELERATOR: tuple[Group, ...] = (
    Group(Rule.LOWER, WHY_MATMUL, _MATMUL + _MATMUL_ACCELERATOR),
    Group(Rule.LOWER, "one step of a recurrent layer: two matrix products and cheap gates", _CELLS),
    Group(Rule.FLOAT32, WHY_RANGE, POINTWISE),
    Group(Rule.FLOAT32, WHY_NORM, NORMALIZATIONS),
    Group(Rule.FLOAT32, WHY_NORM, "rms_norm", since=(2, 12)),
    Group(Rule.FLOAT32, WHY_SQUARES, _DISTANCES),
    Group(Rule.FLOAT32, _WHY_LOSS, _LOSSES),
    Group(Rule.FLOAT32, WHY_SCATTER, UPSAMPLING),
    Group(Rule.FLOAT32_DTYPE_ARG, WHY_REDUCTION, _REDUCTIONS + " norm.Scalar norm.ScalarOpt_dim"),
    Group(Rule.FLOAT32_DTYPE_ARG, _WHY_NAMED, _REDUCTIONS_NAMED + " norm.names_ScalarOpt_dim", until=(2, 13)),
    Group(Rule.PROMOTE, WHY_MIXED, _MIXED + " vdot"),
    Group(
        Rule.BANNED,
        "the sigmoid before it has already rounded to 0 or 1 in half precision; "
        "binary_cross_entropy_with_logits has not",
        "binary_cross_entropy",
    ),
)

_CUDA: tuple[Group, ...] = (
    *ACCELERATOR,
    Group(Rule.LOWER, WHY_MATMUL, "cudnn_convolution cudnn_convolution_transpose"),
    Group(
        Rule.LOWER,
        "recurrent layers of cuDNN and MIOpen, registered where the library is built in; torch "
        "always casts to float16, even in a bfloat16 region",
        "_cudnn_rnn miopen_rnn",
    ),
    Group(Rule.FLOAT32, WHY_LAPACK, "linalg_matrix_sqrth", since=(2, 14)),
)

_CPU: tuple[Group, ...] = (
    Group(
        Rule.LOWER,
        WHY_MATMUL,
        """
        _addmm_activation _convolution.deprecated _native_multi_head_attention addbmm addmm baddbmm bmm conv1d
        conv1d.padding conv2d conv2d.padding conv3d conv3d.padding conv_tbc conv_transpose1d
        conv_transpose2d.input conv_transpose3d.input linalg_vecdot linear matmul mkldnn_rnn_layer mm prelu
        scaled_dot_product_attention""",
    ),
    Group(
        Rule.FLOAT32,
        _WHY_LOSS,
        """
        binary_cross_entropy binary_cross_entropy_with_logits cosine_embedding_loss cross_entropy_loss
        ctc_loss.IntList ctc_loss.Tensor hinge_embedding_loss huber_loss kl_div l1_loss margin_ranking_loss
        mse_loss multi_margin_loss multilabel_margin_loss multilabel_margin_loss_forward nll_loss nll_loss2d
        poisson_nll_loss smooth_l1_loss soft_margin_loss triplet_margin_loss""",
    ),
    Group(
        Rule.FLOAT32,
        _WHY_HALF_KERNEL,
        """
        _grid_sampler_2d_cpu_fallback _lu_with_info adaptive_avg_pool3d adaptive_max_pool3d avg_pool3d cdist
        cholesky_inverse cholesky_solve fake_quantize_per_tensor_affine fractional_max_pool2d
        fractional_max_pool3d geqrf grid_sampler grid_sampler_2d grid_sampler_3d inverse lu_solve max_pool3d
        max_unpool2d max_unpool3d nanquantile nanquantile.scalar orgqr ormqr pinverse polar quantile
        quantile.scalar reflection_pad1d reflection_pad2d replication_pad1d replication_pad2d
        replication_pad3d svd trace triangular_solve view_as_complex""",
    ),
    Group(
        Rule.FLOAT32,
        "Fourier transforms have no half kernels on CPU",
        """
        fft_fft fft_fft2 fft_fftn fft_hfft fft_ifft fft_ifft2 fft_ifftn fft_ihfft fft_irfft fft_irfft2
        fft_irfftn fft_rfft fft_rfft2 fft_rfftn stft stft.center""",
    ),
    Group(
        Rule.FLOAT32,
        WHY_LAPACK,
        """
        linalg_cholesky linalg_cholesky_ex linalg_cond linalg_cond.p_str linalg_eig linalg_eigh linalg_eigvals
        linalg_eigvalsh linalg_householder_product linalg_inv linalg_inv_ex linalg_lstsq linalg_matrix_rank
        linalg_matrix_rank.atol_rtol_float linalg_matrix_rank.atol_rtol_tensor linalg_matrix_rank.tol_tensor
        linalg_qr linalg_solve linalg_svd linalg_svdvals linalg_tensorinv linalg_tensorsolve""",
    ),
    Group(Rule.FLOAT32, WHY_LAPACK, "cholesky qr", until=(2, 14)),
    Group(Rule.FLOAT32, WHY_LAPACK, "linalg_matrix_sqrth", since=(2, 14)),
    Group(Rule.FLOAT32, "a long product needs float32", "prod prod.dim_int"),
    Group(Rule.FLOAT32, _WHY_NAMED, "prod.dim_Dimname", until=(2, 13)),
    Group(Rule.PROMOTE, WHY_MIXED, "cat index_copy stack"),
    Group(Rule.PROMOTE, _WHY_NAMED, "index_copy.dimname", until=(2, 13)),
)

_MPS: tuple[Group, ...] = (
    Group(Rule.LOWER, WHY_MATMUL, _MATMUL + " _mps_convolution lstm_cell"),
    Group(Rule.FLOAT32, _WHY_HALF_KERNEL, "conv_transpose3d.input"),
    Group(Rule.FLOAT32, WHY_RANGE, POINTWISE),
    Group(Rule.FLOAT32, WHY_NORM, NORMALIZATIONS + " batch_norm"),
    Group(Rule.FLOAT32, WHY_SQUARES, _DISTANCES),
    Group(Rule.FLOAT32, _WHY_LOSS, _LOSSES),
    Group(
        Rule.FLOAT32, "a long sum needs float32; here torch casts the input instead of asking for a dtype", _REDUCTIONS
    ),
    Group(Rule.FLOAT32, _WHY_NAMED, _REDUCTIONS_NAMED, until=(2, 13)),
    Group(Rule.PROMOTE, WHY_MIXED, _MIXED),
)

TORCH: dict[str, tuple[Group, ...]] = {
    "cpu": _CPU,
    "cuda": _CUDA,
    "mps": _MPS,
    "xpu": ACCELERATOR,
    "mtia": ACCELERATOR,
    "maia": ACCELERATOR,
    # torch has an autocast dtype for these and lists no operators; their plugins may.
    "hpu": (),
    "ipu": (),
    "xla": (),
    "privateuseone": (),
}
