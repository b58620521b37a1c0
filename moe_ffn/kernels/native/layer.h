// The arguments of both operators, the division of a plan's rows, and code for rows and matrices.
#pragma once

#include <deque>
#include <functional>

#include "passes.h"

namespace moe_ffn {

// MOE_FFN_... are columns of the table in build.py.
constexpr int64_t TILE = MOE_FFN_TILE;  // maximum rows of a tile, which one thread computes
constexpr int64_t CHUNK = 512;  // maximum rows of a chunk, whose part of a matrix's gradient is one product
constexpr int64_t BLOCK = 128;  // maximum rows of a matrix whose gradient one task computes
// Maximum size of the copies and operands of a group.
constexpr int64_t GROUP_BYTES = 8 << 20;
// Maximum size of the copies, operands and sums of an expert that one thread computes.
constexpr int64_t ALONE_BYTES = 8 << 20;
// Without gradients, matrices are not copied if experts have at most this many rows on average.
constexpr int64_t FEW_ROWS = 8;
// The backward pass copies float32 matrices if an expert has at least this many rows.
constexpr int64_t COPIED_ROWS = MOE_FFN_COPIED_ROWS;
// Stores bypass the caches if all experts' gradients of a matrix have at least this size.
constexpr int64_t STREAMED_BYTES = 32 << 20;
constexpr int64_t AHEAD = 4;  // prefetch distance in rows

// Consecutive rows of one expert: all its rows, unless they exceed the size of a group.
struct Part {
  int64_t expert, start, stop;
  int64_t first_chunk, last_chunk;
  bool begins, ends;  // true if the part has the expert's first row, its last row
};

// Consecutive rows of one part.
struct Chunk {
  int64_t start, stop;
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
      chunks.push_back({start, stop});
    }
    part.last_chunk = chunks.size();
    parts.push_back(part);
  }

  // Return the rows per piece if n rows are cut into pieces of similar size; a small last piece would cost
  // nearly as much as a full one. It is a multiple of 8, because oneDNN compiles one kernel per size.
  static int64_t piece(int64_t n, int64_t max_rows) {
    const int64_t count = (n + max_rows - 1) / max_rows, each = (n + count - 1) / count;
    return (each + 7) / 8 * 8;
  }
};

// Division of experts among threads. Each thread computes some experts alone. Then all threads compute the
// groups of the other experts, one group after another.
struct Division {
  std::vector<int64_t> alone;  // experts that one thread computes, ordered by thread
  std::vector<int64_t> ends;   // end of each thread's experts in `alone`
  std::vector<Group> groups;
};

inline std::optional<int64_t> when(bool holds, int64_t value) {
  return holds ? std::optional(value) : std::nullopt;
}

// Factors of a low-rank adapter: B A is added to each expert's matrix. A has `rank` rows per expert.
struct Factors {
  Rows a, b;
  int64_t rank;

  Factors(const std::optional<Tensor>& a, const std::optional<Tensor>& b) : a(a), b(b), rank(a ? a->size(1) : 0) {}
};

struct Layer {
  Rows x, up, down, up_bias, down_bias, dropout;
  Factors up_factors, down_factors;
  const int64_t* token_ids;
  const void* weights;              // numbers of the type of sums
  std::vector<int64_t> ends, nonempty;  // end of each expert's rows; experts with rows
  int64_t T, D, E, F, H, N;
  Activation activation;
  bool gated, interleaved;
  double alpha, limit;

