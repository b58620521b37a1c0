// The backward pass over the experts of a plan.
#pragma once

#include <array>
#include <numeric>

#include "layer.h"

namespace moe_ffn {

// Place of a tile's rows in the operands of the gradients. Operands have `n` units for the rows of a chunk; the
// tile starts at unit `column`.
template <class P>
struct TileOperands {
  using U = Unit<P>;
  int64_t rows, n, column;
  bool is_last;  // true if the remaining units must be filled with zeros

  // Write rows as columns of the first operand.
  void first(const P* from, int64_t width, int64_t ld, U* pairs, U* to) const {
    const U* source = reinterpret_cast<const U*>(from);
    if constexpr (Operand<P>::per_unit == 2) {
      for (int64_t u = 0; u < units<P>(rows); ++u)
        pair_rows(from + 2 * u * ld, from + (2 * u + 1) * ld, pairs + u * width, width);
      source = pairs, ld = width;
    }
    transpose(source, ld, to + column, n, units<P>(rows), width);
    const int64_t used = column + units<P>(rows);
    for (int64_t i = 0; is_last && i < width; ++i) std::fill(to + i * n + used, to + (i + 1) * n, U(0));
  }

  // Write rows as panels of the second operand; row(r) is the address of row r.
  template <class Row>
  void second(int64_t width, U* to, const Row& row) const {
    for (int64_t r = 0, u = column; r < rows; r += Operand<P>::per_unit, ++u) {
      const P* first = row(r);
      const P* next = Operand<P>::per_unit == 2 ? row(r + 1) : nullptr;
      for (int64_t p = 0; p < panels(width); ++p)
        pair_rows(first + p * PANEL, next + p * PANEL, to + (p * n + u) * PANEL, panel_width(width, p));
    }
    const int64_t used = column + units<P>(rows);
    for (int64_t p = 0; is_last && p < panels(width); ++p)
      std::fill(to + (p * n + used) * PANEL, to + (p + 1) * n * PANEL, U(0));
  }
};

// Gradients of a layer; those not wanted have no data.
template <class P>
struct Gradients {
  Rows x, up, down, up_bias, down_bias, up_a, up_b, down_a, down_b;
  Sum<P>* weights;
};

// The backward pass. For each group of experts: copy their matrices; compute the tiles, which write the
// gradients of rows and store operands; multiply the operands to the gradients of matrices, block by block.
template <class P>
struct Backward {
  using S = Sum<P>;
  using U = Unit<P>;

  const Layer& layer;
  const Rows kept, grad_y;  // the first product (N, H), then A x of both adapters; the gradient of the result (T, D)
  const Gradients<P> gradients;
  const int64_t D = layer.D, F = layer.F, H = layer.H;
  const int64_t up_rank = layer.up_factors.rank, down_rank = layer.down_factors.rank;

  // Rows that gradients of matrices are products of: gradients of outputs first, then inputs.
  enum Operand_ { D_UP, D_DOWN, D_UP_LOW, D_DOWN_LOW, X, HIDDEN, UP_LOW, DOWN_LOW, NUM_OPERANDS };
  // The gradient of a matrix (rows, columns) of each expert, and of the bias of the same product.
  struct Product {
    Rows grad, grad_bias;
    int64_t rows, columns;
    Operand_ first, second;
    int64_t sums = 0;  // position of its sums, followed by those of the bias, in `carry`

    int64_t num_sums() const { return rows * columns + rows; }
  };
  const std::vector<Product> products = wanted_products();
  const int64_t num_sums = products.empty() ? 0 : products.back().sums + products.back().num_sums();

  Copies<P> copies;
  const int64_t down = copies.add(layer.down, D, false);
  const int64_t up = gradients.x ? copies.add(layer.up, H, false) : 0;
  const int64_t up_a = add_copy(layer.up_factors.a, up_rank), up_b = add_copy(layer.up_factors.b, H),
                down_a = add_copy(layer.down_factors.a, down_rank), down_b = add_copy(layer.down_factors.b, D);

  // Numbers that each row stores in each operand, and in all of them.
  const std::array<int64_t, NUM_OPERANDS> widths = operand_widths();
  const int64_t row_width = std::accumulate(widths.begin(), widths.end(), int64_t(0));
  const int64_t bytes_copied = copies.num_units * sizeof(U), bytes_of_row = row_width * sizeof(P);
  const Division division =
      layer.divide(when(is_bitwise<P>(), bytes_copied + CHUNK * bytes_of_row + int64_t(sizeof(S)) * num_sums),
                   bytes_copied, bytes_of_row);
  std::vector<std::vector<int64_t>> chunk_starts;  // starts of each group's chunks, in units of one column

