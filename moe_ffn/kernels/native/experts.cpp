// The operators that compute the experts of a plan on a CPU, forward and backward, and those of the headers
// attention.h, newton_schulz.h and routing.h.
//
// T tokens, D model width, E experts, F hidden width, H rows of the first matrix (F, or 2 F with a gate), N
// rows of the plan: one per (token, expert) pair, sorted by expert.
//
// Rows are processed in tiles of one expert, which stay in a core's L2 cache from the gather to the last
// product. Unless an expert has few rows, its matrices are copied once per pass into the order in which
// products read them. One thread computes an expert alone if it can, which makes good use of its caches. All
// threads compute the other experts together, group by group. In the backward pass, tiles store their operands,
// and then threads compute blocks of the gradients of matrices, so no thread waits even if loads are unequal.
// The order of all sums, and so every bit of the result, is independent of the number of threads.

#include <torch/library.h>

#include "attention.h"
#include "backward.h"
#include "newton_schulz.h"
#include "routing.h"

namespace moe_ffn {
namespace {

// -- experts with few rows, as when decoding one token at a time

// Load a vector of numbers and convert it to the type of sums.
template <class S, class From>
inline Vectorized<S> load_as(const From* from, int64_t count) {
  using V = Vectorized<S>;
  if constexpr (std::is_same_v<From, S>) {
    return count == V::size() ? V::loadu(from) : V::loadu(from, count);
  } else {
    if constexpr (std::is_same_v<S, float> && std::is_same_v<From, BFloat16>) {
      if (count == V::size()) {
        V loaded;
        at::vec::load_fp32_from_bf16(from, loaded);
        return loaded;
      }
    }
    S numbers[V::size()] = {};
    for (int64_t i = 0; i < count; ++i) numbers[i] = S(from[i]);
    return V::loadu(numbers);
  }
}

// Compute the dot products of one row of a matrix with R rows of stride `ld`, with several partial sums,
// because each addition waits for the previous one.
template <int R, class S, class From>
inline void dots(const From* matrix_row, const S* rows, int64_t ld, int64_t n, S* out, int64_t ld_out) {
  using V = Vectorized<S>;
  constexpr int CHAINS = R == 1 ? 4 : R == 2 ? 2 : 1;
  V sums[CHAINS][R];
  for (auto& chain : sums)
    for (V& sum : chain) sum = V(0);
  int64_t i = 0;
  for (; i + CHAINS * V::size() <= n; i += CHAINS * V::size())
    for (int c = 0; c < CHAINS; ++c) {
      const int64_t at = i + c * V::size();
      const V weight = load_as<S>(matrix_row + at, V::size());
      for (int r = 0; r < R; ++r) sums[c][r] = at::vec::fmadd(weight, V::loadu(rows + r * ld + at), sums[c][r]);
    }
  for (; i < n; i += V::size()) {
    const int64_t count = std::min<int64_t>(V::size(), n - i);
    const V weight = load_as<S>(matrix_row + i, count);
    for (int r = 0; r < R; ++r)
      sums[0][r] = at::vec::fmadd(weight, load_as<S>(rows + r * ld + i, count), sums[0][r]);
  }
  for (int r = 0; r < R; ++r) {
    for (int c = 1; c < CHAINS; ++c) sums[0][r] = sums[0][r] + sums[c][r];
    out[r * ld_out] = at::vec::vec_reduce_all([](V a, V b) { return a + b; }, sums[0][r]);
  }
}

// Multiply rows (m, n) by one row of a matrix, which is converted first unless it is bfloat16 for float32 sums.
template <class S>
inline void times_row(const Rows& matrix, int64_t row, const S* rows, int64_t m, S* out, int64_t ld_out) {
  const int64_t n = matrix.width;
  auto times = [&](const auto* numbers) {
    int64_t r = 0;
    for (; r + 4 <= m; r += 4) dots<4>(numbers, rows + r * n, n, n, out + r * ld_out, ld_out);
    for (; r + 2 <= m; r += 2) dots<2>(numbers, rows + r * n, n, n, out + r * ld_out, ld_out);
    if (r < m) dots<1>(numbers, rows + r * n, n, n, out + r * ld_out, ld_out);
  };
  if constexpr (std::is_same_v<S, float>)
    if (matrix.dtype == at::kBFloat16) return times(matrix.row<BFloat16>(row));
  times(matrix.read(row, scratch<S>(1, n)));
}

template <class S>
void forward_few_rows(const Layer& layer, const Rows& y) {
  const int64_t D = layer.D, F = layer.F, H = layer.H, N = layer.N;
  constexpr int64_t ROWS = 32;  // rows of a matrix per task
  std::vector<S> x(N * D), up(N * H), hidden(N * F), sums(N * D);
  for (int64_t n = 0; n < N; ++n) {
    const S* row = layer.x.read(layer.token_ids[n], x.data() + n * D);
    if (row != x.data() + n * D) std::copy_n(row, D, x.data() + n * D);
  }
  auto linear = [&](const Rows& matrix, const Rows& bias, int64_t rows, const S* from, S* to) {
    const int64_t tasks = (rows + ROWS - 1) / ROWS;
    for_each(layer.nonempty.size() * tasks, [&](int64_t task) {
      const int64_t e = layer.nonempty[task / tasks], first = task % tasks * ROWS, start = layer.start(e),
                    m = layer.load(e);
      S* added = scratch<S>(0, rows);
      const S* biases = bias ? bias.read(e, added) : nullptr;
      for (int64_t i = first; i < std::min(rows, first + ROWS); ++i) {
        times_row(matrix, e * rows + i, from + start * matrix.width, m, to + start * rows + i, rows);
        if (biases)
          for (int64_t r = 0; r < m; ++r) to[(start + r) * rows + i] += biases[i];
      }
    });
  };
  std::vector<S> low, change;
  auto add_adapter = [&](const Factors& factors, int64_t rows, const S* from, S* to) {
    if (!factors.rank) return;
    low.resize(N * factors.rank), change.resize(N * rows);
    linear(factors.a, Rows(), factors.rank, from, low.data());
    linear(factors.b, Rows(), rows, low.data(), change.data());
    for (int64_t i = 0; i < N * rows; ++i) to[i] += change[i];
  };
  linear(layer.up, layer.up_bias, H, x.data(), up.data());
  add_adapter(layer.up_factors, H, x.data(), up.data());
  for (int64_t n = 0; n < N; ++n) layer.hidden_units(n, up.data() + n * H, hidden.data() + n * F);
  linear(layer.down, layer.down_bias, D, hidden.data(), sums.data());
  add_adapter(layer.down_factors, D, hidden.data(), sums.data());
  Rows rows;
  rows.data = sums.data(), rows.dtype = c10::CppTypeToScalarType<S>::value, rows.width = D;
  sum_per_token<S>(layer, rows, static_cast<const S*>(layer.weights), y);
}

// -- forward

template <class P>
struct Forward {
  using S = Sum<P>;
  using U = Unit<P>;