  Layer(const Tensor& x, const Tensor& weights_N, const Tensor& up, const Tensor& down,
        const std::optional<Tensor>& up_bias, const std::optional<Tensor>& down_bias,
        const std::optional<Tensor>& up_a, const std::optional<Tensor>& up_b,
        const std::optional<Tensor>& down_a, const std::optional<Tensor>& down_b, const Tensor& token_ids,
        const Tensor& offsets, const std::optional<Tensor>& dropout, int64_t activation, bool gated,
        bool interleaved, double alpha, double limit)
      : x(x),
        up(up),
        down(down),
        up_bias(up_bias),
        down_bias(down_bias),
        dropout(dropout),
        up_factors(up_a, up_b),
        down_factors(down_a, down_b),
        token_ids(token_ids.const_data_ptr<int64_t>()),
        weights(weights_N.const_data_ptr()),
        T(x.size(0)),
        D(x.size(1)),
        E(up.size(0)),
        F(down.size(2)),
        H(up.size(1)),
        activation(Activation(activation)),
        gated(gated),
        interleaved(interleaved),
        alpha(alpha),
        limit(limit) {
    const int32_t* end = offsets.const_data_ptr<int32_t>();
    TORCH_CHECK(offsets.size(0) == E, "the plan is for ", offsets.size(0), " experts, but there are ", E);
    ends.assign(end, end + E);
    N = E ? ends.back() : 0;
    // Without these checks, wrong offsets or ids would access memory outside the tensors.
    TORCH_CHECK(std::is_sorted(ends.begin(), ends.end()) && (!E || ends[0] >= 0) && N <= weights_N.size(0) &&
                    N <= token_ids.size(0),
                "the plan's offsets must grow from 0 to at most its ", weights_N.size(0), " pairs");
    TORCH_CHECK(std::all_of(this->token_ids, this->token_ids + N, [&](int64_t t) { return 0 <= t && t < T; }),
                "the plan has a token id that is not in [0, ", T, "), the tokens of x");
    TORCH_CHECK(up.size(2) == D && down.size(0) == E && down.size(1) == D && H == (gated ? 2 * F : F), "x is ",
                x.sizes(), ", but the experts' matrices are ", up.sizes(), " and ", down.sizes());
    const auto check = [](const char* name, const std::optional<Tensor>& value, int64_t rows, int64_t width) {
      TORCH_CHECK(!value || (value->dim() == 2 && value->size(0) == rows && value->size(1) == width), name,
                  " is ", value->sizes(), ", but must be [", rows, ", ", width, "]");
    };
    check("the bias of the experts' first matrices", up_bias, E, H);
    check("the bias of the experts' second matrices", down_bias, E, D);
    const auto check_factors = [&](const char* name, const std::optional<Tensor>& a,
                                   const std::optional<Tensor>& b, int64_t rows, int64_t width) {
      if (!a && !b) return;
      TORCH_CHECK(a && b && a->dim() == 3 && b->dim() == 3 && a->size(0) == E && a->size(2) == width &&
                      b->size(0) == E && b->size(1) == rows && b->size(2) == a->size(1),
                  name, " must be [", E, ", rank, ", width, "] and [", E, ", ", rows, ", rank]");
    };
    check_factors("the factors of the adapter of the experts' first matrices", up_a, up_b, H, D);
    check_factors("the factors of the adapter of the experts' second matrices", down_a, down_b, D, F);
    // The mask may have additional rows, for pairs that are not computed.
    if (dropout) check("the dropout mask", dropout, std::max(N, dropout->size(0)), F);
    for (int64_t e = 0; e < E; ++e)
      if (load(e)) nonempty.push_back(e);
  }

  template <class S>
  S weight(int64_t n) const {
    return static_cast<const S*>(weights)[n];
  }
  int64_t start(int64_t expert) const { return expert ? ends[expert - 1] : 0; }
  int64_t load(int64_t expert) const { return ends[expert] - start(expert); }

  // True if copying the experts' matrices would take longer than multiplying by them.
  bool few() const { return N <= FEW_ROWS * int64_t(nonempty.size()); }

  // Rows of an expert's chunks. Neither they nor the order of sums depend on the division among threads.
  int64_t chunk_rows(int64_t expert) const { return load(expert) ? Group::piece(load(expert), CHUNK) : 0; }