  Tensor packed, operands, carry, grad_x_ND;
  Rows matrices, grad_x_rows;

  Backward(const Layer& layer, const Rows& kept, const Rows& grad_y, const Gradients<P>& gradients)
      : layer(layer), kept(kept), grad_y(grad_y), gradients(gradients) {
    size_t max_parts = 0;
    int64_t max_units = 0;
    bool splits = false;
    for (const Group& each : division.groups) {
      max_parts = std::max(max_parts, each.parts.size());
      for (const Part& part : each.parts) splits = splits || !part.begins;
      auto& starts = chunk_starts.emplace_back(1, 0);
      for (const Chunk& chunk : each.chunks)
        starts.push_back(starts.back() + chunk_units(chunk.stop - chunk.start));
      max_units = std::max(max_units, starts.back());
    }
    const auto unit = at::TensorOptions(c10::CppTypeToScalarType<U>::value);
    packed = at::empty({int64_t(max_parts), copies.num_units}, unit);
    operands = at::empty({max_units, row_width}, unit);
    // Sums of an expert whose rows span several groups.
    carry = at::empty({splits ? num_sums : 0}, at::TensorOptions(c10::CppTypeToScalarType<S>::value));
    matrices = Rows(packed), grad_x_rows = temporary<P>(gradients.x ? layer.N : 0, D, grad_x_ND);
  }

  std::vector<Product> wanted_products() const {
    std::vector<Product> wanted;
    for (Product each : {Product{gradients.up, gradients.up_bias, H, D, D_UP, X},
                         Product{gradients.down, gradients.down_bias, D, F, D_DOWN, HIDDEN},
                         Product{gradients.up_a, Rows(), up_rank, D, D_UP_LOW, X},
                         Product{gradients.up_b, Rows(), H, up_rank, D_UP, UP_LOW},
                         Product{gradients.down_a, Rows(), down_rank, F, D_DOWN_LOW, HIDDEN},
                         Product{gradients.down_b, Rows(), D, down_rank, D_DOWN, DOWN_LOW}}) {
      if (!each.grad && !each.grad_bias) continue;
      if (!wanted.empty()) each.sums = wanted.back().sums + wanted.back().num_sums();
      wanted.push_back(each);
    }
    return wanted;
  }

  int64_t add_copy(const Rows& matrix, int64_t rows) { return matrix ? copies.add(matrix, rows, false) : 0; }

  std::array<int64_t, NUM_OPERANDS> operand_widths() const {
    std::array<int64_t, NUM_OPERANDS> widths{};
    for (const Product& each : products) {
      widths[each.first] = each.rows;
      if (each.grad) widths[each.second] = panels(each.columns) * PANEL;
    }
    return widths;
  }

  // Units of a chunk, rounded up (zeros fill the rest), because oneDNN compiles one kernel per length of sums.
  static int64_t chunk_units(int64_t rows) { return units<P>((rows + 15) / 16 * 16); }

  void run() {
    std::vector<Phase> phases;
    for (size_t i = 0; i < division.groups.size(); ++i) add_phases(division.groups[i], chunk_starts[i], phases);
    compute(division, phases, [&](int64_t e) { alone(e); });
    for_each(layer.E, [&](int64_t e) { clear(e); });
    if (gradients.x) sum_per_token<S>(layer, grad_x_rows, nullptr, gradients.x);
  }