  const Layer& layer;
  const Rows kept, y;  // the first product (N, H), then A x of both adapters, if wanted; the result (T, D)
  const int64_t D = layer.D, F = layer.F, H = layer.H;
  Copies<P> copies;
  const int64_t up = copies.add(layer.up, H, true), down = copies.add(layer.down, D, true);
  // An adapter's copy of A, followed by that of B.
  const int64_t up_adapter = add_copies(layer.up_factors, H), down_adapter = add_copies(layer.down_factors, D);
  Tensor y_ND;
  const Rows rows_out = temporary<P>(layer.N, D, y_ND);

  int64_t add_copies(const Factors& factors, int64_t rows) {
    if (!factors.rank) return 0;
    const int64_t start = copies.add(factors.a, factors.rank, true);
    copies.add(factors.b, rows, true);
    return start;
  }

  void run() const {
    const int64_t bytes = copies.num_units * sizeof(U);
    const Division division = layer.divide(when(is_bitwise<P>(), bytes), bytes, 0);
    size_t max_parts = 0;
    for (const Group& group : division.groups) max_parts = std::max(max_parts, group.parts.size());
    const Tensor packed = at::empty({int64_t(max_parts), copies.num_units},
                                    at::TensorOptions(c10::CppTypeToScalarType<U>::value));
    const Rows matrices(packed);
    std::vector<Phase> phases;
    for (const Group& group : division.groups) {
      phases.push_back({int64_t(group.parts.size()) * copies.num_panels, [&](int64_t task) {
                          const int64_t i = task / copies.num_panels;
                          copy(group.parts[i].expert, task % copies.num_panels, matrices.row<U>(i));
                        }});
      phases.push_back({int64_t(group.tiles.size()), [&](int64_t task) {
                          const Tile& each = group.tiles[task];
                          tile(group.parts[each.part].expert, each.start, each.stop,
                               matrices.row<U>(each.part));
                        }});
    }
    compute(division, phases, [&](int64_t e) {
      U* matrix = scratch<U>(16, copies.num_units);
      for (int64_t panel = 0; panel < copies.num_panels; ++panel) copy(e, panel, matrix);
      const int64_t rows = Group::piece(layer.load(e), TILE), stop = layer.ends[e];
      for (int64_t start = layer.start(e); start < stop; start += rows)
        tile(e, start, std::min(stop, start + rows), matrix);
    });
    sum_per_token<S>(layer, rows_out, static_cast<const S*>(layer.weights), y);
  }

