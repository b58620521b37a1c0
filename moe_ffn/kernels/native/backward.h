// The backward pass over the experts of a plan.
#pragma once

#include "layer.h"

namespace moe_ffn {

// Where the rows of a tile stand in the operands of the gradients: `n` units for the rows of a chunk, of
// which the tile's begin at `column`.
template <class P>
struct TileOperands {
  using U = Unit<P>;
  int64_t rows, n, column;
  bool is_last;  // so that zeros follow

  // As columns.
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

  // As rows, in panels; row(r) is where row r lies.
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

// The gradients that a user of the layer may want; those that nobody wants have no rows.
template <class P>
struct Gradients {
  Rows x, up, down, up_bias, down_bias;
  Sum<P>* weights;
};

// The backward pass. For every group of experts: copy their matrices; go through the tiles, which gives the
// gradients of rows and leaves operands behind; add those up to the gradients of matrices, block by block.
template <class P>
struct Backward {
  using S = Sum<P>;
  using U = Unit<P>;

  const Layer& layer;
  const Rows kept, grad_y;  // the first product (N, H); the gradient of the result (T, D)
  const Gradients<P> gradients;
  const int64_t D = layer.D, F = layer.F, H = layer.H;
  const bool wants_up = gradients.up || gradients.up_bias, wants_down = gradients.down || gradients.down_bias;
  // Units of the copies of an expert's matrices, of which the second product's stands first.
  const int64_t down_units = panels(F) * PANEL * units<P>(D);
  const int64_t up_units = gradients.x ? panels(D) * PANEL * units<P>(H) : 0;
  // Numbers that a row leaves behind, for the gradient of each matrix.
  const int64_t row_up = wants_up ? H + panels(D) * PANEL : 0,
                row_down = wants_down ? D + panels(F) * PANEL : 0;
  const std::vector<Group> groups =
      layer.groups((up_units + down_units) * sizeof(U), (row_up + row_down) * sizeof(P));

  Tensor packed, operands, carry, grad_x_ND;
  Rows matrices, grad_x_rows;

  // Of the group that is worked on.
  const Group* group = nullptr;
  std::vector<int64_t> chunk_starts;  // in units of one column

  Backward(const Layer& layer, const Rows& kept, const Rows& grad_y, const Gradients<P>& gradients)
      : layer(layer), kept(kept), grad_y(grad_y), gradients(gradients) {
    size_t most_parts = 0;
    int64_t most_units = 0;
    bool splits = false;
    for (const Group& each : groups) {
      most_parts = std::max(most_parts, each.parts.size());
      for (const Part& part : each.parts) splits = splits || !part.begins;
      int64_t sum = 0;
      for (const Chunk& chunk : each.chunks) sum += chunk_units(chunk);
      most_units = std::max(most_units, sum);
    }
    const auto numbers = at::TensorOptions(c10::CppTypeToScalarType<P>::value);
    const auto unit = at::TensorOptions(c10::CppTypeToScalarType<U>::value);
    packed = at::empty({int64_t(most_parts), up_units + down_units}, unit);
    operands = at::empty({most_units, row_up + row_down}, unit);
    // Sums of an expert whose rows do not fit in one group: of its first matrix and bias, then of the others.
    carry =
        at::empty({splits ? H * D + H + D * F + D : 0}, at::TensorOptions(c10::CppTypeToScalarType<S>::value));
    grad_x_ND = at::empty({gradients.x ? layer.N : 0, D}, numbers);
    matrices = Rows(packed), grad_x_rows = Rows(grad_x_ND);
  }

  // With zeros behind the last row: oneDNN compiles a product anew for every length of its sums.
  static int64_t chunk_units(const Chunk& chunk) { return units<P>((chunk.stop - chunk.start + 15) / 16 * 16); }

  void run() {
    for (const Group& each : groups) {
      group = &each;
      chunk_starts.assign(1, 0);
      for (const Chunk& chunk : each.chunks) chunk_starts.push_back(chunk_starts.back() + chunk_units(chunk));

      const int64_t copies = panels(F) + (gradients.x ? panels(D) : 0);
      for_each(each.parts.size() * copies, [&](int64_t task) { copy(task / copies, task % copies); });
      for_each(each.tiles.size(), [&](int64_t task) { tile(each.tiles[task]); });

      // Several tasks for every thread, however few the experts are.
      const int64_t share = (H + D) * int64_t(each.parts.size()) / (4 * at::get_num_threads());
      const int64_t height = std::clamp<int64_t>(share / 16 * 16, 16, BLOCK);
      const int64_t up_blocks = wants_up ? (H + height - 1) / height : 0;
      const int64_t blocks = up_blocks + (wants_down ? (D + height - 1) / height : 0);
      for_each(each.parts.size() * blocks, [&](int64_t task) {
        const Part& part = each.parts[task / blocks];
        const int64_t b = task % blocks;
        if (b < up_blocks) block(part, true, b * height, height);
        else block(part, false, (b - up_blocks) * height, height);
      });
    }
    for_each(layer.E, [&](int64_t e) { clear(e); });
    if (gradients.x) sum_per_token<S>(layer, grad_x_rows, nullptr, gradients.x);
  }

