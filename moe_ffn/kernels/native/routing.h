// Routing on a CPU: logits, top-k, and the sort of pairs by expert.
//
// T tokens, D model width, E experts, K experts per token, N (token, expert) pairs

#pragma once

#include <utility>

#include "passes.h"

namespace moe_ffn {

constexpr int64_t TOKENS = 64;         // tokens per task of the logits
constexpr int64_t TOKENS_ADDED = 256;  // tokens per product of the gradient of the matrix

// Return (T, E): tokens of any type times the transpose of a float32 matrix (E, D), in float32. Only a few
// tokens are converted at a time.
inline Tensor float32_linear(const Tensor& x, const Tensor& weight) {
  TORCH_CHECK(x.dim() == 2 && weight.dim() == 2 && weight.size(1) == x.size(1), "x is ", x.sizes(),
              ", but the router's matrix ", weight.sizes());
  const int64_t T = x.size(0), D = x.size(1), E = weight.size(0);
  const Tensor tokens = x.contiguous(), columns = weight.t().contiguous(),
               out = at::empty({T, E}, weight.options());
  const Rows from(tokens);
  const float* matrix = columns.const_data_ptr<float>();
  float* to = out.data_ptr<float>();
  const int64_t ld = padded_stride<float>(D);
  for_each((T + TOKENS - 1) / TOKENS, [&](int64_t task) {
    const int64_t start = task * TOKENS, m = std::min(TOKENS, T - start);
    float* numbers = scratch<float>(0, TOKENS * ld);
    for (int64_t r = 0; r < m; ++r) from.copy(start + r, numbers + r * ld);
    for (int64_t first = 0; first < E; first += PANEL)
      for (int64_t k = 0; k < D; k += MAX_SUM)
        product(m, std::min(PANEL, E - first), std::min(MAX_SUM, D - k), numbers + k, ld,
                matrix + k * E + first, E, to + start * E + first, E, k > 0);
  });
  return out;
}

// Return the wanted gradients of `float32_linear`: of the tokens, in their type, and of the matrix.
inline std::tuple<Tensor, Tensor> float32_linear_backward(const Tensor& grad, const Tensor& x,
                                                       const Tensor& weight, bool wants_x, bool wants_weight) {
  TORCH_CHECK(x.dim() == 2 && weight.dim() == 2 && grad.dim() == 2, "x has ", x.dim(), " axes, the matrix ",
              weight.dim(), " and the gradient ", grad.dim(), ", but each must have 2");
  const int64_t T = x.size(0), D = x.size(1), E = weight.size(0);
  TORCH_CHECK(weight.size(1) == D && grad.size(0) == T && grad.size(1) == E, "x is ", x.sizes(),
              ", the router's matrix ", weight.sizes(), " and the gradient ", grad.sizes());
  const Tensor grads = grad.contiguous(), tokens = x.contiguous(), matrix = weight.contiguous();
  const Tensor grad_x = at::empty({wants_x ? T : 0, D}, x.options()),
               grad_weight = at::empty({wants_weight ? E : 0, D}, weight.options());
  const float *from = grads.const_data_ptr<float>(), *rows = matrix.const_data_ptr<float>();
  const Rows in(tokens), out(grad_x);
  const int64_t ld = padded_stride<float>(D);
  for_each(wants_x ? (T + TOKENS - 1) / TOKENS : 0, [&](int64_t task) {
    const int64_t start = task * TOKENS, m = std::min(TOKENS, T - start);
    float* sums = scratch<float>(0, TOKENS * ld);
    for (int64_t first = 0; first < D; first += PANEL)
      for (int64_t k = 0; k < E; k += MAX_SUM)
        product(m, std::min(PANEL, D - first), std::min(MAX_SUM, E - k), from + start * E + k, E,
                rows + k * D + first, D, sums + first, ld, k > 0);
    for (int64_t r = 0; r < m; ++r) out.write(start + r, sums + r * ld);
  });
  if (wants_weight && !T) grad_weight.zero_();
  // Tasks divide the columns of the matrix, so that tokens are summed in a fixed order.
  for_each(wants_weight ? panels(D) : 0, [&](int64_t panel) {
    const int64_t first = panel * PANEL, width = panel_width(D, panel);
    const int64_t stride = padded_stride<float>(TOKENS_ADDED);
    float *transposed = scratch<float>(0, E * stride), *numbers = scratch<float>(1, TOKENS_ADDED * PANEL);
    for (int64_t start = 0; start < T; start += TOKENS_ADDED) {
      const int64_t n = std::min(TOKENS_ADDED, T - start);
      transpose(from + start * E, E, transposed, stride, n, E);
      for (int64_t r = 0; r < n; ++r) in.copy(start + r, numbers + r * PANEL, first, width);
      product(E, width, n, transposed, stride, numbers, PANEL, grad_weight.data_ptr<float>() + first, D,
              start > 0);
    }
  });
  return {grad_x, grad_weight};
}

// Encode a score and its expert as an integer with the same order; among equal scores, a lower expert id is
// larger. NaN is largest, as in torch.topk.
inline int64_t key(float score, int64_t expert) {
  int32_t bits;
  score += 0.0f;  // -0 is 0
  std::memcpy(&bits, &score, sizeof(bits));
  const bool is_nan = score != score;
  const int32_t ordered = is_nan ? std::numeric_limits<int32_t>::max() : bits ^ (bits >> 31 & 0x7FFFFFFF);
  return int64_t(ordered) << 32 | (0xFFFFFFFF - expert);
}

// Return (T, K): the experts with the largest scores (T, E), in descending order of their keys.
inline Tensor top_k(const Tensor& scores, int64_t k) {
  const int64_t T = scores.size(0), E = scores.size(1);
  TORCH_CHECK(0 <= k && k <= E, "top ", k, " of ", E);
  const Tensor rows = scores.contiguous(), ids = at::empty({T, k}, scores.options().dtype(at::kLong));
  constexpr int64_t ROWS = 256;  // rows per task
  const float* from = rows.const_data_ptr<float>();
  int64_t* to = ids.data_ptr<int64_t>();
  for_each(k ? (T + ROWS - 1) / ROWS : 0, [&](int64_t task) {
    int64_t* keys = scratch<int64_t>(0, E);
    for (int64_t t = task * ROWS; t < std::min(T, (task + 1) * ROWS); ++t) {
      for (int64_t e = 0; e < E; ++e) keys[e] = key(from[t * E + e], e);
      for (int64_t i = 0; i < k; ++i) {
        int64_t best = keys[0];
        for (int64_t e = 1; e < E; ++e) best = std::max(best, keys[e]);
        const int64_t expert = 0xFFFFFFFF - (best & 0xFFFFFFFF);
        to[t * k + i] = expert;
        keys[expert] = std::numeric_limits<int64_t>::min();
      }
    }
  });
  return ids;
}

// Return the order of a stable sort of ids from 0 to `num_experts`, and the end of each expert's ids.
inline std::tuple<Tensor, Tensor> sort_by_expert(const Tensor& expert_ids, int64_t num_experts) {
  const int64_t N = expert_ids.size(0), B = num_experts + 1;
  const Tensor ids = expert_ids.contiguous(), order = at::empty({N}, expert_ids.options());
  const Tensor offsets = at::empty({num_experts}, expert_ids.options().dtype(at::kInt));
  const int64_t* id = ids.const_data_ptr<int64_t>();
  TORCH_CHECK(std::all_of(id, id + N, [&](int64_t e) { return 0 <= e && e < B; }),
              "expert ids must be from 0 to ", num_experts);
  // Each part counts its ids, and then writes behind the same ids of earlier parts.
  const int64_t parts = std::clamp<int64_t>(N / 32768, 1, at::get_num_threads());
  std::vector<int64_t> next(parts * B);
  auto each = [&](int64_t part, auto f) {
    for (int64_t n = part * N / parts; n < (part + 1) * N / parts; ++n) f(n, next[part * B + id[n]]);
  };
  for_each(parts, [&](int64_t part) { each(part, [](int64_t, int64_t& count) { ++count; }); });
  int64_t sum = 0;
  for (int64_t e = 0; e < B; ++e) {
    for (int64_t part = 0; part < parts; ++part) sum += std::exchange(next[part * B + e], sum);
    if (e < num_experts) offsets.data_ptr<int32_t>()[e] = sum;
  }
  int64_t* to = order.data_ptr<int64_t>();
  for_each(parts, [&](int64_t part) { each(part, [&](int64_t n, int64_t& place) { to[place++] = n; }); });
  return {order, offsets};
}

}  // namespace moe_ffn