  // True if it is cheaper to transpose the rows of an expert than its matrices.
  bool transposes_rows(int64_t e) const {
    const auto own = c10::CppTypeToScalarType<P>::value;
    const bool is_in_place =
        layer.up.dtype == own && layer.down.dtype == own && padded<P>(D) == D && padded<P>(F) == F;
    return is_bitwise<P>() && is_in_place && MOE_FFN_ROW_COST * layer.load(e) * (2 * D + H + F) < H * D + D * F;
  }

  // C = A times the transpose of a matrix with `rows` rows.
  void times_matrix(int64_t e, const Rows& from, int64_t rows, int64_t m, const P* A, const U* copy,
                    const Sums<S>& C) const {
    if (transposes_rows(e))
      multiply_transposed<P>(m, rows, from.width, A, from.row<P>(e * rows), C.data, C.ld);
    else
      multiply<P>(m, rows, from.width, A, copy, C.data, C.ld);
  }

  [[gnu::noinline]] void copy(int64_t e, int64_t panel, U* to) const {
    copies.copy(e, panel, transposes_rows(e) ? 2 : 0, to);
  }

  // Add the product of the rows (m, K) from `start` on with an adapter, B (A x), to C (m, N). Keep A x in the
  // columns from `column` on.
  void add_adapter(const Factors& factors, int64_t start, int64_t m, int64_t N, int64_t K, const P* rows,
                   const U* copy, const Sums<S>& C, int64_t column) const {
    const int64_t rank = factors.rank;
    if (!rank) return;
    const P* low = to_operand<P>(m, rank, 8, [&](S* sums, int64_t ld) { multiply<P>(m, rank, K, rows, copy, sums, ld); });
    for (int64_t r = 0; kept && r < m; ++r) kept.write(start + r, low + r * padded_stride<P>(rank), column, rank);
    multiply<P>(m, N, rank, low, copy + panels(rank) * PANEL * units<P>(K), C.data, C.ld, true);
  }

