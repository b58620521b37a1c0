// Attention of whole sequences in training, forward and backward, in float32.
//
// B batch, H query heads, K key and value heads, each for H / K query heads, S tokens, d head width

#pragma once

#include <cmath>

#include "passes.h"

namespace moe_ffn {

constexpr int64_t ROWS = 64;  // queries, or in the backward pass keys, whose scores are computed at a time

// Tensor (B, heads, S, d) in float32; the numbers of a row are consecutive.
struct Heads {
  Tensor owner;
  float* data;
  int64_t batch_stride, head_stride, stride;

  explicit Heads(const Tensor& t)
      : owner(t.stride(3) == 1 ? t : t.contiguous()),
        data(static_cast<float*>(owner.data_ptr())),
        batch_stride(owner.stride(0)),
        head_stride(owner.stride(1)),
        stride(owner.stride(2)) {}
  // Heads without numbers, of a shape. The memory has the order (B, S, heads, d), as a projection's output.
  static Heads empty(const Tensor& like) {
    return Heads(at::empty({like.size(0), like.size(2), like.size(1), like.size(3)}, like.options()).transpose(1, 2));
  }
  float* row(int64_t batch, int64_t head, int64_t row = 0) const {
    return data + batch * batch_stride + head * head_stride + row * stride;
  }
};

// Copy rows, times a factor.
inline void copy_rows(int64_t rows, int64_t width, const float* from, int64_t stride, float factor, float* to,
                      int64_t ld) {
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t i = 0; i < width; ++i) to[r * ld + i] = from[r * stride + i] * factor;
}

// C (M, N) = A (M, K) B (K, N), plus C if `adds`, for sums of any length.
inline void long_product(int64_t M, int64_t N, int64_t K, const float* A, int64_t lda, const float* B, float* C,
                         int64_t ldc, bool adds) {
  for (int64_t k = 0; k < K; k += MAX_SUM)
    product(M, N, std::min(MAX_SUM, K - k), A + k, lda, B + k * N, N, C, ldc, adds || k > 0);
}

inline float dot(const float* a, const float* b, int64_t n) {
  using V = Vectorized<float>;
  return at::vec::map2_reduce_all<float>([](V a, V b) { return a * b; }, [](V a, V b) { return a + b; }, a, b, n);
}

// Replace n scores by their exponentials, divided by that of the largest; return the largest and their sum.
inline std::pair<float, float> exponentials(float* scores, int64_t n) {
  using V = Vectorized<float>;
  const float largest =
      at::vec::reduce_all<float>([](V a, V b) { return at::vec::maximum(a, b); }, scores, n);
  at::vec::map([&](V x) { return (x - V(largest)).exp_u20(); }, scores, scores, n);
  return {largest, at::vec::reduce_all<float>([](V a, V b) { return a + b; }, scores, n)};
}

// Return softmax(scale q k^T) v, (B, H, S, d), and the logarithm of each query's sum of exponentials, (B, H, S).
inline std::tuple<Tensor, Tensor> attention(const Tensor& query, const Tensor& key, const Tensor& value,
                                            bool is_causal, double scale) {
  const int64_t B = query.size(0), H = query.size(1), S = query.size(2), d = query.size(3),
                ld = padded_stride<float>(S);
  const Heads q(query), k(key), v(value), out = Heads::empty(query);
  const Tensor log_sums = at::empty({B, H, S}, query.options());
  for_each(B * H, [&](int64_t task) {
    const int64_t b = task / H, h = task % H, kv = h / (H / key.size(1));
    float *keys = scratch<float>(0, d * ld), *values = scratch<float>(1, S * d),
          *queries = scratch<float>(2, ROWS * d), *scores = scratch<float>(3, ROWS * ld);
    transpose(k.row(b, kv), k.stride, keys, ld, S, d);
    copy_rows(S, d, v.row(b, kv), v.stride, 1, values, d);
    for (int64_t start = 0; start < S; start += ROWS) {
      const int64_t m = std::min(ROWS, S - start), n = is_causal ? start + m : S;
      copy_rows(m, d, q.row(b, h, start), q.stride, scale, queries, d);
      product(m, n, d, queries, d, keys, ld, scores, ld, false);
      float sums[ROWS];
      for (int64_t r = 0; r < m; ++r) {
        const int64_t seen = is_causal ? start + r + 1 : n;
        const auto [largest, sum] = exponentials(scores + r * ld, seen);
        std::fill(scores + r * ld + seen, scores + r * ld + n, 0.0f);
        log_sums.data_ptr<float>()[task * S + start + r] = largest + std::log(sum);
        sums[r] = sum;
      }
      float* to = out.row(b, h, start);
      long_product(m, d, n, scores, ld, values, to, out.stride, false);
      for (int64_t r = 0; r < m; ++r) copy_rows(1, d, to + r * out.stride, 0, 1 / sums[r], to + r * out.stride, 0);
    }
  });
  return {out.owner, log_sums};
}