  // -- matrices

  // Copies pay where several tiles read them. In bfloat16 there is no way without: numbers stand in pairs.
  bool lies_ready(const Part& part) const {
    const auto own = c10::CppTypeToScalarType<P>::value;
    return Operand<P>::per_unit == 1 && layer.up.dtype == own && layer.down.dtype == own &&
           layer.load(part.expert) < COPIED_ROWS;
  }

  void copy(int64_t index, int64_t panel) const {
    const Part& part = group->parts[index];
    if (lies_ready(part)) return;
    U* to = matrices.row<U>(index);
    const int64_t e = part.expert, of_down = panels(F);
    if (panel < of_down) pack<P>(layer.down, e * D, panel, D, to + panel * PANEL * units<P>(D));
    else
      pack<P>(layer.up, e * H, panel - of_down, H, to + down_units + (panel - of_down) * PANEL * units<P>(H));
  }

  // C (m, width of the matrix) = A (m, K) times a matrix of K rows.
  void times_matrix(const Part& part, const Rows& from, int64_t m, int64_t K, const P* A, const U* copy,
                    S* C) const {
    if (!lies_ready(part)) return multiply<P>(m, from.width, K, A, copy, C);
    multiply<P>(m, from.width, K, A, from.row<U>(part.expert * K), from.width, PANEL, C);
  }

  // -- operands of the gradients of matrices

  // Of one chunk, `n` units for its rows: of each matrix the rows of the one side as columns (H, n) or (D, n),
  // then those of the other in panels.
  struct Operands {
    int64_t n;
    U *up_first, *up_second, *down_first, *down_second;
  };
  Operands operands_of(int64_t c) const {
    const int64_t n = chunk_starts[c + 1] - chunk_starts[c];
    U* up_first = operands.data_ptr<U>() + chunk_starts[c] * (row_up + row_down);
    U* up_second = up_first + (wants_up ? H * n : 0);
    U* down_first = up_second + (wants_up ? panels(D) * PANEL * n : 0);
    return {n, up_first, up_second, down_first, down_first + (wants_down ? D * n : 0)};
  }

  // -- rows

  void tile(const Tile& tile) const {
    const Part& part = group->parts[tile.part];
    const int64_t m = tile.stop - tile.start, e = part.expert;
    const Operands to = operands_of(tile.chunk);
    const Chunk& chunk = group->chunks[tile.chunk];
    const TileOperands<P> into{m, to.n, units<P>(tile.start - chunk.start), tile.stop == chunk.stop};
    const U* matrix = matrices.row<U>(tile.part);
    const int64_t ld_D = apart<P>(D), ld_H = apart<P>(H);
    const bool odd =
        room<P>(m) > m;  // a row of zeros stands behind the last, where products take them in pairs
    P *dy = scratch<P>(0, (TILE + 1) * ld_D), *x = scratch<P>(1, 3 * D);
    P *du = scratch<P>(2, (TILE + 1) * ld_H), *hidden = scratch<P>(3, (TILE + 1) * F);
    S *sums = scratch<S>(4, TILE * apart<S>(std::max(F, D))), *bias = scratch<S>(11, D);
    U* pairs = scratch<U>(13, TILE * std::max(H, D));

    gather<P>(layer, grad_y, tile, dy);
    if (wants_down) into.first(dy, D, ld_D, pairs, to.down_first);
    times_matrix(part, layer.down, m, D, dy, matrix, sums);
    const S* down_bias = layer.down_bias ? layer.down_bias.read(e, bias) : nullptr;
    for (int64_t r = 0; r < m; ++r)
      row(tile.start + r, sums + r * apart<S>(F), dy + r * ld_D, down_bias, hidden + r * F, du + r * ld_H);
    if (odd) std::fill_n(hidden + m * F, F, P(0)), std::fill_n(du + m * ld_H, ld_H, P(0));
    if (wants_down) into.second(F, to.down_second, [&](int64_t r) { return hidden + r * F; });
    if (gradients.x) {
      times_matrix(part, layer.up, m, H, du, matrix + down_units, sums);
      for (int64_t r = 0; r < m; ++r) grad_x_rows.write(tile.start + r, sums + r * apart<S>(D));
    }
    if (wants_up) {
      into.first(du, H, ld_H, pairs, to.up_first);
      if (odd) std::fill_n(x, D, P(0));
      into.second(D, to.up_second, [&](int64_t r) -> const P* {
        if (r == m) return x;
        if (r + AHEAD < m) layer.x.prefetch(layer.token_ids[tile.start + r + AHEAD]);
        return layer.x.read(layer.token_ids[tile.start + r], x + (1 + r % 2) * D);
      });
    }
  }