  // Compute an expert on one thread, which multiplies the operands of each chunk while they are in its caches.
  void alone(int64_t e) const {
    U* matrix = scratch<U>(16, copies.num_units);
    for (int64_t panel = 0; panel < copies.num_panels; ++panel) copy(e, panel, matrix);
    // True if the gradients of all experts are too large for any cache.
    auto streams = [&](const Rows& grad, int64_t rows) {
      return layer.E * rows * grad.width * int64_t(c10::elementSize(grad.dtype)) >= STREAMED_BYTES;
    };
    // True if the gradient itself can hold the sums: it has their type and stays in a cache.
    auto in_place = [&](const Rows& grad, int64_t rows) {
      return grad.dtype == c10::CppTypeToScalarType<S>::value && !streams(grad, rows);
    };
    auto sums_of = [&](const Product& each) -> S* {
      if (in_place(each.grad, each.rows)) return each.grad.template row<S>(e * each.rows);
      return scratch<S>(22 + int(&each - products.data()), each.rows * each.columns);
    };
    auto bias_sums_of = [&](const Product& each) -> S* { return scratch<S>(each.first == D_UP ? 15 : 17, each.rows); };
    for (const Product& each : products)
      if (each.grad_bias) std::fill_n(bias_sums_of(each), each.rows, S(0));
    const int64_t rows = layer.chunk_rows(e);
    for (int64_t start = layer.start(e); start < layer.ends[e]; start += rows) {
      const int64_t stop = std::min(layer.ends[e], start + rows), each = Group::piece(stop - start, TILE);
      const Operands to =
          operands_at(scratch<U>(19, chunk_units(CHUNK) * row_width), chunk_units(stop - start));
      for (int64_t from = start; from < stop; from += each)
        tile(e, start, stop, from, std::min(stop, from + each), matrix, to);
      const bool adds = start > layer.start(e);
      for (const Product& each : products) {
        const int64_t rows = each.rows, columns = each.columns;
        for (int64_t first = 0; each.grad && first < rows; first += BLOCK)
          for (int64_t p = 0; p < panels(columns); ++p)
            add_product(each, to, first, std::min(BLOCK, rows - first), p,
                        sums_of(each) + first * columns + p * PANEL, columns, adds);
        if (each.grad_bias) add_rows(each, to, 0, rows, start, stop, bias_sums_of(each));
      }
    }
    auto write = [&](const Rows& grad, int64_t count, const S* sums) {
      grad.with_type([&](auto type) {
        using T = decltype(type);
        T* row = scratch<T>(14, grad.width);
        for (int64_t i = 0; i < count; ++i) {
          T* to = grad.row<T>(e * count + i);
          const S* from = sums + i * grad.width;
          if (!streams(grad, count))
            convert(from, to, grad.width);
          else
            convert(from, row, grad.width), stream(row, to, grad.width);
        }
      });
    };
    for (const Product& each : products) {
      if (each.grad && !in_place(each.grad, each.rows)) write(each.grad, each.rows, sums_of(each));
      if (each.grad_bias) write(each.grad_bias, 1, bias_sums_of(each));
    }
    stream_done();
  }

  // Add the three phases of a group: copies of matrices, tiles, and blocks of the gradients of matrices.
  void add_phases(const Group& group, const std::vector<int64_t>& starts, std::vector<Phase>& phases) const {
    auto operands_of = [this, &starts](int64_t c) {
      return operands_at(operands.data_ptr<U>() + starts[c] * row_width, starts[c + 1] - starts[c]);
    };
    const int64_t num_parts = group.parts.size();
    // A first part that continues an expert reuses the copies of the previous group.
    const int64_t copied = !group.parts[0].begins;
    phases.push_back({(num_parts - copied) * copies.num_panels, [&, copied](int64_t task) {
                        const int64_t i = copied + task / copies.num_panels;
                        copy(group.parts[i].expert, task % copies.num_panels, matrices.row<U>(i));
                      }});
    phases.push_back({int64_t(group.tiles.size()), [&group, this, operands_of](int64_t task) {
                        const Tile& each = group.tiles[task];
                        const Chunk& chunk = group.chunks[each.chunk];
                        tile(group.parts[each.part].expert, chunk.start, chunk.stop, each.start, each.stop,
                             matrices.row<U>(each.part), operands_of(each.chunk));
                      }});
    // Give every thread several tasks, even with few experts.
    const int64_t share = (H + D) * num_parts / (4 * at::get_num_threads());
    const int64_t height = is_bitwise<P>() ? std::clamp<int64_t>(share / 16 * 16, 16, BLOCK) : BLOCK;
    int64_t blocks = 0;
    for (const Product& each : products) blocks += (each.rows + height - 1) / height;
    phases.push_back({num_parts * blocks, [&group, this, operands_of, blocks, height](int64_t task) {
                        int64_t first = task % blocks * height;
                        auto each = products.begin();
                        for (; first >= each->rows; ++each) first -= (each->rows + height - 1) / height * height;
                        block(group, group.parts[task / blocks], operands_of, *each, first, height);
                      }});
  }

  // -- matrices

