// The experts of a plan on a CPU, forward and backward: two operators.
//
// T tokens, D model width, E experts, F hidden width, H rows of the first matrix (F, or 2 F with a gate), N rows of
// the plan: one per (token, expert) pair, sorted by expert.
//
// Rows go through in tiles of one expert, which stay in a core's second cache from the gather to the last product;
// threads take the next tile when they are done. Matrices are copied once per pass into the order in which products
// read them. Gradients of matrices are sums over all rows of an expert, so tiles leave their operands behind, and
// blocks of the matrices are then the tasks: no thread waits, however unequal the experts' loads are. Every number is
// computed in one order, whatever the number of threads.

#include "passes.h"

#include <torch/library.h>

namespace moe_ffn {
namespace {

constexpr int64_t TILE = 64;          // rows
constexpr int64_t CHUNK = 256;        // rows whose gradient of a matrix is one product
constexpr int64_t FEW_ROWS = 8;       // of an expert, on average
constexpr int64_t AHEAD = 4;          // rows, of which the next is asked for
constexpr int64_t BLOCK = 128;        // rows of a matrix whose gradient is one task
constexpr int64_t GROUP_BYTES = 8 << 20;  // of the copies that the experts of a group need at a time

// Consecutive rows of one expert: all of them, but where there are more than a group has room for.
struct Part {
  int64_t expert, start, stop;
  int64_t first_chunk, last_chunk;
  bool begins, ends;  // the expert's rows
};

// Consecutive rows of one part.
struct Chunk {
  int64_t part, start, stop;
};

// Consecutive rows of one chunk.
struct Tile {
  int64_t part, chunk, start, stop;
};

struct Group {
  std::vector<Part> parts;
  std::vector<Chunk> chunks;
  std::vector<Tile> tiles;

  void add(Part part, int64_t chunk_rows) {
    const int64_t index = parts.size();
    part.first_chunk = chunks.size();
    for (int64_t start = part.start, stop; start < part.stop; start = stop) {
      stop = std::min(part.stop, start + chunk_rows);
      const int64_t rows = piece(stop - start, TILE);
      for (int64_t from = start; from < stop; from += rows)
        tiles.push_back({index, int64_t(chunks.size()), from, std::min(stop, from + rows)});
      chunks.push_back({index, start, stop});
    }
    part.last_chunk = chunks.size();
    parts.push_back(part);
  }

  // Rows of each of the pieces of like size that n rows are cut into: a small one at the end would cost nearly as
  // much as a whole one. An even number, since bfloat16 is multiplied in pairs.
  static int64_t piece(int64_t n, int64_t most) {
    const int64_t count = (n + most - 1) / most, each = (n + count - 1) / count;
    return each + each % 2;
  }
};

struct Layer {
  Rows x, up, down, up_bias, down_bias, dropout;
  const int64_t* token_ids;
  const void* weights;  // as the type of sums
  std::vector<int64_t> ends;
  int64_t T, D, E, F, H, N;
  Activation activation;
  bool gated, interleaved;
  double alpha, limit;

  Layer(const Tensor& x, const Tensor& weights_N, const Tensor& up, const Tensor& down,
        const std::optional<Tensor>& up_bias, const std::optional<Tensor>& down_bias, const Tensor& token_ids,
        const Tensor& offsets, const std::optional<Tensor>& dropout, int64_t activation, bool gated, bool interleaved,
        double alpha, double limit)
      : x(x), up(up), down(down), up_bias(up_bias), down_bias(down_bias), dropout(dropout),
        token_ids(token_ids.const_data_ptr<int64_t>()), weights(weights_N.const_data_ptr()), T(x.size(0)),
        D(x.size(1)), E(up.size(0)), F(down.size(2)), H(up.size(1)), activation(Activation(activation)), gated(gated),
        interleaved(interleaved), alpha(alpha), limit(limit) {
    const int32_t* end = offsets.const_data_ptr<int32_t>();
    TORCH_CHECK(offsets.size(0) == E, "a plan for ", offsets.size(0), " experts, but there are ", E);
    ends.assign(end, end + E);
    N = E ? ends.back() : 0;
    // What is wrong here would be read or written outside of the tensors.
    TORCH_CHECK(std::is_sorted(ends.begin(), ends.end()) && (!E || ends[0] >= 0) && N <= weights_N.size(0) && N <= token_ids.size(0),
                "the plan's offsets have to grow from 0 to at most its ", weights_N.size(0), " pairs");
    TORCH_CHECK(std::all_of(this->token_ids, this->token_ids + N, [&](int64_t t) { return 0 <= t && t < T; }),
                "the plan has a token that is none of the ", T, " of x");
    TORCH_CHECK(up.size(2) == D && down.size(0) == E && down.size(1) == D && H == (gated ? 2 * F : F),
                "x is ", x.sizes(), ", but the experts' matrices are ", up.sizes(), " and ", down.sizes());
  }