  // Divide the experts so that the shared ones keep threads busy that finish their own experts early. Without
  // `bytes_alone`, all experts are shared, because the bits of the result would depend on the division.
  Division divide(std::optional<int64_t> bytes_alone, int64_t bytes_per_expert, int64_t bytes_per_row) const {
    const int64_t threads = at::get_num_threads();
    std::vector<int64_t> order(nonempty), rows(threads), thread_of(E, -1);
    std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return load(a) > load(b); });
    size_t count = 0;
    for (int64_t max_rows = 0; bytes_alone && *bytes_alone <= ALONE_BYTES && count < order.size(); ++count) {
      auto least = std::min_element(rows.begin(), rows.end());
      *least += load(order[count]), max_rows = std::max(max_rows, *least);
      if (max_rows * threads > N) break;  // the other experts are too few to balance the threads
      thread_of[order[count]] = least - rows.begin();
    }
    Division division;
    for (int64_t thread = 0; thread < threads; ++thread) {
      for (size_t i = 0; i < count; ++i)
        if (thread_of[order[i]] == thread) division.alone.push_back(order[i]);
      division.ends.push_back(division.alone.size());
    }
    division.groups = groups(bytes_per_expert, bytes_per_row, thread_of);
    return division;
  }

  // Group the experts that all threads share, so that a group's copies fit into the shared cache.
  std::vector<Group> groups(int64_t bytes_per_expert, int64_t bytes_per_row,
                            const std::vector<int64_t>& thread_of) const {
    const int64_t tiles = 4 * at::get_num_threads();  // minimum tiles of a group, so that no thread waits
    int64_t max_chunks = std::numeric_limits<int32_t>::max();
    if (bytes_per_row)
      max_chunks = std::max({GROUP_BYTES / bytes_per_row / CHUNK, tiles * TILE / CHUNK, int64_t(4)});
    std::vector<Group> groups;
    int64_t bytes = GROUP_BYTES;
    for (int64_t e : nonempty) {
      if (thread_of[e] >= 0) continue;
      const int64_t rows_of_chunk = chunk_rows(e);
      for (int64_t first = start(e), stop; first < ends[e]; first = stop) {
        stop = std::min(ends[e], first + max_chunks * rows_of_chunk);
        const int64_t more = bytes_per_expert + (stop - first) * bytes_per_row;
        const bool whole = first == start(e) && stop == ends[e];  // if not, the next group continues the sums
        const bool is_full =
            bytes + more > GROUP_BYTES && (groups.empty() || int64_t(groups.back().tiles.size()) >= tiles);
        if (!whole || is_full) {
          groups.emplace_back();
          bytes = 0;
        }
        bytes += more;
        groups.back().add({e, first, stop, 0, 0, first == start(e), stop == ends[e]}, rows_of_chunk);
      }
    }
    return groups;
  }

  // Return both halves of a row (H) of the first product: gate and up.
  template <class S>
  std::pair<const S*, const S*> halves(const S* row, S* buffer) const {
    if (!gated) return {row, nullptr};
    if (!interleaved) return {row, row + F};
    for (int64_t f = 0; f < F; ++f) buffer[f] = row[2 * f], buffer[F + f] = row[2 * f + 1];
    return {buffer, buffer + F};
  }

  // Return the factor that multiplies the activated gate.
  template <class S>
  Vectorized<S> factor(Vectorized<S> up) const {
    using V = Vectorized<S>;
    if (activation != Activation::clamped) return up;
    return at::vec::minimum(at::vec::maximum(up, V(-limit)), V(limit)) + V(1);
  }
  // Compute the hidden units (F) of row n from its first product (H).
  template <class S>
  void hidden_units(int64_t n, const S* product, S* out) const {
    using V = Vectorized<S>;
    const auto [gate, up] = halves(product, scratch<S>(14, H));
    activate<S>(activation, alpha, limit, gate, out, nullptr, F);
    if (up) at::vec::map2([&](V a, V b) { return a * factor<S>(b); }, out, out, up, F);
    if (dropout) {
      const S* mask = dropout.read(n, scratch<S>(15, F));
      at::vec::map2([](V a, V b) { return a * b; }, out, out, mask, F);
    }
  }
  template <class S>
  Vectorized<S> factor_slope(Vectorized<S> up) const {
    using V = Vectorized<S>;
    if (activation != Activation::clamped) return V(1);
    return V::blendv(V(0), V(1), (up >= V(-limit)) & (up <= V(limit)));
  }
};

// A parallel loop over n tasks, which starts when the previous phase ends.
struct Phase {
  int64_t n;
  std::function<void(int64_t)> task;
};

// Run alone(e) for the experts that one thread computes, then the phases in order.
template <class F>
void compute(const Division& division, const std::vector<Phase>& phases, const F& alone) {
  const int64_t threads = division.ends.size();
  Tasks experts(division.ends);
  std::deque<Tasks> loops;
  for (const Phase& phase : phases) loops.emplace_back(phase.n, threads);
  std::atomic<bool> failed{false};
  in_parallel(threads, [&](int64_t own) {
    try {
      experts.work(own, [&](int64_t i) { alone(division.alone[i]); });
      for (size_t i = 0; i < phases.size(); ++i) {
        loops[i].work(own, phases[i].task);
        // This loop ends when the running tasks of other threads end, or when one fails.
        for (int64_t turns = 0; !loops[i].is_done(); ++turns) {
          if (failed) return;
          if (turns > 1000) std::this_thread::yield();
        }
      }
    } catch (...) {
      failed = true;
      throw;
    }
  });
}

// The rows of each token in the plan.
struct ByToken {
  std::vector<int32_t> starts, rows;
  ByToken(const Layer& layer) : starts(layer.T + 1), rows(layer.N) {
    for (int64_t n = 0; n < layer.N; ++n) ++starts[layer.token_ids[n] + 1];
    for (int64_t t = 0; t < layer.T; ++t) starts[t + 1] += starts[t];
    std::vector<int32_t> next(starts.begin(), starts.end() - 1);
    for (int64_t n = 0; n < layer.N; ++n) rows[next[layer.token_ids[n]]++] = n;
  }
};