  [[gnu::noinline]] void tile(int64_t e, int64_t start, int64_t stop, const U* matrix) const {
    const int64_t m = stop - start;
    P *x = scratch<P>(0, (TILE + 1) * padded_stride<P>(D)), *hidden = scratch<P>(1, TILE * padded_stride<P>(F));
    S *buffer = scratch<S>(2, TILE * padded_stride<S>(std::max(H, D))), *value = scratch<S>(4, F);
    S* bias = scratch<S>(5, std::max(H, D));
    // Products write to `kept` if it has no other columns.
    const Sums<S> up_sums(kept.width == H ? kept : Rows(), start, m, H, buffer);
    gather<P>(layer, layer.x, start, stop, x);
    times_matrix(e, layer.up, H, m, x, matrix + up, up_sums);
    add_adapter(layer.up_factors, start, m, H, D, x, matrix + up_adapter, up_sums, H);
    const S* added = layer.up_bias ? layer.up_bias.read(e, bias) : nullptr;
    for (int64_t r = 0; r < m; ++r) {
      S* row = up_sums.row(r);
      if (added)
        for (int64_t h = 0; h < H; ++h) row[h] += added[h];
      if (kept && !up_sums.in_place) kept.write(start + r, row, 0, H);
      layer.hidden_units(start + r, row, value);
      P* to = hidden + r * padded_stride<P>(F);
      convert(value, to, F);
      std::fill(to + F, to + padded<P>(F), P(0));
    }
    const Sums<S> down_sums(rows_out, start, m, D, buffer);
    times_matrix(e, layer.down, D, m, hidden, matrix + down, down_sums);
    add_adapter(layer.down_factors, start, m, D, F, hidden, matrix + down_adapter, down_sums,
                H + layer.up_factors.rank);
    added = layer.down_bias ? layer.down_bias.read(e, bias) : nullptr;
    for (int64_t r = 0; r < m; ++r) {
      S* row = down_sums.row(r);
      if (added)
        for (int64_t d = 0; d < D; ++d) row[d] += added[d];
      if (!down_sums.in_place) rows_out.write(start + r, row);
    }
  }
};

template <class P>
void forward(const Layer& layer, const Rows& kept, const Rows& y) {
  if (!kept && layer.few()) return forward_few_rows<Sum<P>>(layer, y);
  Forward<P>{layer, kept, y}.run();
}

// -- operators

template <class F>
void with_product_type(ScalarType dtype, F f) {
  switch (dtype) {
    case at::kFloat:
      return f(float());
    case at::kDouble:
      return f(double());
    case at::kBFloat16:
      return has_tiles<BFloat16>() ? f(BFloat16()) : f(float());
    default:
      TORCH_CHECK(false, "moe_ffn's kernels do not multiply in ", dtype);
  }
}

// Write `y` and, if given, `kept`: the first product (N, H), then A x of both adapters.
void experts_forward(const Tensor& x, const Tensor& weights, const Tensor& up, const Tensor& down,
                     const std::optional<Tensor>& up_bias, const std::optional<Tensor>& down_bias,
                     const std::optional<Tensor>& up_a, const std::optional<Tensor>& up_b,
                     const std::optional<Tensor>& down_a, const std::optional<Tensor>& down_b,
                     const Tensor& token_ids, const Tensor& offsets, const std::optional<Tensor>& dropout,
                     int64_t activation, bool gated, bool interleaved, double alpha, double limit,
                     ScalarType dtype, const std::optional<Tensor>& kept, const Tensor& y) {
  const Layer layer(x, weights, up, down, up_bias, down_bias, up_a, up_b, down_a, down_b, token_ids, offsets,
                    dropout, activation, gated, interleaved, alpha, limit);
  with_product_type(dtype, [&](auto type) { forward<decltype(type)>(layer, Rows(kept), Rows(y)); });
}

// Write the given gradients.
void experts_backward(const Tensor& x, const Tensor& weights, const Tensor& up, const Tensor& down,
                      const std::optional<Tensor>& up_bias, const std::optional<Tensor>& down_bias,
                      const std::optional<Tensor>& up_a, const std::optional<Tensor>& up_b,
                      const std::optional<Tensor>& down_a, const std::optional<Tensor>& down_b,
                      const Tensor& token_ids, const Tensor& offsets, const std::optional<Tensor>& dropout,
                      int64_t activation, bool gated, bool interleaved, double alpha, double limit,
                      ScalarType dtype, const Tensor& kept, const Tensor& grad_y,
                      const std::optional<Tensor>& grad_x, const Tensor& grad_weights,
                      const std::optional<Tensor>& grad_up, const std::optional<Tensor>& grad_down,
                      const std::optional<Tensor>& grad_up_bias, const std::optional<Tensor>& grad_down_bias,
                      const std::optional<Tensor>& grad_up_a, const std::optional<Tensor>& grad_up_b,
                      const std::optional<Tensor>& grad_down_a, const std::optional<Tensor>& grad_down_b) {
  const Layer layer(x, weights, up, down, up_bias, down_bias, up_a, up_b, down_a, down_b, token_ids, offsets,
                    dropout, activation, gated, interleaved, alpha, limit);
  with_product_type(dtype, [&](auto type) {
    using P = decltype(type);
    Gradients<P> gradients{Rows(grad_x),         Rows(grad_up),     Rows(grad_down),   Rows(grad_up_bias),
                           Rows(grad_down_bias), Rows(grad_up_a),   Rows(grad_up_b),   Rows(grad_down_a),
                           Rows(grad_down_b),    grad_weights.data_ptr<Sum<P>>()};
    Backward<P>(layer, Rows(kept), Rows(grad_y), gradients).run();
  });
}

}  // namespace
}  // namespace moe_ffn

