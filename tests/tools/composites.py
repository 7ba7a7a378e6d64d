"""Composite operators, which are written in terms of other operators, and whether autocast affects them.

A composite (an operator with a CompositeImplicitAutograd kernel) that is unlisted runs its own code with the region
active, as in torch.amp. If that code calls a listed operator, the region decides there: `einsum` ends in `bmm`,
`cross_entropy_loss` in `log_softmax.int` and `nll_loss`. Such composites are `DECOMPOSED`, and so are the doubtful
ones. `OPAQUE` are those that call no operator of any shipped list, on any device: a region changes nothing in them.

Every composite of every supported torch is in one of the two tables, except those that write to `out=`, which no
list names, and those of named dimensions, which end with torch 2.12. A test walks the registry and fails on a composite
that a new torch adds, for a decision whether a list should name it. Another test runs the opaque ones and checks that a
region changes nothing. An operator that is also on a list follows the list.
"""

from typing import NamedTuple

__all__ = ["DECOMPOSED", "OPAQUE", "Composite"]


class Composite(NamedTuple):
    """Composite operators that are alike, and why; names and version span as in `rules.Group`."""

    why: str
    ops: str
    since: tuple[int, int] = (0, 0)
    until: tuple[int, int] = (1000, 0)


OPAQUE: tuple[Composite, ...] = (
    Composite("asks about a tensor or changes its bookkeeping; computes no values", """
        _cufft_clear_plan_cache _cufft_get_plan_cache_max_size _cufft_get_plan_cache_size
        _cufft_set_plan_cache_max_size _debug_has_internal_overlap _has_compatible_shallow_copy_type
        _is_zerotensor _nnpack_available _propagate_xla_data _unpack_dual _use_cudnn_rnn_flatten_weight
        _version can_cast cudnn_is_acceptable data get_gradients is_complex is_conj is_distributed
        is_floating_point is_inference is_leaf is_neg is_nonzero is_signed is_vulkan_available item output_nr
        promote_types requires_grad_ result_type.Scalar result_type.Scalar_Scalar result_type.Scalar_Tensor
        result_type.Tensor retain_grad retains_grad set_.source_Tensor_storage_offset set_data size.int
        stride.int sym_is_contiguous sym_numel sym_size.int sym_storage_offset sym_stride.int"""),
    Composite("as above; operators since torch 2.12", """
        dim get_device is_contiguous is_contiguous.memory_format numel storage_offset""", since=(2, 12)),
    Composite("a view, or a copy where no view exists", """
        _add_batch_dim _remove_batch_dim _reshape_from_tensor adjoint atleast_1d atleast_1d.Sequence
        atleast_2d atleast_2d.Sequence atleast_3d atleast_3d.Sequence broadcast_tensors broadcast_to chunk
        conj conj_physical contiguous dsplit.array dsplit.int expand_as flatten.using_ints hsplit.array
        hsplit.int imag linalg_diagonal mH mT matrix_H meshgrid meshgrid.indexing moveaxis.int
        moveaxis.intlist movedim.int movedim.intlist narrow narrow.Tensor numpy_T pin_memory positive ravel
        real reshape reshape_as resolve_conj resolve_neg split.sizes swapaxes swapaxes_ swapdims swapdims_
        tensor_split.indices tensor_split.sections tensor_split.tensor_indices_or_sections unflatten.int
        unflatten_dense_tensors unsafe_chunk view_as vsplit.array vsplit.int"""),
    Composite("a change of dtype, device or layout: the operators that casts are made of", """
        _autocast_to_full_precision _autocast_to_reduced_precision _cast_Byte _cast_Char _cast_Double
        _cast_Float _cast_Half _cast_Int _cast_Long _cast_Short _to_cpu chalf coalesce to.device to.dtype
        to.dtype_layout to.other to_dense to_sparse to_sparse.sparse_dim to_sparse_bsc to_sparse_bsr
        to_sparse_csc to_sparse_csr type_as"""),
    Composite("a factory", """
        _dim_arange _shape_as_tensor"""),
    Composite("sparse tensors from their parts, and checks of those parts", """
        _sparse_bsc_tensor_unsafe _sparse_bsr_tensor_unsafe _sparse_compressed_tensor_unsafe
        _sparse_coo_tensor_unsafe _sparse_csc_tensor_unsafe _sparse_csr_tensor_unsafe
        _validate_sparse_bsc_tensor_args _validate_sparse_bsr_tensor_args
        _validate_sparse_compressed_tensor_args _validate_sparse_coo_tensor_args
        _validate_sparse_csc_tensor_args _validate_sparse_csr_tensor_args sparse_bsc_tensor.ccol_row_value
        sparse_bsc_tensor.ccol_row_value_size sparse_bsr_tensor.crow_col_value
        sparse_bsr_tensor.crow_col_value_size sparse_csc_tensor.ccol_row_value
        sparse_csc_tensor.ccol_row_value_size sparse_csr_tensor.crow_col_value
        sparse_csr_tensor.crow_col_value_size"""),
    Composite("another name of an arithmetic operator", """
        absolute absolute_ clip clip.Tensor clip_ clip_.Tensor divide.Scalar divide.Scalar_mode divide.Tensor
        divide.Tensor_mode divide_.Scalar divide_.Scalar_mode divide_.Tensor divide_.Tensor_mode fix fix_
        multiply.Scalar multiply.Tensor multiply_.Scalar multiply_.Tensor negative negative_ subtract.Scalar
        subtract.Tensor subtract_.Scalar subtract_.Tensor true_divide.Scalar true_divide.Tensor
        true_divide_.Scalar true_divide_.Tensor"""),
    Composite("a comparison or a bitwise operation: its result has no dtype to choose", """
        __and__.Scalar __and__.Tensor __iand__.Scalar __iand__.Tensor __ior__.Scalar __ior__.Tensor
        __ixor__.Scalar __ixor__.Tensor __or__.Scalar __or__.Tensor __xor__.Scalar __xor__.Tensor
        greater.Scalar greater.Tensor greater_.Scalar greater_.Tensor greater_equal.Scalar
        greater_equal.Tensor greater_equal_.Scalar greater_equal_.Tensor isfinite isreal less.Scalar
        less.Tensor less_.Scalar less_.Tensor less_equal.Scalar less_equal.Tensor less_equal_.Scalar
        less_equal_.Tensor not_equal.Scalar not_equal.Tensor not_equal_.Scalar not_equal_.Tensor"""),
    Composite("chooses, repeats or orders elements", """
        argsort argsort.stable fliplr flipud msort repeat_interleave.self_Tensor repeat_interleave.self_int
        take_along_dim where where.Scalar where.ScalarOther where.ScalarSelf"""),
    Composite("dropout scales and masks; the mask has the input's dtype", """
        alpha_dropout alpha_dropout_ dropout dropout_ feature_alpha_dropout feature_alpha_dropout_
        feature_dropout feature_dropout_"""),
    Composite("an activation that forwards to one kernel", """
        log_sigmoid relu6 relu6_ rrelu rrelu_ selu selu_"""),
    Composite("pooling that forwards to one kernel", """
        adaptive_avg_pool1d adaptive_avg_pool2d adaptive_max_pool1d avg_pool1d max_pool1d
        max_pool1d_with_indices max_pool2d"""),
    Composite("sums rows of a table in one kernel", "embedding_bag embedding_bag.padding_idx"),
    Composite("moments: one kernel that accumulates in float32", """
        std std.dim std_mean std_mean.dim var var.dim var_mean var_mean.dim"""),
    Composite("normalises over a batch in one kernel", "_batch_norm_impl_index batch_norm"),
    Composite("an outer product is one broadcast multiplication", "ger outer"),
)


