// What every thread of a machine with so many would be given in the backward pass, by the code that gives it.
#include <torch/library.h>

#include "backward.h"

namespace moe_ffn {

// Rows that each thread has of experts of its own, and the number of tasks of each loop over a group.
std::tuple<std::vector<int64_t>, std::vector<int64_t>> tasks(const Tensor& offsets, int64_t D, int64_t F,
                                                             int64_t threads) {
  at::set_num_threads(threads);
  const auto numbers = at::TensorOptions(at::kFloat);
  const int64_t E = offsets.size(0), N = E ? offsets.const_data_ptr<int32_t>()[E - 1] : 0;
  const Tensor x = at::empty({1, D}, numbers), up = at::empty({E, 2 * F, D}, numbers),
               down = at::empty({E, D, F}, numbers), weights = at::empty({N}, numbers),
               kept = at::empty({N, 2 * F}, numbers);
  Tensor token_ids = at::empty({N}, at::TensorOptions(at::kLong));
  std::fill_n(token_ids.data_ptr<int64_t>(), N, 0);
  const Layer layer(x, weights, up, down, {}, {}, {}, {}, {}, {}, token_ids, offsets, {},
                    int64_t(Activation::silu), true, false, 0, 0);
  const Gradients<float> gradients{.x = Rows(x), .up = Rows(up), .down = Rows(down), .weights = weights.data_ptr<float>()};
  const Backward<float> backward(layer, Rows(kept), Rows(x), gradients);
  std::vector<int64_t> rows(threads), counts;
  for (int64_t thread = 0, i = 0; thread < threads; ++thread)
    for (; i < backward.division.ends[thread]; ++i) rows[thread] += layer.load(backward.division.alone[i]);
  std::vector<Phase> phases;
  for (size_t i = 0; i < backward.division.groups.size(); ++i)
    backward.add_phases(backward.division.groups[i], backward.chunk_starts[i], phases);
  for (const Phase& phase : phases) counts.push_back(phase.n);
  for (const Group& group : backward.division.groups) {
    int64_t of_group = 0;
    for (const Tile& tile : group.tiles) of_group += tile.stop - tile.start;
    counts.push_back(of_group);
  }
  return {rows, counts};
}

}  // namespace moe_ffn

TORCH_LIBRARY(moe_ffn_tests, m) { m.def("tasks(Tensor offsets, int D, int F, int threads) -> (int[], int[])"); }
TORCH_LIBRARY_IMPL(moe_ffn_tests, CPU, m) { m.impl("tasks", moe_ffn::tasks); }