  template <class S> S weight(int64_t n) const { return static_cast<const S*>(weights)[n]; }
  int64_t start(int64_t expert) const { return expert ? ends[expert - 1] : 0; }
  int64_t load(int64_t expert) const { return ends[expert] - start(expert); }

  // Whether copying the matrices of the experts would take longer than multiplying with them.
  bool few() const {
    int64_t experts = 0;
    for (int64_t e = 0; e < E; ++e) experts += load(e) > 0;
    return N <= FEW_ROWS * experts;
  }

  // Experts that are worked on together, so that what is copied for them stays in the cache that cores share.
  std::vector<Group> groups(int64_t bytes_per_expert, int64_t bytes_per_row) const {
    const int64_t tiles = 4 * at::get_num_threads();  // of a group, at least, so that no thread waits
    int64_t most_chunks = std::numeric_limits<int32_t>::max();
    if (bytes_per_row) most_chunks = std::max({GROUP_BYTES / bytes_per_row / CHUNK, tiles * TILE / CHUNK, int64_t(4)});
    std::vector<Group> found;
    int64_t bytes = GROUP_BYTES;
    for (int64_t e = 0; e < E; ++e) {
      // The chunks are the same in any number of parts, and so is the order in which they are summed.
      const int64_t chunk_rows = load(e) ? Group::piece(load(e), CHUNK) : 0;
      for (int64_t first = start(e), stop; first < ends[e]; first = stop) {
        stop = std::min(ends[e], first + most_chunks * chunk_rows);
        const int64_t more = bytes_per_expert + (stop - first) * bytes_per_row;
        const bool whole = first == start(e) && stop == ends[e];  // sums of the others go from group to group
        if (!whole || (bytes + more > GROUP_BYTES && (found.empty() || int64_t(found.back().tiles.size()) >= tiles))) {
          found.emplace_back();
          bytes = 0;
        }
        bytes += more;
        found.back().add({e, first, stop, 0, 0, first == start(e), stop == ends[e]}, chunk_rows);
      }
    }
    return found;
  }

  // The two halves of a row (H) of the first product: the gate's, and up.
  template <class S> std::pair<const S*, const S*> halves(const S* row, S* buffer) const {
    if (!gated) return {row, nullptr};
    if (!interleaved) return {row, row + F};
    for (int64_t f = 0; f < F; ++f) buffer[f] = row[2 * f], buffer[F + f] = row[2 * f + 1];
    return {buffer, buffer + F};
  }

