// The Newton-Schulz iteration of the optimizer Muon, for CPUs that are slower in bfloat16 than in float32.
//
// M matrices, m the shorter and n the longer side of a matrix

#pragma once

#include "layer.h"

namespace moe_ffn {

// Round numbers to bfloat16.
inline void round_numbers(float* numbers, int64_t n) {
  auto* narrow = scratch<BFloat16>(5, n);
  convert(numbers, narrow, n);
  convert(narrow, numbers, n);
}

// Return bfloat16 matrices (M, O, I): x divided by its norm, then `steps` times x = a x + (b g + c g g) x with
// g = x x^T, where x is the matrix, or its transpose if that is wider. Products are float32, and their results
// are rounded to bfloat16. One thread computes a matrix, whose operands stay in the L2 cache. Because g and
// g g are symmetric, half of each is computed.
inline Tensor newton_schulz(const Tensor& matrices, int64_t steps, double a, double b, double c, double eps) {
  TORCH_CHECK(matrices.dim() == 3, "matrices are ", matrices.sizes(), ", but must have 3 dimensions");
  const Tensor contiguous = matrices.contiguous(),
               result = at::empty(matrices.sizes(), matrices.options().dtype(at::kBFloat16));
  const Rows from(contiguous), to(result);
  const int64_t height = matrices.size(1), width = matrices.size(2), m = std::min(height, width),
                n = std::max(height, width), ld_m = padded_stride<float>(m), ld_n = padded_stride<float>(n);
  for_each(matrices.size(0), [&](int64_t matrix) {
    const int64_t rows = (m + 7) / 8 * 8;  // products read and write multiples of 8 rows
    float *x = scratch<float>(0, rows * ld_n), *gram = scratch<float>(1, rows * ld_m),
          *square = scratch<float>(2, rows * ld_m), *sums = scratch<float>(3, rows * ld_n),
          *copy = scratch<float>(4, std::max(panels(m) * n, panels(n) * m) * PANEL);
    // Call f(first, count) for the rows of each tile, from row `start` on.
    const auto each_tile = [&](int64_t start, auto f) {
      for (int64_t r = start; r < m; r += TILE) f(r, std::min(TILE, m - r));
    };
    const auto copy_panels = [&](const float* B, int64_t ld, int64_t columns) {
      for (int64_t panel = 0; panel < panels(columns); ++panel)
        for (int64_t k = 0; k < m; ++k)
          std::memcpy(copy + (panel * m + k) * PANEL, B + k * ld + panel * PANEL,
                      panel_width(columns, panel) * sizeof(float));
    };
    // C (m, m) = A (m, K) times the copied panels, if C is symmetric.
    const auto symmetric = [&](const float* A, int64_t K, float* C) {
      for (int64_t panel = 0; panel < panels(m); ++panel) {
        const int64_t first = panel * PANEL, columns = panel_width(m, panel), below = first + columns;
        each_tile(first, [&](int64_t r, int64_t count) {
          multiply<float>(count, columns, K, A + r * padded_stride<float>(K), copy + panel * PANEL * K,
                          C + r * ld_m + first, ld_m);
        });
        if (below < m)
          transpose(C + below * ld_m + first, ld_m, C + first * ld_m + below, ld_m, m - below, columns);
      }
    };
    if (height == m) {
      for (int64_t r = 0; r < m; ++r) from.copy(matrix * m + r, x + r * ld_n);
    } else {
      for (int64_t r = 0; r < n; ++r) from.copy(matrix * n + r, copy + r * m);
      transpose(copy, m, x, ld_n, n, m);
    }
    float norm = 0;
    for (int64_t r = 0; r < m; ++r) {
      using V = Vectorized<float>;
      round_numbers(x + r * ld_n, n);
      norm += at::vec::map_reduce_all<float>([](V v) { return v * v; }, [](V v, V w) { return v + w; },
                                             x + r * ld_n, n);
    }
    norm = std::max(float(BFloat16(std::sqrt(norm))), float(eps));
    for (int64_t r = 0; r < m; ++r) {
      for (int64_t i = r * ld_n; i < r * ld_n + n; ++i) x[i] /= norm;
      round_numbers(x + r * ld_n, n);
    }
    for (int64_t step = 0; step < steps; ++step) {
      for (int64_t panel = 0; panel < panels(m); ++panel)
        transpose(x + panel * PANEL * ld_n, ld_n, copy + panel * PANEL * n, PANEL, panel_width(m, panel), n);
      symmetric(x, n, gram);
      for (int64_t r = 0; r < m; ++r) round_numbers(gram + r * ld_m, m);
      copy_panels(gram, ld_m, m);
      symmetric(gram, m, square);
      for (int64_t r = 0; r < m; ++r) {
        for (int64_t i = r * ld_m; i < r * ld_m + m; ++i) square[i] = float(b) * gram[i] + float(c) * square[i];
        round_numbers(square + r * ld_m, m);
      }
      copy_panels(x, ld_n, n);
      each_tile(0, [&](int64_t r, int64_t count) {
        multiply<float>(count, n, m, square + r * ld_m, copy, sums + r * ld_n, ld_n);
      });
      for (int64_t r = 0; r < m; ++r) {
        for (int64_t i = r * ld_n; i < r * ld_n + n; ++i) x[i] = float(a) * x[i] + sums[i];
        round_numbers(x + r * ld_n, n);
      }
    }
    if (height == m) {
      for (int64_t r = 0; r < m; ++r) to.write(matrix * m + r, x + r * ld_n);
    } else {
      transpose(x, ld_n, copy, m, m, n);
      for (int64_t r = 0; r < n; ++r) to.write(matrix * n + r, copy + r * m);
    }
  });
  return result;
}

}  // namespace moe_ffn
