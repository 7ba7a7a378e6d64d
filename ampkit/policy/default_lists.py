"""ampkit's additions to torch.amp's operator lists, per device type, with reasons: the default policy.

The aims, in order: everything that runs under torch.amp still runs; a model gets the same dtypes on every device;
operators that torch.amp leaves in half precision unlike similar ones, or casts below autograd, are corrected.
"""

from ampkit.policy.rules import Group, Rule
from ampkit.policy.torch_lists import (
    ACCELERATOR,
    NORMALIZATIONS,
    POINTWISE,
    UPSAMPLING,
    WHY_MATMUL,
    WHY_MIXED,
    WHY_NORM,
    WHY_RANGE,
    WHY_REDUCTION,
    WHY_SCATTER,
    WHY_SQUARES,
)

_RECURRENT = """
    gru.data gru.input gru_cell lstm.data lstm.input lstm_cell rnn_relu.data rnn_relu.input rnn_relu_cell
    rnn_tanh.data rnn_tanh.input rnn_tanh_cell"""
_WHY_RECURRENT = "matrix products and gates: the whole recurrent layer in the region's dtype, on every device"
_WHY_LIKE_CUDA = "as on CUDA, so that a model gets the same dtypes wherever it runs: "
_WHY_FUSED = "an attention layer's inference path in one operator; inside, it is matrix products"

_WHY_LAPACK = "linear algebra libraries work in float32 and float64; torch.amp raises here"

# Operators that torch's CPU list sends to float32 because there is no half kernel; accelerators have none either.
_NO_HALF_KERNEL: tuple[Group, ...] = (
    Group(
        Rule.FLOAT32,
        _WHY_LAPACK,
        """
        _lu_with_info cholesky_inverse cholesky_solve geqrf inverse linalg_cholesky
        linalg_cholesky_ex linalg_cond linalg_cond.p_str linalg_eig linalg_eigh linalg_eigvals linalg_eigvalsh
        linalg_householder_product linalg_inv linalg_inv_ex linalg_lstsq linalg_matrix_rank
        linalg_matrix_rank.atol_rtol_float linalg_matrix_rank.atol_rtol_tensor linalg_matrix_rank.tol_tensor
        linalg_qr linalg_solve linalg_svd linalg_svdvals linalg_tensorinv linalg_tensorsolve lu_solve orgqr
        ormqr pinverse svd triangular_solve""",
    ),
    Group(Rule.FLOAT32, _WHY_LAPACK, "cholesky qr", until=(2, 14)),
    Group(
        Rule.FLOAT32,
        "half transforms exist for a few sizes only; torch.amp raises for the others",
        """
        fft_fft fft_fft2 fft_fftn fft_hfft fft_ifft fft_ifft2 fft_ifftn fft_ihfft fft_irfft fft_irfft2
        fft_irfftn fft_rfft fft_rfft2 fft_rfftn stft stft.center""",
    ),
    Group(
        Rule.FLOAT32,
        "no half kernel; torch.amp raises",
        """
        ctc_loss.IntList ctc_loss.Tensor nanquantile nanquantile.scalar polar quantile quantile.scalar""",
    ),
    Group(Rule.PROMOTE, "raises on mixed dtypes in torch.amp", "index_copy"),
)
_WHY_FORGOTTEN = "no half kernel on CPU or CUDA, and on none of torch's lists: torch.amp raises"

_CUMPROD = Group(
    Rule.FLOAT32, "its derivative raises at a zero where the call has a dtype argument", "cumprod", until=(2, 13)
)

# For every device, whatever torch lists for it.
_EVERYWHERE: tuple[Group, ...] = (
    Group(
        Rule.FLOAT32,
        "exp and logsumexp under another name, which torch's lists leave in half precision",
        "exp2 logaddexp logaddexp2 logcumsumexp",
    ),
    Group(
        Rule.PROMOTE,
        "raises on mixed dtypes in torch.amp, on every device",
        """
        index_add lerp.Scalar lerp.Tensor masked_scatter scatter.reduce scatter.src scatter_reduce.two""",
    ),
    Group(
        Rule.LOWER,
        "an encoder layer's inference path in one operator; inside, it is matrix products",
        "_transformer_encoder_layer_fwd",
    ),
    Group(
        Rule.FLOAT32,
        "calls listed operators from its kernel, below autograd, where a cast has no derivative or "
        "meets a tensor of another dtype; float32 from outside keeps casts out",
        "_sparse_addmm ldexp.Tensor linalg_matrix_exp linalg_pinv.atol_rtol_tensor mvlgamma",
    ),
    Group(
        Rule.FLOAT32,
        _WHY_FORGOTTEN,
        """
        _linalg_det _linalg_slogdet _linalg_solve_ex fft_hfft2 fft_hfftn fft_ihfft2 fft_ihfftn
        linalg_ldl_factor_ex linalg_ldl_solve linalg_lu linalg_lu_factor_ex linalg_lu_solve
        linalg_solve_triangular linalg_vander logdet slogdet linalg_slogdet""",
    ),
    Group(
        Rule.FLOAT32,
        _WHY_FORGOTTEN,
        """
        special_airy_ai special_bessel_j0 special_bessel_j1 special_bessel_y0 special_bessel_y1
        special_chebyshev_polynomial_t special_chebyshev_polynomial_u special_chebyshev_polynomial_v
        special_chebyshev_polynomial_w special_erfcx special_hermite_polynomial_h
        special_hermite_polynomial_he special_laguerre_polynomial_l special_legendre_polynomial_p
        special_log_ndtr special_modified_bessel_i0 special_modified_bessel_i1 special_modified_bessel_k0
        special_modified_bessel_k1 special_ndtri special_scaled_modified_bessel_k0
        special_scaled_modified_bessel_k1 special_shifted_chebyshev_polynomial_t
        special_shifted_chebyshev_polynomial_u special_shifted_chebyshev_polynomial_v
        special_shifted_chebyshev_polynomial_w special_spherical_bessel_j0 special_zeta""",
    ),
)