  // True if products read the matrices of an expert without a copy. Copies are faster if several tiles read
  // them, and bfloat16 always needs them, because it reads pairs of numbers.
  bool reads_in_place(int64_t e) const {
    const auto own = c10::CppTypeToScalarType<P>::value;
    return Operand<P>::per_unit == 1 && layer.load(e) < COPIED_ROWS &&
           std::ranges::all_of(copies.matrices, [&](const auto& each) { return each.rows.dtype == own; });
  }

  void copy(int64_t e, int64_t panel, U* to) const {
    if (!reads_in_place(e)) copies.copy(e, panel, 0, to);
  }

  // C (m, columns of the matrix) = A (m, K) times a matrix with K rows, plus C if `adds`.
  void times_matrix(int64_t e, const Rows& from, int64_t m, int64_t K, const P* A, const U* copy, S* C,
                    int64_t ldc, bool adds = false) const {
    if (!reads_in_place(e)) return multiply<P>(m, from.width, K, A, copy, C, ldc, adds);
    multiply<P>(m, from.width, K, A, from.row<U>(e * K), from.width, PANEL, C, ldc, adds);
  }

  // -- operands of the gradients of matrices

  // The operands of one chunk, with `n` units for its rows; null if no gradient needs them. Gradients of outputs
  // are stored as columns (width, n), inputs in panels.
  struct Operands {
    int64_t n;
    std::array<U*, NUM_OPERANDS> starts;
    U* operator[](Operand_ which) const { return starts[which]; }
  };
  Operands operands_at(U* start, int64_t n) const {
    Operands result{n, {}};
    for (int i = 0; i < NUM_OPERANDS; start += widths[i++] * n)
      if (widths[i]) result.starts[i] = start;
    return result;
  }

  // -- rows

  // Compute rows `start` to `stop` of a chunk.
  void tile(int64_t e, int64_t chunk_start, int64_t chunk_stop, int64_t start, int64_t stop, const U* matrix,
            const Operands& to) const {
    const int64_t m = stop - start;
    const TileOperands<P> into{m, to.n, units<P>(start - chunk_start), stop == chunk_stop};
    const int64_t ld_D = padded_stride<P>(D), ld_H = padded_stride<P>(H), ld_F = padded_stride<P>(F);
    const bool odd = padded<P>(m) > m;  // products read rows in pairs: add a row of zeros
    P *dy = scratch<P>(0, (TILE + 1) * ld_D), *x = scratch<P>(1, 3 * D);
    P *du = scratch<P>(2, (TILE + 1) * ld_H), *hidden = scratch<P>(3, (TILE + 1) * ld_F);
    S *sums = scratch<S>(4, TILE * padded_stride<S>(std::max(F, D))), *bias = scratch<S>(11, D);
    U* pairs = scratch<U>(13, TILE * std::max({H, D, up_rank, down_rank}));
    // Store A x of an adapter, which the forward pass kept from `column` on.
    auto store_low = [&](int64_t column, int64_t rank, bool is_weighted, U* to) {
      const int64_t ld = padded_stride<P>(rank);
      P* low = scratch<P>(21, (TILE + 1) * ld);
      S* buffer = scratch<S>(20, rank);
      for (int64_t r = 0; r < m; ++r) {
        const S* numbers = kept.read(start + r, buffer, column, rank);
        const S w = is_weighted ? layer.weight<S>(start + r) : S(1);
        for (int64_t i = 0; i < rank; ++i) low[r * ld + i] = P(w * numbers[i]);
      }
      if (odd) std::fill_n(low + m * ld, rank, P(0));
      into.second(rank, to, [&](int64_t r) { return low + r * ld; });
    };
    auto low_gradient = [&](const Rows& b, int64_t rank, int64_t K, const P* rows, int64_t copy) {
      return to_operand<P>(m, rank, 20, [&](S* C, int64_t ld) { times_matrix(e, b, m, K, rows, matrix + copy, C, ld); });
    };

    gather<P>(layer, grad_y, start, stop, dy);
    if (to[D_DOWN]) into.first(dy, D, ld_D, pairs, to[D_DOWN]);
    times_matrix(e, layer.down, m, D, dy, matrix + down, sums, padded_stride<S>(F));
    if (down_rank) {
      const P* d_low = low_gradient(layer.down_factors.b, down_rank, D, dy, down_b);
      if (to[D_DOWN_LOW]) into.first(d_low, down_rank, padded_stride<P>(down_rank), pairs, to[D_DOWN_LOW]);
      times_matrix(e, layer.down_factors.a, m, down_rank, d_low, matrix + down_a, sums, padded_stride<S>(F), true);
    }
    const S* down_bias = layer.down_bias ? layer.down_bias.read(e, bias) : nullptr;
    for (int64_t r = 0; r < m; ++r)
      row(start + r, sums + r * padded_stride<S>(F), dy + r * ld_D, down_bias, hidden + r * ld_F, du + r * ld_H);
    if (odd) std::fill_n(hidden + m * ld_F, F, P(0)), std::fill_n(du + m * ld_H, ld_H, P(0));
    if (to[HIDDEN]) into.second(F, to[HIDDEN], [&](int64_t r) { return hidden + r * ld_F; });
    if (to[DOWN_LOW]) store_low(H + up_rank, down_rank, true, to[DOWN_LOW]);
    const P* d_low = nullptr;
    if (up_rank) d_low = low_gradient(layer.up_factors.b, up_rank, H, du, up_b);
    if (to[D_UP_LOW]) into.first(d_low, up_rank, padded_stride<P>(up_rank), pairs, to[D_UP_LOW]);
    if (gradients.x) {
      const Sums<S> dx(grad_x_rows, start, m, D, sums);
      times_matrix(e, layer.up, m, H, du, matrix + up, dx.data, dx.ld);
      if (up_rank) times_matrix(e, layer.up_factors.a, m, up_rank, d_low, matrix + up_a, dx.data, dx.ld, true);
      for (int64_t r = 0; !dx.in_place && r < m; ++r) grad_x_rows.write(start + r, dx.row(r));
    }
    if (to[D_UP]) into.first(du, H, ld_H, pairs, to[D_UP]);
    if (to[X]) {
      if (odd) std::fill_n(x, D, P(0));
      into.second(D, to[X], [&](int64_t r) -> const P* {
        if (r == m) return x;
        if (r + AHEAD < m) layer.x.prefetch(layer.token_ids[start + r + AHEAD]);
        return layer.x.read(layer.token_ids[start + r], x + (1 + r % 2) * D);
      });
    }
    if (to[UP_LOW]) store_low(H, up_rank, false, to[UP_LOW]);
  }