TORCH_LIBRARY(moe_ffn_cpu, m) {
  const std::string layer =
      "Tensor x, Tensor weights, Tensor up, Tensor down, Tensor? up_bias, Tensor? down_bias, "
      "Tensor? up_a, Tensor? up_b, Tensor? down_a, Tensor? down_b, Tensor token_ids, Tensor offsets, "
      "Tensor? dropout, int activation, bool gated, bool interleaved, float alpha, float limit, "
      "ScalarType dtype, ";
  m.def(("experts_forward(" + layer + "Tensor(a!)? kept, Tensor(b!) y) -> ()").c_str());
  m.def(("experts_backward(" + layer +
         "Tensor kept, Tensor grad_y, Tensor(a!)? grad_x, Tensor(b!) grad_weights, Tensor(c!)? grad_up, "
         "Tensor(d!)? grad_down, Tensor(e!)? grad_up_bias, Tensor(f!)? grad_down_bias, Tensor(g!)? grad_up_a, "
         "Tensor(h!)? grad_up_b, Tensor(i!)? grad_down_a, Tensor(j!)? grad_down_b) -> ()")
            .c_str());
  m.def("float32_linear(Tensor x, Tensor weight) -> Tensor");
  m.def(
      "float32_linear_backward(Tensor grad, Tensor x, Tensor weight, bool wants_x, bool wants_weight) -> "
      "(Tensor, Tensor)");
  m.def("top_k(Tensor scores, int k) -> Tensor");
  m.def("sort_by_expert(Tensor expert_ids, int num_experts) -> (Tensor, Tensor)");
  m.def("attention(Tensor query, Tensor key, Tensor value, bool is_causal, float scale) -> (Tensor, Tensor)");
  m.def(
      "attention_backward(Tensor grad, Tensor query, Tensor key, Tensor value, Tensor result, Tensor log_sums, "
      "bool is_causal, float scale) -> (Tensor, Tensor, Tensor)");
  m.def("has_tiles() -> bool", [] { return moe_ffn::has_tiles<float>(); });
  m.def("newton_schulz(Tensor matrices, int steps, float a, float b, float c, float eps) -> Tensor");
}

TORCH_LIBRARY_IMPL(moe_ffn_cpu, CPU, m) {
  m.impl("experts_forward", moe_ffn::experts_forward);
  m.impl("experts_backward", moe_ffn::experts_backward);
  m.impl("float32_linear", moe_ffn::float32_linear);
  m.impl("float32_linear_backward", moe_ffn::float32_linear_backward);
  m.impl("top_k", moe_ffn::top_k);
  m.impl("sort_by_expert", moe_ffn::sort_by_expert);
  m.impl("attention", moe_ffn::attention);
  m.impl("attention_backward", moe_ffn::attention_backward);
  m.impl("newton_schulz", moe_ffn::newton_schulz);
}