_EXTRA_CPU: tuple[Group, ...] = (
    Group(Rule.LOWER, _WHY_RECURRENT, _RECURRENT),
    Group(
        Rule.LOWER,
        _WHY_LIKE_CUDA + WHY_MATMUL,
        "_convolution addmv addr chain_matmul convolution einsum linalg_multi_dot mv",
    ),
    Group(Rule.FLOAT32, _WHY_LIKE_CUDA + WHY_RANGE, POINTWISE),
    Group(Rule.FLOAT32, _WHY_LIKE_CUDA + WHY_NORM, NORMALIZATIONS + " rms_norm"),
    Group(
        Rule.FLOAT32,
        _WHY_LIKE_CUDA + WHY_SQUARES,
        "cosine_similarity dist frobenius_norm.dim logsumexp nuclear_norm nuclear_norm.dim pdist renorm",
    ),
    Group(Rule.FLOAT32, _WHY_LIKE_CUDA + WHY_SCATTER, UPSAMPLING),
    Group(
        Rule.FLOAT32_DTYPE_ARG,
        _WHY_LIKE_CUDA + WHY_REDUCTION,
        """
        cumsum linalg_matrix_norm linalg_matrix_norm.str_ord linalg_vector_norm log_softmax.int
        norm.Scalar norm.ScalarOpt_dim softmax.int sum sum.dim_IntList""",
    ),
    Group(Rule.FLOAT32_DTYPE_ARG, _WHY_LIKE_CUDA + WHY_REDUCTION, "cumprod", since=(2, 13)),
    _CUMPROD,
    Group(
        Rule.PROMOTE,
        _WHY_LIKE_CUDA + WHY_MIXED,
        "addcdiv addcmul atan2 bilinear cross dot index_put scatter_add tensordot vdot",
    ),
    *_EVERYWHERE,
)
_ANY_ACCELERATOR: tuple[Group, ...] = (
    Group(
        Rule.LOWER,
        _WHY_RECURRENT,
        """
        gru.data gru.input lstm.data lstm.input rnn_relu.data rnn_relu.input rnn_tanh.data rnn_tanh.input""",
    ),
    Group(Rule.LOWER, _WHY_FUSED, "_native_multi_head_attention"),
    *_NO_HALF_KERNEL,
    *_EVERYWHERE,
)
# torch lists this operator for CPU and CUDA only.
_SQUARE_ROOT = Group(Rule.FLOAT32, _WHY_LAPACK, "linalg_matrix_sqrth", since=(2, 14))

_EXTRA_CUDA: tuple[Group, ...] = (
    Group(Rule.FLOAT32, WHY_NORM, "rms_norm", until=(2, 12)),
    _CUMPROD,
    *_ANY_ACCELERATOR,
)
_EXTRA_ACCELERATOR: tuple[Group, ...] = (*_EXTRA_CUDA, _SQUARE_ROOT)
_EXTRA_MPS: tuple[Group, ...] = (
    Group(
        Rule.LOWER,
        _WHY_RECURRENT,
        """
        gru.data gru.input gru_cell lstm.data lstm.input rnn_relu.data rnn_relu.input rnn_relu_cell
        rnn_tanh.data rnn_tanh.input rnn_tanh_cell""",
    ),
    Group(Rule.LOWER, _WHY_FUSED, "_native_multi_head_attention"),
    Group(Rule.LOWER, _WHY_LIKE_CUDA + WHY_MATMUL, "linalg_vecdot"),
    Group(Rule.FLOAT32, _WHY_LIKE_CUDA + WHY_NORM, "rms_norm"),
    Group(Rule.FLOAT32, _WHY_LIKE_CUDA + WHY_SCATTER, UPSAMPLING),
    Group(Rule.FLOAT32, "unlisted by torch here, and too short of range in float16", "binary_cross_entropy"),
    Group(Rule.FLOAT32_DTYPE_ARG, _WHY_LIKE_CUDA + WHY_REDUCTION, "norm.Scalar norm.ScalarOpt_dim"),
    Group(Rule.PROMOTE, _WHY_LIKE_CUDA + WHY_MIXED, "vdot"),
    _SQUARE_ROOT,
    *_NO_HALF_KERNEL,
    *_EVERYWHERE,
)
_EXTRA_UNLISTED: tuple[Group, ...] = (
    *(group for group in ACCELERATOR if group.rule is not Rule.BANNED and group.since == (0, 0)),
    Group(Rule.FLOAT32, WHY_NORM, "rms_norm"),
    Group(
        Rule.FLOAT32, "too short of range in half precision; torch bans nothing on this device", "binary_cross_entropy"
    ),
    _SQUARE_ROOT,
    *_ANY_ACCELERATOR,
)

DEFAULT_EXTRA: dict[str, tuple[Group, ...]] = {
    "cpu": _EXTRA_CPU,
    "cuda": _EXTRA_CUDA,
    "mps": _EXTRA_MPS,
    "xpu": _EXTRA_ACCELERATOR,
    "mtia": _EXTRA_ACCELERATOR,
    "maia": _EXTRA_ACCELERATOR,
    "hpu": _EXTRA_UNLISTED,
    "ipu": _EXTRA_UNLISTED,
    "xla": _EXTRA_UNLISTED,
    "privateuseone": _EXTRA_UNLISTED,
}