  // Compute the weighted hidden units of row n, `hidden` (F), and the gradient of its first product, `du` (H),
  // from the gradient of its unweighted hidden units, `dh` (F).
  void row(int64_t n, const S* dh, const P* dy, const S* bias, P* hidden, P* du) const {
    using V = Vectorized<S>;
    S *buffer = scratch<S>(6, 2 * H), *value = scratch<S>(7, F), *slope = scratch<S>(8, F);
    const S w = layer.weight<S>(n);
    const auto [gate, up] = layer.halves(kept.read(n, scratch<S>(5, H), 0, H), buffer);
    activate<S>(layer.activation, layer.alpha, layer.limit, gate, value, slope, F);
    const S* mask = layer.dropout ? layer.dropout.read(n, scratch<S>(9, F)) : nullptr;
    S *grads = scratch<S>(10, H), *grad_up = grads + F;
    V products(0);
    for (int64_t f = 0; f < F; f += V::size()) {
      const int64_t count = std::min<int64_t>(V::size(), F - f);
      auto load = [&](const S* from) {
        return count == V::size() ? V::loadu(from + f) : V::loadu(from + f, count);
      };
      V g = load(dh), h = load(value), d = load(slope);
      if (mask) g = g * load(mask);
      const V weighted = g * V(w);
      if (up) {
        const V factor = layer.factor<S>(load(up));
        (weighted * h * layer.factor_slope<S>(load(up))).store(grad_up + f, count);
        h = h * factor;
        d = d * factor;
      }
      (weighted * d).store(grads + f, count);
      products = products + g * h;
      h = h * V(w);
      if (mask) h = h * load(mask);
      h.store(value + f, count);
    }
    // y = w (down h + b): dw is <dy, down h + b> = <down^T dy, h> + <dy, b>.
    S lanes[V::size()], dw = 0;
    products.store(lanes);
    for (S lane : lanes) dw += lane;
    if (bias) {
      S* wide = scratch<S>(12, D);
      convert(dy, wide, D);
      for (int64_t d = 0; d < D; ++d) dw += wide[d] * bias[d];
    }
    gradients.weights[n] = dw;
    convert(value, hidden, F);
    std::fill(hidden + F, hidden + padded<P>(F), P(0));
    if (layer.gated && layer.interleaved) {
      for (int64_t f = 0; f < F; ++f) buffer[2 * f] = grads[f], buffer[2 * f + 1] = grad_up[f];
      convert(buffer, du, H);
    } else {
      convert(grads, du, H);
    }
    std::fill(du + H, du + padded<P>(H), P(0));
  }