  // What the activated gate is multiplied with.
  template <class S> Vectorized<S> factor(Vectorized<S> up) const {
    using V = Vectorized<S>;
    if (activation != Activation::clamped) return up;
    return at::vec::minimum(at::vec::maximum(up, V(-limit)), V(limit)) + V(1);
  }
  // The hidden units (F) of row n from its first product (H).
  template <class S> void hidden_units(int64_t n, const S* product, S* out) const {
    using V = Vectorized<S>;
    const auto [gate, up] = halves(product, scratch<S>(14, H));
    activate<S>(activation, alpha, limit, gate, out, nullptr, F);
    if (up) at::vec::map2([&](V a, V b) { return a * factor<S>(b); }, out, out, up, F);
    if (dropout) {
      const S* mask = dropout.read(n, scratch<S>(15, F));
      at::vec::map2([](V a, V b) { return a * b; }, out, out, mask, F);
    }
  }
  template <class S> Vectorized<S> factor_slope(Vectorized<S> up) const {
    using V = Vectorized<S>;
    if (activation != Activation::clamped) return V(1);
    return V::blendv(V(0), V(1), (up >= V(-limit)) & (up <= V(limit)));
  }
};

// Where each token's rows stand in the plan.
struct ByToken {
  std::vector<int32_t> starts, rows;
  ByToken(const Layer& layer) : starts(layer.T + 1), rows(layer.N) {
    for (int64_t n = 0; n < layer.N; ++n) ++starts[layer.token_ids[n] + 1];
    for (int64_t t = 0; t < layer.T; ++t) starts[t + 1] += starts[t];
    std::vector<int32_t> next(starts.begin(), starts.end() - 1);
    for (int64_t n = 0; n < layer.N; ++n) rows[next[layer.token_ids[n]]++] = n;
  }
};

// (T, D): the sum of each token's rows, times `factors` if given.
template <class S> void sum_per_token(const Layer& layer, const Rows& rows, const S* factors, const Rows& out) {
  using V = Vectorized<S>;
  const ByToken by_token(layer);
  const int64_t D = layer.D;
  constexpr int64_t TOKENS = 32;
  for_each((layer.T + TOKENS - 1) / TOKENS, [&](int64_t task) {
    S *sum = scratch<S>(0, D), *buffer = scratch<S>(1, D);
    for (int64_t t = task * TOKENS; t < std::min(layer.T, (task + 1) * TOKENS); ++t) {
      std::fill_n(sum, D, S(0));
      for (int32_t i = by_token.starts[t]; i < by_token.starts[t + 1]; ++i) {
        const int32_t n = by_token.rows[i];
        if (i + AHEAD < int32_t(by_token.rows.size())) rows.prefetch(by_token.rows[i + AHEAD]);
        const S* row = rows.read(n, buffer);
        const S factor = factors ? S(factors[n]) : S(1);
        at::vec::map2([&](V a, V b) { return at::vec::fmadd(V(factor), b, a); }, sum, sum, row, D);
      }
      out.write(t, sum);
    }
  });
}

// The rows of one expert's matrix in panels, for x W^T: sums run along its rows.
template <class P> void pack_transposed(const Rows& matrix, int64_t first_row, int64_t panel, int64_t rows, Unit<P>* to) {
  const int64_t K = matrix.width, width = panel_width(rows, panel), ld = room<P>(K);
  const P* from = matrix.row<P>(first_row + panel * PANEL);
  if (matrix.dtype != c10::CppTypeToScalarType<P>::value || ld != K) {
    P* copy = scratch<P>(0, PANEL * ld);
    for (int64_t i = 0; i < width; ++i) {
      const P* row = matrix.read(first_row + panel * PANEL + i, copy + i * ld);
      if (row != copy + i * ld) std::memcpy(copy + i * ld, row, K * sizeof(P));
      std::fill(copy + i * ld + K, copy + (i + 1) * ld, P(0));
    }
    from = copy;
  }
  transpose(reinterpret_cast<const Unit<P>*>(from), units<P>(K), to, PANEL, width, units<P>(K));
}

// The same for x W: sums run over its rows.
template <class P> void pack(const Rows& matrix, int64_t first_row, int64_t panel, int64_t rows, Unit<P>* to) {
  const int64_t from = panel * PANEL, width = panel_width(matrix.width, panel);
  P* copy = scratch<P>(0, 2 * PANEL);
  for (int64_t k = 0; k < rows; k += Operand<P>::per_unit, to += PANEL) {
    for (int64_t ahead = k + 16; ahead < std::min(k + 16 + Operand<P>::per_unit, rows); ++ahead)
      matrix.prefetch(first_row + ahead, from, width);
    const P* first = matrix.read(first_row + k, copy, from, width);
    const P* second = nullptr;
    if constexpr (Operand<P>::per_unit == 2) {
      if (k + 1 < rows) second = matrix.read(first_row + k + 1, copy + PANEL, from, width);
      else std::fill_n(copy + PANEL, PANEL, P(0)), second = copy + PANEL;
    }
    pair_rows(first, second, to, width);
  }
}

// The rows of a tile's tokens, with a row of zeros behind them where products take them in pairs.
template <class P> __attribute__((noinline)) void gather(const Layer& layer, const Rows& from, const Tile& tile, P* to) {
  const int64_t D = layer.D, ld = apart<P>(D), m = tile.stop - tile.start;
  for (int64_t r = 0; r < m; ++r, to += ld) {
    if (r + AHEAD < m) from.prefetch(layer.token_ids[tile.start + r + AHEAD]);
    const P* row = from.read(layer.token_ids[tile.start + r], to);
    if (row != to) std::memcpy(to, row, D * sizeof(P));
    std::fill(to + D, to + room<P>(D), P(0));
  }
  if (room<P>(m) > m) std::fill_n(to, ld, P(0));
}

// -- few rows of each expert, as where a sequence is continued token by token

// A vector of numbers as the type of sums.
template <class S, class From> inline Vectorized<S> load_as(const From* from, int64_t count) {
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

// The products of one row of a matrix with R rows, which lie `ld` apart. Several sums at a time, since an addition
// waits for the one before.
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
    for (int r = 0; r < R; ++r) sums[0][r] = at::vec::fmadd(weight, load_as<S>(rows + r * ld + i, count), sums[0][r]);
  }
  for (int r = 0; r < R; ++r) {
    for (int c = 1; c < CHAINS; ++c) sums[0][r] = sums[0][r] + sums[c][r];
    out[r * ld_out] = at::vec::vec_reduce_all([](V a, V b) { return a + b; }, sums[0][r]);
  }
}

// (m, 1): rows (m, n) times row `first + i` of a matrix.
template <class S>
inline void times_row(const Rows& matrix, int64_t row, const S* rows, int64_t m, S* out, int64_t ld_out) {
  const int64_t n = matrix.width;
  matrix.with_type([&](auto type) {
    const auto* numbers = matrix.row<decltype(type)>(row);
    int64_t r = 0;
    for (; r + 4 <= m; r += 4) dots<4>(numbers, rows + r * n, n, n, out + r * ld_out, ld_out);
    for (; r + 2 <= m; r += 2) dots<2>(numbers, rows + r * n, n, n, out + r * ld_out, ld_out);
    if (r < m) dots<1>(numbers, rows + r * n, n, n, out + r * ld_out, ld_out);
  });
}

template <class S> void forward_few(const Layer& layer, const Rows& y) {
  const auto [D, F, H, N] = std::tuple(layer.D, layer.F, layer.H, layer.N);
  constexpr int64_t ROWS = 32;  // of a matrix, that are one task
  std::vector<int64_t> experts;
  for (int64_t e = 0; e < layer.E; ++e)
    if (layer.load(e)) experts.push_back(e);
  std::vector<S> x(N * D), up(N * H), hidden(N * F), sums(N * D);
  for (int64_t n = 0; n < N; ++n) {
    const S* row = layer.x.read(layer.token_ids[n], x.data() + n * D);
    if (row != x.data() + n * D) std::copy_n(row, D, x.data() + n * D);
  }
  auto linear = [&](const Rows& matrix, const Rows& bias, int64_t rows, const S* from, S* to) {
    const int64_t tasks = (rows + ROWS - 1) / ROWS;
    for_each(experts.size() * tasks, [&](int64_t task) {
      const int64_t e = experts[task / tasks], first = task % tasks * ROWS, start = layer.start(e), m = layer.load(e);
      S* added = scratch<S>(0, rows);
      const S* biases = bias ? bias.read(e, added) : nullptr;
      for (int64_t i = first; i < std::min(rows, first + ROWS); ++i) {
        times_row(matrix, e * rows + i, from + start * matrix.width, m, to + start * rows + i, rows);
        if (biases) for (int64_t r = 0; r < m; ++r) to[(start + r) * rows + i] += biases[i];
      }
    });
  };
  linear(layer.up, layer.up_bias, H, x.data(), up.data());
  for (int64_t n = 0; n < N; ++n) layer.hidden_units(n, up.data() + n * H, hidden.data() + n * F);
  linear(layer.down, layer.down_bias, D, hidden.data(), sums.data());
  Rows rows;
  rows.data = sums.data(), rows.dtype = c10::CppTypeToScalarType<S>::value, rows.width = D;
  sum_per_token<S>(layer, rows, static_cast<const S*>(layer.weights), y);
}

// -- forward

template <class P> void forward(const Layer& layer, const Rows& kept, const Rows& y) {
  using S = Sum<P>;
  if (!kept && layer.few()) return forward_few<S>(layer, y);
  const auto [D, F, H] = std::tuple(layer.D, layer.F, layer.H);
  const int64_t up_units = panels(H) * PANEL * units<P>(D), down_units = panels(D) * PANEL * units<P>(F);
  const auto dtype = c10::CppTypeToScalarType<P>::value;
  const Tensor y_ND = at::empty({layer.N, D}, at::TensorOptions(dtype));
  const Rows rows_out(y_ND);
  const auto groups = layer.groups((up_units + down_units) * sizeof(Unit<P>), 0);
  size_t most = 0;
  for (const auto& group : groups) most = std::max(most, group.parts.size());
  const Tensor packed = at::empty({int64_t(most), up_units + down_units}, at::TensorOptions(c10::CppTypeToScalarType<Unit<P>>::value));
  const Rows matrices(packed);

  for (const auto& group : groups) {
    const int64_t up_panels = panels(H), all_panels = up_panels + panels(D);
    for_each(group.parts.size() * all_panels, [&](int64_t task) {
      const int64_t i = task / all_panels, panel = task % all_panels, e = group.parts[i].expert;
      auto* to = matrices.row<Unit<P>>(i);
      if (panel < up_panels) pack_transposed<P>(layer.up, e * H, panel, H, to + panel * PANEL * units<P>(D));
      else pack_transposed<P>(layer.down, e * D, panel - up_panels, D, to + up_units + (panel - up_panels) * PANEL * units<P>(F));
    });
    for_each(group.tiles.size(), [&](int64_t task) {
      const Tile& tile = group.tiles[task];
      const int64_t m = tile.stop - tile.start, e = group.parts[tile.part].expert;
      const auto* matrix = matrices.row<Unit<P>>(tile.part);
      P *x = scratch<P>(0, (TILE + 1) * apart<P>(D)), *hidden = scratch<P>(1, TILE * apart<P>(F));
      S *sums = scratch<S>(2, TILE * apart<S>(std::max(H, D))), *value = scratch<S>(4, F);
      S* bias = scratch<S>(5, std::max(H, D));
      gather<P>(layer, layer.x, tile, x);
      multiply<P>(m, H, D, x, matrix, sums);
      const S* added = layer.up_bias ? layer.up_bias.read(e, bias) : nullptr;
      for (int64_t r = 0; r < m; ++r) {
        S* row = sums + r * apart<S>(H);
        if (added) for (int64_t h = 0; h < H; ++h) row[h] += added[h];
        if (kept) kept.write(tile.start + r, row);
        layer.hidden_units(tile.start + r, row, value);
        P* to = hidden + r * apart<P>(F);
        convert(value, to, F);
        std::fill(to + F, to + room<P>(F), P(0));
      }
      multiply<P>(m, D, F, hidden, matrix + up_units, sums);
      added = layer.down_bias ? layer.down_bias.read(e, bias) : nullptr;
      for (int64_t r = 0; r < m; ++r) {
        S* row = sums + r * apart<S>(D);
        if (added) for (int64_t d = 0; d < D; ++d) row[d] += added[d];
        rows_out.write(tile.start + r, row);
      }
    });
  }
  sum_per_token<S>(layer, rows_out, static_cast<const S*>(layer.weights), y);
}

// -- backward

// Where the rows of a tile stand in the operands of the gradients: `n` units for the rows of a chunk, of which the
// tile's begin at `column`.
template <class P> struct TileOperands {
  using U = Unit<P>;
  int64_t rows, n, column;

  // As columns.
  __attribute__((noinline)) void first(const P* from, int64_t width, int64_t ld, U* pairs, U* to) const {
    const U* source = reinterpret_cast<const U*>(from);
    if constexpr (Operand<P>::per_unit == 2) {
      for (int64_t u = 0; u < units<P>(rows); ++u) pair_rows(from + 2 * u * ld, from + (2 * u + 1) * ld, pairs + u * width, width);
      source = pairs, ld = width;
    }
    transpose(source, ld, to + column, n, units<P>(rows), width);
  }

  // As rows, in panels; row(r) is where row r lies.
  template <class Row> void second(int64_t width, U* to, const Row& row) const {
    for (int64_t r = 0, u = column; r < rows; r += Operand<P>::per_unit, ++u) {
      const P* first = row(r);
      const P* next = Operand<P>::per_unit == 2 ? row(r + 1) : nullptr;
      for (int64_t p = 0; p < panels(width); ++p)
        pair_rows(first + p * PANEL, next + p * PANEL, to + (p * n + u) * PANEL, panel_width(width, p));
    }
  }
};

template <class P>
void backward(const Layer& layer, const Rows& kept, const Rows& grad_y, const Rows& grad_x, Sum<P>* grad_weights,
              const Rows& grad_up, const Rows& grad_down, const Rows& grad_up_bias, const Rows& grad_down_bias) {
  using S = Sum<P>;
  using U = Unit<P>;
  const auto [D, F, H] = std::tuple(layer.D, layer.F, layer.H);
  const int64_t down_units = panels(F) * PANEL * units<P>(D), up_units = grad_x ? panels(D) * PANEL * units<P>(H) : 0;
  const bool wants_up = grad_up || grad_up_bias, wants_down = grad_down || grad_down_bias;
  const int64_t row_up = wants_up ? H + panels(D) * PANEL : 0, row_down = wants_down ? D + panels(F) * PANEL : 0;
  const auto unit_options = at::TensorOptions(c10::CppTypeToScalarType<U>::value);
  const Tensor grad_x_ND = at::empty({grad_x ? layer.N : 0, D}, at::TensorOptions(c10::CppTypeToScalarType<P>::value));
  const Rows grad_rows(grad_x_ND);
  const auto groups = layer.groups((up_units + down_units) * sizeof(U), (row_up + row_down) * sizeof(P));
  size_t most_experts = 0;
  int64_t most_units = 0;
  bool splits = false;
  // Where a chunk begins, in units of one column.
  auto chunk_units = [](const Chunk& chunk) { return units<P>(chunk.stop - chunk.start); };
  for (const auto& group : groups) {
    most_experts = std::max(most_experts, group.parts.size());
    for (const Part& part : group.parts) splits = splits || !part.begins;
    int64_t sum = 0;
    for (const auto& chunk : group.chunks) sum += chunk_units(chunk);
    most_units = std::max(most_units, sum);
  }
  const Tensor packed = at::empty({int64_t(most_experts), up_units + down_units}, unit_options);
  const Tensor operands = at::empty({most_units, row_up + row_down}, unit_options);
  // Sums of an expert whose rows do not fit in one group: of its first matrix and bias, then of the second ones.
  const int64_t up_size = H * (D + 1), down_size = D * (F + 1);
  const Tensor carry = at::empty({splits ? up_size + down_size : 0}, at::TensorOptions(c10::CppTypeToScalarType<S>::value));
  const Rows matrices(packed);
  U* operand = operands.data_ptr<U>();

  for (const auto& group : groups) {
    const int64_t down_panels = panels(F), all_panels = down_panels + (grad_x ? panels(D) : 0);
    for_each(group.parts.size() * all_panels, [&](int64_t task) {
      const int64_t i = task / all_panels, panel = task % all_panels, e = group.parts[i].expert;
      U* to = matrices.row<U>(i);
      if (panel < down_panels) pack<P>(layer.down, e * D, panel, D, to + panel * PANEL * units<P>(D));
      else pack<P>(layer.up, e * H, panel - down_panels, H, to + down_units + (panel - down_panels) * PANEL * units<P>(H));
    });

    // Operands of chunk c: first (H, rows) and (D, rows), then panels of x and of hidden units.
    std::vector<int64_t> chunk_starts(group.chunks.size() + 1);
    for (size_t c = 0; c < group.chunks.size(); ++c) chunk_starts[c + 1] = chunk_starts[c] + chunk_units(group.chunks[c]);
    auto operands_of = [&](int64_t c) {
      U* base = operand + chunk_starts[c] * (row_up + row_down);
      const int64_t n = chunk_starts[c + 1] - chunk_starts[c];
      U* up_first = base;
      U* up_second = up_first + (wants_up ? H * n : 0);
      U* down_first = up_second + (wants_up ? panels(D) * PANEL * n : 0);
      U* down_second = down_first + (wants_down ? D * n : 0);
      return std::tuple(n, up_first, up_second, down_first, down_second);
    };

    for_each(group.tiles.size(), [&](int64_t task) {
      const Tile& tile = group.tiles[task];
      const int64_t m = tile.stop - tile.start, e = group.parts[tile.part].expert, c = tile.chunk;
      const int64_t column = units<P>(tile.start - group.chunks[c].start);
      const auto [n, up_first, up_second, down_first, down_second] = operands_of(c);
      const U* matrix = matrices.row<U>(tile.part);
      const int64_t ld_D = apart<P>(D), ld_H = apart<P>(H), m_room = room<P>(m);
      P *dy = scratch<P>(0, (TILE + 1) * ld_D), *x = scratch<P>(1, 3 * D);
      P *du = scratch<P>(2, (TILE + 1) * ld_H), *hidden = scratch<P>(3, (TILE + 1) * F);
      S* sums = scratch<S>(4, TILE * apart<S>(std::max(F, D)));
      S *pre = scratch<S>(5, H), *buffer = scratch<S>(6, 2 * H), *value = scratch<S>(7, F), *slope = scratch<S>(8, F);
      S *mask_buffer = scratch<S>(9, F), *grads = scratch<S>(10, H), *bias_buffer = scratch<S>(11, D), *wide = scratch<S>(12, D);
      U* pairs = scratch<U>(13, TILE * std::max(H, D));

      const TileOperands<P> operands{m, n, column};
      gather<P>(layer, grad_y, tile, dy);
      if (wants_down) operands.first(dy, D, ld_D, pairs, down_first);
      multiply<P>(m, F, D, dy, matrix, sums);
      const S* bias = layer.down_bias ? layer.down_bias.read(e, bias_buffer) : nullptr;
      for (int64_t r = 0; r < m; ++r) {
        const int64_t row = tile.start + r;
        const S *u = kept.read(row, pre), *dh = sums + r * apart<S>(F), w = layer.weight<S>(row);
        const auto [gate, up] = layer.halves(u, buffer);
        activate<S>(layer.activation, layer.alpha, layer.limit, gate, value, slope, F);
        const S* mask = layer.dropout ? layer.dropout.read(row, mask_buffer) : nullptr;
        S* grad_gate = grads;
        S* grad_second = grads + F;
        // y = w (down h + b): dw is <dy, down h + b> = <down^T dy, h> + <dy, b>.
        S dw = 0;
        using V = Vectorized<S>;
        V dw_lanes(0);
        for (int64_t f = 0; f < F; f += V::size()) {
          const int64_t count = std::min<int64_t>(V::size(), F - f);
          auto load = [&](const S* from) { return count == V::size() ? V::loadu(from + f) : V::loadu(from + f, count); };
          V g = load(dh), h = load(value), d = load(slope);
          if (mask) g = g * load(mask);
          const V weighted = g * V(w);
          if (up) {
            const V multiplier = layer.factor<S>(load(up));
            (weighted * h * layer.factor_slope<S>(load(up))).store(grad_second + f, count);
            h = h * multiplier;
            d = d * multiplier;
          }
          (weighted * d).store(grad_gate + f, count);
          dw_lanes = dw_lanes + g * h;
          h = h * V(w);
          if (mask) h = h * load(mask);
          h.store(value + f, count);
        }
        S lanes[V::size()];
        dw_lanes.store(lanes);
        for (S lane : lanes) dw += lane;
        if (bias) {
          const S* dy_row = wide;
          if constexpr (std::is_same_v<P, S>) dy_row = dy + r * ld_D;
          else convert(dy + r * ld_D, wide, D);
          for (int64_t d = 0; d < D; ++d) dw += dy_row[d] * bias[d];
        }
        grad_weights[row] = dw;
        convert(value, hidden + r * F, F);
        P* to = du + r * ld_H;
        if (layer.gated && layer.interleaved) {
          for (int64_t f = 0; f < F; ++f) buffer[2 * f] = grad_gate[f], buffer[2 * f + 1] = grad_second[f];
          convert(buffer, to, H);
        } else {
          convert(grads, to, H);
        }
        std::fill(to + H, to + room<P>(H), P(0));
      }
      if (m_room > m) std::fill_n(hidden + m * F, F, P(0)), std::fill_n(du + m * ld_H, ld_H, P(0));
      if (wants_down) operands.second(F, down_second, [&](int64_t r) { return hidden + r * F; });
      if (grad_x) {
        multiply<P>(m, D, H, du, matrix + down_units, sums);
        for (int64_t r = 0; r < m; ++r) grad_rows.write(tile.start + r, sums + r * apart<S>(D));
      }
      if (wants_up) {
        operands.first(du, H, ld_H, pairs, up_first);
        if (m_room > m) std::fill_n(x, D, P(0));
        operands.second(D, up_second, [&](int64_t r) -> const P* {
          if (r == m) return x;  // behind the last row of an odd number
          if (r + AHEAD < m) layer.x.prefetch(layer.token_ids[tile.start + r + AHEAD]);
          return layer.x.read(layer.token_ids[tile.start + r], x + (1 + r % 2) * D);
        });
      }
    });

    // Several tasks for every thread, however few the experts are.
    const int64_t share = (H + D) * int64_t(group.parts.size()) / (4 * at::get_num_threads());
    const int64_t height = std::clamp<int64_t>(share / 16 * 16, 16, BLOCK);
    const int64_t up_blocks = wants_up ? (H + height - 1) / height : 0;
    const int64_t blocks = up_blocks + (wants_down ? (D + height - 1) / height : 0);
    for_each(group.parts.size() * blocks, [&](int64_t task) {
      const Part& part = group.parts[task / blocks];
      const int64_t e = part.expert, b = task % blocks;
      const bool is_up = b < up_blocks;
      const int64_t rows = is_up ? H : D, columns = is_up ? D : F, first = (is_up ? b : b - up_blocks) * height;
      const int64_t count = std::min(height, rows - first);
      const Rows &grad = is_up ? grad_up : grad_down, &grad_bias = is_up ? grad_up_bias : grad_down_bias;
      S* sums = scratch<S>(0, BLOCK * PANEL);
      S* carried = carry.data_ptr<S>() + (splits ? (is_up ? 0 : up_size) + first * columns : 0);  // blocks differ from group to group
      if (grad) for (int64_t p = 0; p < panels(columns); ++p) {
        const int64_t width = panel_width(columns, p);
        if (!part.begins)
          for (int64_t r = 0; r < count; ++r) std::copy_n(carried + r * columns + p * PANEL, width, sums + r * PANEL);
        for (int64_t c = part.first_chunk; c < part.last_chunk; ++c) {
          const auto [n, up_first, up_second, down_first, down_second] = operands_of(c);
          const U *A = (is_up ? up_first : down_first) + first * n, *B = (is_up ? up_second : down_second) + p * n * PANEL;
          product(count, width, n * Operand<P>::per_unit, reinterpret_cast<const P*>(A), n * Operand<P>::per_unit, B, sums, PANEL, c > part.first_chunk || !part.begins);
        }
        if (!part.ends) {
          for (int64_t r = 0; r < count; ++r) std::copy_n(sums + r * PANEL, width, carried + r * columns + p * PANEL);
          continue;
        }
        grad.with_type([&](auto type) {
          auto* to = grad.row<decltype(type)>(e * rows + first) + p * PANEL;
          for (int64_t r = 0; r < count; ++r) convert(sums + r * PANEL, to + r * columns, width);
        });
      }
      if (grad_bias) {
        S *row_sums = scratch<S>(1, CHUNK + 1), *carried_bias = carried + (rows - first) * columns + first;
        if (part.begins) std::fill_n(sums, count, S(0));
        else std::copy_n(carried_bias, count, sums);
        for (int64_t c = part.first_chunk; c < part.last_chunk; ++c) {
          const auto [n, up_first, up_second, down_first, down_second] = operands_of(c);
          const int64_t m = group.chunks[c].stop - group.chunks[c].start;
          for (int64_t r = 0; r < count; ++r) {
            convert(reinterpret_cast<const P*>((is_up ? up_first : down_first) + (first + r) * n), row_sums, m);
            for (int64_t k = 0; k < m; ++k) sums[r] += is_up ? row_sums[k] : row_sums[k] * layer.weight<S>(group.chunks[c].start + k);
          }
        }
        if (part.ends) grad_bias.write(e, sums, first, count);
        else std::copy_n(sums, count, carried_bias);
      }
    });
  }
  for_each(layer.E, [&](int64_t e) {
    if (layer.load(e)) return;
    auto clear = [&](const Rows& grad, int64_t rows) {
      if (grad) grad.with_type([&](auto type) {
        using T = decltype(type);
        std::memset(static_cast<void*>(grad.row<T>(e * rows)), 0, rows * grad.width * sizeof(T));
      });
    };
    clear(grad_up, H), clear(grad_down, D), clear(grad_up_bias, 1), clear(grad_down_bias, 1);
  });
  if (grad_x) sum_per_token<S>(layer, grad_rows, nullptr, grad_x);
}

// -- operators

template <class F> void with_product_type(ScalarType dtype, F f) {
  switch (dtype) {
    case at::kFloat: return f(float());
    case at::kDouble: return f(double());
    case at::kBFloat16: return has_tiles<BFloat16>() ? f(BFloat16()) : f(float());
    default: TORCH_CHECK(false, "moe_ffn's kernels multiply in no ", dtype);
  }
}

// Writes `y` and, where it is given, `kept`: the first product (N, H).
void experts_forward(const Tensor& x, const Tensor& weights, const Tensor& up, const Tensor& down,
                     const std::optional<Tensor>& up_bias, const std::optional<Tensor>& down_bias,
                     const Tensor& token_ids, const Tensor& offsets, const std::optional<Tensor>& dropout,
                     int64_t activation, bool gated, bool interleaved, double alpha, double limit, ScalarType dtype,
                     const std::optional<Tensor>& kept, const Tensor& y) {
  const Layer layer(x, weights, up, down, up_bias, down_bias, token_ids, offsets, dropout, activation, gated,
                    interleaved, alpha, limit);
  with_product_type(dtype, [&](auto type) { forward<decltype(type)>(layer, Rows(kept), Rows(y)); });
}

// Writes those of the gradients that are given.
void experts_backward(const Tensor& x, const Tensor& weights, const Tensor& up, const Tensor& down,
                      const std::optional<Tensor>& up_bias, const std::optional<Tensor>& down_bias,
                      const Tensor& token_ids, const Tensor& offsets, const std::optional<Tensor>& dropout,
                      int64_t activation, bool gated, bool interleaved, double alpha, double limit, ScalarType dtype,
                      const Tensor& kept, const Tensor& grad_y, const std::optional<Tensor>& grad_x,
                      const Tensor& grad_weights, const std::optional<Tensor>& grad_up,
                      const std::optional<Tensor>& grad_down, const std::optional<Tensor>& grad_up_bias,
                      const std::optional<Tensor>& grad_down_bias) {
  const Layer layer(x, weights, up, down, up_bias, down_bias, token_ids, offsets, dropout, activation, gated,
                    interleaved, alpha, limit);
  with_product_type(dtype, [&](auto type) {
    using P = decltype(type);
    backward<P>(layer, Rows(kept), Rows(grad_y), Rows(grad_x), grad_weights.data_ptr<Sum<P>>(), Rows(grad_up),
                Rows(grad_down), Rows(grad_up_bias), Rows(grad_down_bias));
  });
}

}  // namespace
}  // namespace moe_ffn

TORCH_LIBRARY(moe_ffn_cpu, m) {
  const std::string layer =
      "Tensor x, Tensor weights, Tensor up, Tensor down, Tensor? up_bias, Tensor? down_bias, Tensor token_ids, "
      "Tensor offsets, Tensor? dropout, int activation, bool gated, bool interleaved, float alpha, float limit, "
      "ScalarType dtype, ";
  m.def(("experts_forward(" + layer + "Tensor(a!)? kept, Tensor(b!) y) -> ()").c_str());
  m.def(("experts_backward(" + layer +
        "Tensor kept, Tensor grad_y, Tensor(a!)? grad_x, Tensor(b!) grad_weights, Tensor(c!)? grad_up, "
        "Tensor(d!)? grad_down, Tensor(e!)? grad_up_bias, Tensor(f!)? grad_down_bias) -> ()").c_str());
}

TORCH_LIBRARY_IMPL(moe_ffn_cpu, CPU, m) {
  m.impl("experts_forward", moe_ffn::experts_forward);
  m.impl("experts_backward", moe_ffn::experts_backward);
}