// Write (T, D): the sum of each token's rows, times `factors` if given.
template <class S>
void sum_per_token(const Layer& layer, const Rows& rows, const S* factors, const Rows& out) {
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

// Pack the rows of an expert's matrix into panels, for x W^T, which sums along the rows.
template <class P>
void pack_transposed(const Rows& matrix, int64_t first_row, int64_t panel, int64_t rows, Unit<P>* to) {
  const int64_t K = matrix.width, width = panel_width(rows, panel), ld = padded<P>(K);
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

// Pack a panel of columns for x W, which sums over the rows.
template <class P>
void pack(const Rows& matrix, int64_t first_row, int64_t panel, int64_t rows, Unit<P>* to) {
  const int64_t from = panel * PANEL, width = panel_width(matrix.width, panel);
  P* copy = scratch<P>(0, 2 * PANEL);
  for (int64_t k = 0; k < rows; k += Operand<P>::per_unit, to += PANEL) {
    for (int64_t ahead = k + 16; ahead < std::min(k + 16 + Operand<P>::per_unit, rows); ++ahead)
      matrix.prefetch(first_row + ahead, from, width);
    const P* first = matrix.read(first_row + k, copy, from, width);
    const P* second = nullptr;
    if constexpr (Operand<P>::per_unit == 2) {
      if (k + 1 < rows)
        second = matrix.read(first_row + k + 1, copy + PANEL, from, width);
      else
        std::fill_n(copy + PANEL, PANEL, P(0)), second = copy + PANEL;
    }
    pair_rows(first, second, to, width);
  }
}

// Copies of an expert's matrices, in panels. Those for x W^T sum along the rows, those for x W over the rows.
template <class P>
struct Copies {
  struct Matrix {
    Rows rows;
    int64_t height;  // rows per expert
    bool is_transposed;
    int64_t start;  // first unit in the copies

    int64_t num_panels() const { return panels(is_transposed ? height : rows.width); }
    int64_t num_units() const {
      return num_panels() * PANEL * units<P>(is_transposed ? rows.width : height);
    }
  };
  std::vector<Matrix> matrices;
  int64_t num_panels = 0, num_units = 0;

  // Add a matrix; return the unit at which its copy starts.
  int64_t add(const Rows& rows, int64_t height, bool is_transposed) {
    matrices.push_back({rows, height, is_transposed, num_units});
    num_panels += matrices.back().num_panels();
    num_units += matrices.back().num_units();
    return matrices.back().start;
  }

  // Copy one panel of an expert, unless it belongs to one of the first `skipped` matrices.
  void copy(int64_t e, int64_t panel, size_t skipped, Unit<P>* to) const {
    size_t i = 0;
    for (; panel >= matrices[i].num_panels(); ++i) panel -= matrices[i].num_panels();
    if (i < skipped) return;
    const Matrix& from = matrices[i];
    const int64_t first = e * from.height, size = from.num_units() / from.num_panels();
    if (from.is_transposed)
      pack_transposed<P>(from.rows, first, panel, from.height, to + from.start + panel * size);
    else
      pack<P>(from.rows, first, panel, from.height, to + from.start + panel * size);
  }
};

// Copy the rows of a tile's tokens, and add a row of zeros if products read rows in pairs.
template <class P>
void gather(const Layer& layer, const Rows& from, int64_t start, int64_t stop, P* to) {
  const int64_t D = layer.D, ld = padded_stride<P>(D), m = stop - start;
  for (int64_t r = 0; r < m; ++r, to += ld) {
    if (r + AHEAD < m) from.prefetch(layer.token_ids[start + r + AHEAD]);
    const P* row = from.read(layer.token_ids[start + r], to);
    if (row != to) std::memcpy(to, row, D * sizeof(P));
    std::fill(to + D, to + padded<P>(D), P(0));
  }
  if (padded<P>(m) > m) std::fill_n(to, ld, P(0));
}

// Rows for the sums (m, width) of a tile: those from `start` on of the matrix that receives them, if products can
// write there, and otherwise a buffer. Products write whole multiples of 8 rows.
template <class S>
struct Sums {
  S* data;
  int64_t ld;
  bool in_place;

  Sums(const Rows& into, int64_t start, int64_t m, int64_t width, S* buffer)
      : data(buffer), ld(padded_stride<S>(width)), in_place(false) {
    if (m % 8 || !into || into.dtype != c10::CppTypeToScalarType<S>::value) return;
    data = into.row<S>(start), ld = into.width, in_place = true;
  }
  S* row(int64_t r) const { return data + r * ld; }
};

// Rows (n, width) for one pass. Up to 64 MiB of the calling thread are reused between passes.
template <class P>
Rows temporary(int64_t n, int64_t width, Tensor& owner) {
  constexpr int64_t KEPT_BYTES = 64 << 20;
  Rows rows;
  if (n * width * int64_t(sizeof(P)) > KEPT_BYTES) {
    owner = at::empty({n, width}, at::TensorOptions(c10::CppTypeToScalarType<P>::value));
    return Rows(owner);
  }
  rows.data = scratch<P>(31, n * width), rows.dtype = c10::CppTypeToScalarType<P>::value, rows.width = width;
  return rows;
}

}  // namespace moe_ffn