  // Row n: from the gradient of its hidden units before its weight, `dh` (F), to its weighted hidden units (F)
  // and the gradient of its first product, `du` (H).
  void row(int64_t n, const S* dh, const P* dy, const S* bias, P* hidden, P* du) const {
    using V = Vectorized<S>;
    S *buffer = scratch<S>(6, 2 * H), *value = scratch<S>(7, F), *slope = scratch<S>(8, F);
    const S w = layer.weight<S>(n);
    const auto [gate, up] = layer.halves(kept.read(n, scratch<S>(5, H)), buffer);
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
    if (layer.gated && layer.interleaved) {
      for (int64_t f = 0; f < F; ++f) buffer[2 * f] = grads[f], buffer[2 * f + 1] = grad_up[f];
      convert(buffer, du, H);
    } else {
      convert(grads, du, H);
    }
    std::fill(du + H, du + room<P>(H), P(0));
  }

  // -- gradients of matrices

  // Rows `first` and on of the gradient of a part's expert: of the first matrix and its bias, or of the second
  // ones.
  void block(const Part& part, bool is_up, int64_t first, int64_t height) const {
    const int64_t e = part.expert, rows = is_up ? H : D, columns = is_up ? D : F;
    const int64_t count = std::min(height, rows - first);
    const Rows& grad = is_up ? gradients.up : gradients.down;
    const Rows& grad_bias = is_up ? gradients.up_bias : gradients.down_bias;
    S* sums = scratch<S>(0, BLOCK * PANEL);
    // Of this block, where the expert's rows do not end here, or did not begin.
    S* carried = part.begins && part.ends ? nullptr : carry.data_ptr<S>() + (is_up ? 0 : H * D + H);
    for (int64_t p = 0; grad && p < panels(columns); ++p) {
      const int64_t width = panel_width(columns, p);
      auto carried_row = [&](int64_t r) { return carried + (first + r) * columns + p * PANEL; };
      if (!part.begins)
        for (int64_t r = 0; r < count; ++r) std::copy_n(carried_row(r), width, sums + r * PANEL);
      for (int64_t c = part.first_chunk; c < part.last_chunk; ++c) {
        const Operands from = operands_of(c);
        const int64_t n = from.n, K = n * Operand<P>::per_unit;
        const U* A = (is_up ? from.up_first : from.down_first) + first * n;
        const U* B = (is_up ? from.up_second : from.down_second) + p * n * PANEL;
        const bool adds = c > part.first_chunk || !part.begins;
        product(count, width, K, reinterpret_cast<const P*>(A), K, B, PANEL, sums, PANEL, adds);
      }
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
    S *numbers = scratch<S>(1, CHUNK + 1), *carried_bias = carried + rows * columns + first;
    if (part.begins) std::fill_n(sums, count, S(0));
    else std::copy_n(carried_bias, count, sums);
    for (int64_t c = part.first_chunk; c < part.last_chunk; ++c) {
      const Operands from = operands_of(c);
      const Chunk& chunk = group->chunks[c];
      const int64_t m = chunk.stop - chunk.start;
      for (int64_t r = 0; r < count; ++r) {
        const U* of_row = (is_up ? from.up_first : from.down_first) + (first + r) * from.n;
        convert(reinterpret_cast<const P*>(of_row), numbers, m);
        for (int64_t k = 0; k < m; ++k)
          sums[r] += is_up ? numbers[k] : numbers[k] * layer.weight<S>(chunk.start + k);
      }
    }
    if (part.ends) grad_bias.write(e, sums, first, count);
    else std::copy_n(sums, count, carried_bias);
  }

  // Zeros for an expert without rows.
  void clear(int64_t e) const {
    if (layer.load(e)) return;
    auto clear = [&](const Rows& grad, int64_t rows) {
      if (!grad) return;
      grad.with_type([&](auto type) {
        using T = decltype(type);
        std::memset(static_cast<void*>(grad.row<T>(e * rows)), 0, rows * grad.width * sizeof(T));
      });
    };
    clear(gradients.up, H), clear(gradients.down, D);
    clear(gradients.up_bias, 1), clear(gradients.down_bias, 1);
  }
};

}  // namespace moe_ffn