// Return the gradients of q, k and v. Scores are computed again, transposed: one row for each key.
inline std::tuple<Tensor, Tensor, Tensor> attention_backward(const Tensor& grad, const Tensor& query,
                                                             const Tensor& key, const Tensor& value,
                                                             const Tensor& result, const Tensor& log_sums,
                                                             bool is_causal, double scale) {
  using V = Vectorized<float>;
  const int64_t B = query.size(0), H = query.size(1), K = key.size(1), S = query.size(2), d = query.size(3),
                ld = padded_stride<float>(S), ld_rows = padded_stride<float>(ROWS);
  const Heads q(query), k(key), v(value), out(result), grad_out(grad);
  const Heads grad_q = Heads::empty(query), grad_k = Heads::empty(key), grad_v = Heads::empty(value);
  for_each(B * K, [&](int64_t task) {
    const int64_t b = task / K, kv = task % K;
    float *keys = scratch<float>(0, S * d), *queries = scratch<float>(1, S * d), *queries_t = scratch<float>(2, d * ld),
          *grads = scratch<float>(3, S * d), *grads_t = scratch<float>(4, d * ld),
          *weights = scratch<float>(5, ROWS * ld), *grad_scores = scratch<float>(6, ROWS * ld),
          *grad_scores_t = scratch<float>(7, S * ld_rows), *sums = scratch<float>(8, S * d),
          *dots = scratch<float>(9, ld), *logs = scratch<float>(10, ld);
    copy_rows(S, d, k.row(b, kv), k.stride, 1, keys, d);
    for (int64_t h = kv * (H / K); h < (kv + 1) * (H / K); ++h) {
      const bool adds = h > kv * (H / K);
      copy_rows(S, d, q.row(b, h), q.stride, scale, queries, d);
      copy_rows(S, d, grad_out.row(b, h), grad_out.stride, 1, grads, d);
      transpose(queries, d, queries_t, ld, S, d);
      transpose(grads, d, grads_t, ld, S, d);
      std::memcpy(logs, log_sums.const_data_ptr<float>() + (b * H + h) * S, S * sizeof(float));
      for (int64_t r = 0; r < S; ++r) dots[r] = dot(grads + r * d, out.row(b, h, r), d);
      for (int64_t start = 0; start < S; start += ROWS) {
        const int64_t m = std::min(ROWS, S - start), first = is_causal ? start : 0, n = S - first;
        product(m, n, d, keys + start * d, d, queries_t + first, ld, weights, ld, false);
        product(m, n, d, v.row(b, kv, start), v.stride, grads_t + first, ld, grad_scores, ld, false);
        for (int64_t r = 0; r < m; ++r) {
          float *weight = weights + r * ld, *grad_score = grad_scores + r * ld;
          at::vec::map2([](V x, V log) { return (x - log).exp_u20(); }, weight, weight, logs + first, n);
          if (is_causal) std::fill_n(weight, r, 0.0f);  // earlier queries do not see the key
          at::vec::map3([](V g, V dot, V w) { return w * (g - dot); }, grad_score, grad_score, dots + first, weight, n);
        }
        long_product(m, d, n, weights, ld, grads + first * d, grad_v.row(b, kv, start), grad_v.stride, adds);
        long_product(m, d, n, grad_scores, ld, queries + first * d, grad_k.row(b, kv, start), grad_k.stride, adds);
        transpose(grad_scores, ld, grad_scores_t, ld_rows, m, n);
        for (int64_t r = 0; r < n; r += ROWS)
          product(std::min(ROWS, n - r), d, m, grad_scores_t + r * ld_rows, ld_rows, keys + start * d, d,
                  sums + (first + r) * d, d, start > 0);
      }
      copy_rows(S, d, sums, d, scale, grad_q.row(b, h), grad_q.stride);
    }
  });
  return {grad_q.owner, grad_k.owner, grad_v.owner};
}

}  // namespace moe_ffn
