// Routing on a CPU: choosing the experts of each token, and sorting pairs by expert.
//
// T tokens, E experts, K experts per token, N (token, expert) pairs

#pragma once

#include <utility>

#include "passes.h"

namespace moe_ffn {

// Whether a score is before another; NaN is before all, as in torch.topk.
inline bool before(float a, float b) { return a > b || (a != a && b == b); }

// (T, K): the experts with the largest scores (T, E), the largest first; of equal ones the first.
inline Tensor top_k(const Tensor& scores, int64_t k) {
  const int64_t T = scores.size(0), E = scores.size(1);
  TORCH_CHECK(0 <= k && k <= E, "top ", k, " of ", E);
  const Tensor rows = scores.contiguous(), ids = at::empty({T, k}, scores.options().dtype(at::kLong));
  constexpr int64_t ROWS = 256;  // that are one task
  const float* from = rows.const_data_ptr<float>();
  int64_t* to = ids.data_ptr<int64_t>();
  for_each(k ? (T + ROWS - 1) / ROWS : 0, [&](int64_t task) {
    float* best = scratch<float>(0, k);
    for (int64_t t = task * ROWS; t < std::min(T, (task + 1) * ROWS); ++t) {
      const float* row = from + t * E;
      int64_t *chosen = to + t * k, count = 0;
      for (int64_t e = 0; e < E; ++e) {
        if (count == k && !before(row[e], best[k - 1])) continue;
        int64_t place = count < k ? count++ : k - 1;
        for (; place && before(row[e], best[place - 1]); --place)
          best[place] = best[place - 1], chosen[place] = chosen[place - 1];
        best[place] = row[e], chosen[place] = e;
      }
    }
  });
  return ids;
}

// The order that sorts ids from 0 to `num_experts`, of equal ones the first before, and where each expert's
// end.
inline std::tuple<Tensor, Tensor> sort_by_expert(const Tensor& expert_ids, int64_t num_experts) {
  const int64_t N = expert_ids.size(0), B = num_experts + 1;
  const Tensor ids = expert_ids.contiguous(), order = at::empty({N}, expert_ids.options());
  const Tensor offsets = at::empty({num_experts}, expert_ids.options().dtype(at::kInt));
  const int64_t* id = ids.const_data_ptr<int64_t>();
  TORCH_CHECK(std::all_of(id, id + N, [&](int64_t e) { return 0 <= e && e < B; }),
              "an id of an expert is none of 0 to ", num_experts);
  // Every part counts its own, and then writes behind those of the parts before.
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
