// Matrix products by the libraries that the build found, for blocked_attention.
#pragma once

#include <focus/tensor_view.hpp>

#include "blocked_attention.hpp"
#if FOCUS_BENCH_OPENBLAS
#include <cblas.h>
#endif
#if FOCUS_BENCH_EIGEN
#include <Eigen/Core>
#endif
#if FOCUS_BENCH_ONEDNN
#include <oneapi/dnnl/dnnl.h>
#endif

namespace bench {

#if FOCUS_BENCH_OPENBLAS
struct openblas_products {
  static void transposed(float alpha, const block& a, const block& b, float* c, index_t c_stride) {
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, size(a.rows), size(b.rows),
                size(a.columns), alpha, a.data, size(a.stride), b.data, size(b.stride), 0.0f, c,
                size(c_stride));
  }
  static void add(const block& a, const block& b, float* c) {
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, size(a.rows), size(b.columns),
                size(a.columns), 1.0f, a.data, size(a.stride), b.data, size(b.stride), 1.0f, c,
                size(b.columns));
  }

 private:
  static blasint size(index_t n) { return static_cast<blasint>(n); }
};
#endif

#if FOCUS_BENCH_EIGEN
struct eigen_products {
  using matrix = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
  template <class M>
  using strided = Eigen::Map<M, Eigen::Unaligned, Eigen::OuterStride<>>;

  static void transposed(float alpha, const block& a, const block& b, float* c, index_t c_stride) {
    strided<matrix>(c, a.rows, b.rows, Eigen::OuterStride<>(c_stride)).noalias() =
        alpha * view(a) * view(b).transpose();
  }
  static void add(const block& a, const block& b, float* c) {
    Eigen::Map<matrix>(c, a.rows, b.columns).noalias() += view(a) * view(b);
  }

 private:
  static strided<const matrix> view(const block& x) {
    return {x.data, x.rows, x.columns, Eigen::OuterStride<>(x.stride)};
  }
};
#endif

#if FOCUS_BENCH_ONEDNN
struct onednn_products {
  static void transposed(float alpha, const block& a, const block& b, float* c, index_t c_stride) {
    dnnl_sgemm('N', 'T', a.rows, b.rows, a.columns, alpha, a.data, a.stride, b.data, b.stride, 0.0f,
               c, c_stride);
  }
  static void add(const block& a, const block& b, float* c) {
    dnnl_sgemm('N', 'N', a.rows, b.columns, a.columns, 1.0f, a.data, a.stride, b.data, b.stride,
               1.0f, c, b.columns);
  }
};
#endif

}  // namespace bench