  // -- gradients of matrices

  // Compute the `count` rows from `first` on, in one panel, of the product of a chunk's operands.
  void add_product(const Product& of, const Operands& from, int64_t first, int64_t count, int64_t panel, S* sums,
                   int64_t ld, bool adds) const {
    const int64_t n = from.n, K = n * Operand<P>::per_unit;
    const U *A = from[of.first] + first * n, *B = from[of.second] + panel * n * PANEL;
    product(count, panel_width(of.columns, panel), K, reinterpret_cast<const P*>(A), K, B, PANEL, sums, ld, adds);
  }
  // Do the same for the gradient of a bias, where the rows of `dy` still need their weights.
  void add_rows(const Product& of, const Operands& from, int64_t first, int64_t count, int64_t start,
                int64_t stop, S* sums) const {
    S* numbers = scratch<S>(1, CHUNK + 1);
    for (int64_t r = 0; r < count; ++r) {
      const U* of_row = from[of.first] + (first + r) * from.n;
      convert(reinterpret_cast<const P*>(of_row), numbers, stop - start);
      for (int64_t n = start; n < stop; ++n)
        sums[r] += of.first == D_UP ? numbers[n - start] : numbers[n - start] * layer.weight<S>(n);
    }
  }

  // Compute a block of rows of the gradients of an expert's matrix and bias.
  template <class F_>
  void block(const Group& group, const Part& part, const F_& operands_of, const Product& of, int64_t first,
             int64_t height) const {
    const int64_t e = part.expert, rows = of.rows, columns = of.columns;
    const int64_t count = std::min(height, rows - first);
    const Rows &grad = of.grad, &grad_bias = of.grad_bias;
    S* sums = scratch<S>(0, BLOCK * PANEL);
    // Sums of this block, for experts that span several groups.
    auto carried = [&](int64_t i) { return carry.data_ptr<S>() + of.sums + i; };
    for (int64_t p = 0; grad && p < panels(columns); ++p) {
      const int64_t width = panel_width(columns, p);
      auto carried_row = [&](int64_t r) { return carried((first + r) * columns + p * PANEL); };
      if (!part.begins)
        for (int64_t r = 0; r < count; ++r) std::copy_n(carried_row(r), width, sums + r * PANEL);
      for (int64_t c = part.first_chunk; c < part.last_chunk; ++c)
        add_product(of, operands_of(c), first, count, p, sums, PANEL, c > part.first_chunk || !part.begins);
      if (!part.ends) {
        for (int64_t r = 0; r < count; ++r) std::copy_n(sums + r * PANEL, width, carried_row(r));
        continue;
      }
      grad.with_type([&](auto type) {
        auto* to = grad.row<decltype(type)>(e * rows + first) + p * PANEL;
        for (int64_t r = 0; r < count; ++r) convert(sums + r * PANEL, to + r * columns, width);
      });
    }
    if (!grad_bias) return;
    if (part.begins)
      std::fill_n(sums, count, S(0));
    else
      std::copy_n(carried(rows * columns + first), count, sums);
    for (int64_t c = part.first_chunk; c < part.last_chunk; ++c)
      add_rows(of, operands_of(c), first, count, group.chunks[c].start, group.chunks[c].stop, sums);
    if (part.ends)
      grad_bias.write(e, sums, first, count);
    else
      std::copy_n(sums, count, carried(rows * columns + first));
  }

  // Write zeros for an expert without rows.
  void clear(int64_t e) const {
    if (layer.load(e)) return;
    auto clear = [&](const Rows& grad, int64_t rows) {
      if (!grad) return;
      grad.with_type([&](auto type) {
        using T = decltype(type);
        std::memset(static_cast<void*>(grad.row<T>(e * rows)), 0, rows * grad.width * sizeof(T));
      });
    };
    for (const Product& each : products) clear(each.grad, each.rows), clear(each.grad_bias, 1);
  }
};

}  // namespace moe_ffn