DECOMPOSED: tuple[Composite, ...] = (
    Composite("matrix products and convolutions, on a device whose list does not name them", """
        _convolution.deprecated _convolution_mode _scaled_dot_product_attention_math bilinear chain_matmul
        conv1d conv1d.padding conv2d conv2d.padding conv3d conv3d.padding conv_transpose1d
        conv_transpose2d.input conv_transpose3d.input einsum inner kron linalg_matmul linalg_matrix_power
        linalg_multi_dot linalg_vecdot linear matmul matrix_power prelu scaled_dot_product_attention
        slow_conv3d tensordot thnn_conv2d"""),
    Composite("recurrent layers: matrix products and gates, or one fused kernel", """
        gru.data gru.input gru_cell lstm.data lstm.input lstm_cell rnn_relu.data rnn_relu.input rnn_relu_cell
        rnn_tanh.data rnn_tanh.input rnn_tanh_cell"""),
    Composite("softmax, plain and logarithmic", """
        log_softmax.int softmax.int special_log_softmax special_softmax"""),
    Composite("losses: a reduction over pointwise functions", """
        cosine_embedding_loss cross_entropy_loss ctc_loss.IntList ctc_loss.Tensor hinge_embedding_loss kl_div
        l1_loss margin_ranking_loss multilabel_margin_loss nll_loss nll_loss2d nll_loss_nd poisson_nll_loss
        triplet_margin_loss"""),
    Composite("norms, normalisations and distances", """
        _fused_rms_norm _weight_norm cdist cosine_similarity frobenius_norm.dim group_norm instance_norm
        layer_norm linalg_matrix_norm linalg_matrix_norm.str_ord linalg_norm linalg_norm.ord_str
        norm_except_dim nuclear_norm nuclear_norm.dim pairwise_distance pdist rms_norm"""),
    Composite("linear algebra: one or more factorisations", """
        _lu_with_info det inverse linalg_cholesky linalg_cond linalg_cond.p_str linalg_det linalg_eigh
        linalg_eigvals linalg_eigvalsh linalg_inv linalg_ldl_factor linalg_lu_factor linalg_matrix_rank
        linalg_matrix_rank.atol_rtol_float linalg_matrix_rank.atol_rtol_tensor linalg_matrix_rank.tol_tensor
        linalg_pinv linalg_pinv.atol_rtol_float linalg_pinv.rcond_tensor linalg_slogdet linalg_solve
        linalg_solve_ex linalg_svd linalg_svdvals linalg_tensorinv linalg_tensorsolve linalg_vander logdet
        lu_solve matrix_exp orgqr pinverse slogdet svd vander"""),
    Composite("a factorisation under its old name; before torch 2.14", "qr", until=(2, 14)),
    Composite("Fourier transforms and what is built on them", """
        fft_fft fft_fft2 fft_fftn fft_fftshift fft_hfft fft_hfft2 fft_hfftn fft_ifft fft_ifft2 fft_ifftn
        fft_ifftshift fft_ihfft fft_ihfft2 fft_ihfftn fft_irfft fft_irfft2 fft_irfftn fft_rfft fft_rfft2
        fft_rfftn istft stft stft.center"""),
    Composite("another name of a pointwise function, which some list names", """
        arccos arccos_ arccosh arccosh_ arcsin arcsin_ arcsinh arcsinh_ arctan arctan2 arctan2_ arctan_
        arctanh arctanh_ float_power.Scalar float_power.Tensor_Scalar float_power.Tensor_Tensor
        float_power_.Scalar float_power_.Tensor special_digamma special_erf special_erfc special_erfinv
        special_exp2 special_expit special_expm1 special_gammainc special_gammaincc special_gammaln special_i0
        special_log1p special_logit special_logsumexp special_multigammaln special_ndtr special_polygamma
        special_psi special_round special_sinc special_xlogy special_xlogy.other_scalar
        special_xlogy.self_scalar square square_"""),
    Composite("statistics, integrals and differences: sums, sorts and products", """
        cartesian_prod combinations corrcoef cov cross cumulative_trapezoid.dx cumulative_trapezoid.x diff
        gradient.array gradient.scalararray gradient.scalarint gradient.scalarrayarray gradient.scalarrayint
        gradient.tensorarray gradient.tensorarrayint histogramdd histogramdd.TensorList_bins
        histogramdd.int_bins isclose nanmean nanquantile nanquantile.scalar quantile quantile.scalar
        sum_to_size trapezoid.dx trapezoid.x trapz.dx trapz.x"""),
    Composite("arranges elements with several operators, `cat` and `stack` among them", """
        _pack_padded_sequence_backward _pad_packed_sequence argwhere column_stack concat concatenate diag
        diagflat dstack fill_diagonal_ flatten_dense_tensors hstack max.other min.other native_channel_shuffle
        nonzero_numpy one_hot pad_sequence row_stack tile vstack"""),
    Composite("resamples, or pools in three dimensions", """
        _upsample_bicubic2d_aa.vec _upsample_bilinear2d_aa.vec _upsample_nearest_exact1d.vec
        _upsample_nearest_exact2d.vec _upsample_nearest_exact3d.vec adaptive_avg_pool3d grid_sampler
        max_pool3d upsample_bicubic2d.vec upsample_bilinear2d.vec upsample_linear1d.vec upsample_nearest1d.vec
        upsample_nearest2d.vec upsample_nearest3d.vec upsample_trilinear3d.vec"""),
    Composite("resamples; since torch 2.12", "_upsample_lanczos2d_aa.vec", since=(2, 12)),
    Composite("pads; the reflecting and replicating kinds are listed", "_pad_circular _pad_enum pad"),
    Composite("sparse operators: products, sums and softmax on values", """
        _sparse_log_softmax.int _sparse_mm _sparse_mm.reduce _sparse_softmax.int _sparse_sum
        _sparse_sum.dim_dtype _sparse_sum.dtype smm sparse_coo_tensor.indices sparse_coo_tensor.indices_size
        sspaddmm"""),
    Composite("nested tensors: pads by copying", "nested_to_padded_tensor"),
    Composite("quantisation, real and simulated", """
        _choose_qparams_per_tensor _rowwise_prune _saturate_weight_to_fp16 _wrapped_linear_prepack
        _wrapped_quantized_linear_prepacked choose_qparams_optimized fake_quantize_per_channel_affine
        fake_quantize_per_channel_affine_cachemask_backward fake_quantize_per_tensor_affine
        fake_quantize_per_tensor_affine.tensor_qparams fake_quantize_per_tensor_affine_cachemask_backward
        fbgemm_linear_fp16_weight fbgemm_linear_fp16_weight_fp32_activation fbgemm_linear_int8_weight
        fbgemm_linear_int8_weight_fp32_activation fbgemm_linear_quantize_weight fbgemm_pack_gemm_matrix_fp16
        fbgemm_pack_quantized_matrix fbgemm_pack_quantized_matrix.KN fused_moving_avg_obs_fake_quant
        quantized_gru_cell quantized_lstm_cell quantized_rnn_relu_cell quantized_rnn_tanh_cell"""),
    Composite("derivative formulas written with other operators, or all of them", """
        _backward _batch_norm_impl_index_backward _convolution_double_backward _embedding_bag_sparse_backward
        _gather_sparse_backward _thnn_differentiable_gru_cell_backward _thnn_differentiable_lstm_cell_backward
        _thnn_fused_lstm_cell_backward _weight_norm_differentiable_backward affine_grid_generator_backward
        conv_tbc_backward cummaxmin_backward cumprod_backward embedding_backward embedding_sparse_backward
        gather_backward index_select_backward infinitely_differentiable_gelu_backward masked_select_backward
        matrix_exp_backward mish_backward silu_backward to_dense_backward to_mkldnn_backward trace_backward
        value_selecting_reduction_backward"""),
    Composite("as above; before torch 2.12", "_grid_sampler_2d_cpu_fallback_backward", until=(2, 12)),
    Composite("quasi-random sequences", """
        _sobol_engine_draw _sobol_engine_ff_ _sobol_engine_initialize_state_ _sobol_engine_scramble_"""),
    Composite("torch's own test fixtures", """
        _test_ambiguous_defaults.a _test_ambiguous_defaults.b _test_autograd_multiple_dispatch.ntonly
        _test_check_tensor _test_serialization_subcmul _test_string_default"""),
    Composite("named tensors, gone from torch 2.13", "align_as align_tensors", until=(2, 13)),
)
