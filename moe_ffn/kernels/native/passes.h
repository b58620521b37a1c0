// Code that both passes share: dtypes, memory, layout of operands, products, threads, activations.
#pragma once

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/cpu/vec/functional.h>
#include <ATen/cpu/vec/vec.h>
#include <ATen/native/CPUBlas.h>
#include <ATen/ops/addmm_cpu_dispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/mm_cpu_dispatch.h>
#include <torch/csrc/stable/c/shim.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <exception>
#include <limits>
#include <optional>
#include <thread>
#include <vector>

namespace moe_ffn {

using at::BFloat16;
using at::Half;
using at::ScalarType;
using at::Tensor;
using at::vec::Vectorized;

// -- dtypes

// Operands of a product have type P. They are stored in units of 32 bits (64 for double). A unit is one number,
// or, in bfloat16, two successive terms of a sum, which is the layout that bfloat16 instructions read.
template <class P>
using Sum = std::conditional_t<std::is_same_v<P, double>, double, float>;
template <class P>
using Unit = Sum<P>;
template <class P>
struct Operand {
  static constexpr int64_t per_unit = std::is_same_v<P, BFloat16> ? 2 : 1;
};

// The number of units for `n` numbers, and `n` rounded up to whole units.
template <class P>
constexpr int64_t units(int64_t n) {
  return (n + Operand<P>::per_unit - 1) / Operand<P>::per_unit;
}
template <class P>
constexpr int64_t padded(int64_t n) {
  return units<P>(n) * Operand<P>::per_unit;
}

template <class From, class To>
inline void convert(const From* from, To* to, int64_t n) {
  if constexpr (std::is_same_v<From, To>) {
    std::memcpy(to, from, n * sizeof(To));
  } else if constexpr (std::is_same_v<From, BFloat16> && std::is_same_v<To, float>) {
    int64_t i = 0;
    constexpr int64_t step = Vectorized<BFloat16>::size();
    for (; i + step <= n; i += step) {
      auto [low, high] = at::vec::convert_bfloat16_float(Vectorized<BFloat16>::loadu(from + i));
      low.store(to + i);
      high.store(to + i + step / 2);
    }
    for (; i < n; ++i) to[i] = from[i];
#ifdef __AVX512BF16__
  } else if constexpr (std::is_same_v<From, float> && std::is_same_v<To, BFloat16>) {
    for (int64_t i = 0; i < n; i += 16) {
      const __mmask16 lanes = n - i < 16 ? (1 << (n - i)) - 1 : 0xFFFF;
      const auto numbers = _mm512_cvtneps_pbh(_mm512_maskz_loadu_ps(lanes, from + i));
      _mm256_mask_storeu_epi16(to + i, lanes, reinterpret_cast<__m256i>(numbers));
    }
#endif
  } else {
    at::vec::convert(from, to, n);
  }
}

// Contiguous rows of any dtype.
struct Rows {
  void* data = nullptr;
  ScalarType dtype = at::kFloat;
  int64_t width = 0;

  Rows() = default;
  explicit Rows(const Tensor& t) : data(t.data_ptr()), dtype(t.scalar_type()), width(t.size(-1)) {}
  explicit Rows(const std::optional<Tensor>& t) {
    if (t.has_value()) *this = Rows(*t);
  }
  explicit operator bool() const { return data != nullptr; }

  template <class T>
  T* row(int64_t i) const {
    return static_cast<T*>(data) + i * width;
  }

  template <class F>
  void with_type(const F& f) const {
    switch (dtype) {
      case at::kFloat:
        return f(float());
      case at::kDouble:
        return f(double());
      case at::kBFloat16:
        return f(BFloat16());
      case at::kHalf:
        return f(Half());
      default:
        TORCH_CHECK(false, "moe_ffn's kernels do not support ", dtype);
    }
  }

  // Prefetch a row, which the CPU cannot predict, because the rows of tokens are in random order.
  void prefetch(int64_t i, int64_t from = 0, int64_t n = -1) const {
    const int64_t size = c10::elementSize(dtype);
    const char* first = static_cast<const char*>(data) + (i * width + from) * size;
    for (int64_t b = 0; b < (n < 0 ? width : n) * size; b += 64) __builtin_prefetch(first + b);
  }

  // Return `n` numbers of row i, from column `from` on, as type T: in place, or converted into the buffer.
  template <class T>
  const T* read(int64_t i, T* buffer, int64_t from = 0, int64_t n = -1) const {
    if (dtype == c10::CppTypeToScalarType<T>::value) return row<T>(i) + from;
    read_other(i, buffer, from, n < 0 ? width : n);
    return buffer;
  }
  // Copy them in any case.
  template <class T>
  void copy(int64_t i, T* to, int64_t from = 0, int64_t n = -1) const {
    const T* numbers = read(i, to, from, n);
    if (numbers != to) std::memcpy(to, numbers, (n < 0 ? width : n) * sizeof(T));
  }
  template <class T>
  [[gnu::noinline]] void write(int64_t i, const T* values, int64_t from = 0, int64_t n = -1) const {
    with_type([&](auto type) { convert(values, row<decltype(type)>(i) + from, n < 0 ? width : n); });
  }

 private:
  // Like `write`, not inlined, so that compilation takes less time.
  template <class T>
  [[gnu::noinline]] void read_other(int64_t i, T* to, int64_t from, int64_t n) const {
    with_type([&](auto type) { convert(row<decltype(type)>(i) + from, to, n); });
  }
};

// -- memory

// Memory of one thread, reused between calls, because the first write to a new page is slow.
template <class T>
inline T* scratch(int slot, int64_t n) {
  static thread_local std::vector<std::vector<char>> slots(32);
  constexpr int64_t line = 64;
  auto& bytes = slots[slot];
  const size_t needed = n * sizeof(T) + line;
  if (bytes.size() < needed) bytes = std::vector<char>(needed);
  auto address = reinterpret_cast<uintptr_t>(bytes.data());
  return reinterpret_cast<T*>((address + line - 1) / line * line);
}

// -- layout of operands

// Number of columns in a panel of the second operand; a panel is stored row by row.
constexpr int64_t PANEL = MOE_FFN_PANEL;

// Write two rows (one, if a unit is one number) as one row of units.
template <class P>
inline void pair_rows(const P* first, const P* second, Unit<P>* to, int64_t n) {
  if constexpr (Operand<P>::per_unit == 1) {
    if (n == PANEL)
      std::memcpy(to, first, PANEL * sizeof(P));  // of constant size, so the compiler needs no call
    else
      std::memcpy(to, first, n * sizeof(P));
  } else {
    auto* __restrict out = reinterpret_cast<uint32_t*>(to);
    auto* __restrict low = reinterpret_cast<const uint16_t*>(first);
    auto* __restrict high = reinterpret_cast<const uint16_t*>(second);
    int64_t i = 0;
    for (; i + 16 <= n; i += 16)
#pragma GCC unroll 16
      for (int64_t j = i; j < i + 16; ++j) out[j] = low[j] | uint32_t(high[j]) << 16;
    for (; i < n; ++i) out[i] = low[i] | uint32_t(high[i]) << 16;
  }
}

template <class T>
inline void transpose(const T* from, int64_t ld_from, T* to, int64_t ld_to, int64_t rows, int64_t columns) {
#ifdef CPU_CAPABILITY_AVX2
  // at::vec has a float transpose for blocks of 8 by 8 only.
  if constexpr (std::is_same_v<T, float>) {
    int64_t whole_rows = rows / 8 * 8, whole_columns = columns / 8 * 8;
    for (int64_t i = 0; i < whole_rows; i += 8)
      for (int64_t j = 0; j < whole_columns; j += 8)
        at::vec::transpose_mxn<float, 8, 8>(from + i * ld_from + j, ld_from, to + j * ld_to + i, ld_to);
    for (int64_t i = 0; i < rows; ++i)
      for (int64_t j = i < whole_rows ? whole_columns : 0; j < columns; ++j)
        to[j * ld_to + i] = from[i * ld_from + j];
    return;
  }
#endif
  at::vec::transpose_mxn<T>(from, ld_from, to, ld_to, int(rows), int(columns));
}

inline int64_t panels(int64_t columns) { return (columns + PANEL - 1) / PANEL; }
inline int64_t panel_width(int64_t columns, int64_t panel) { return std::min(PANEL, columns - panel * PANEL); }

// Longer sums are split, so that a panel stays in the L2 cache.
constexpr int64_t MAX_SUM = 512;

// True if oneDNN multiplies tiles of this type: only on x86, unless the table of build.py or the user turned it off.
template <class P>
[[gnu::noinline]] inline bool has_tiles() {
  if (!MOE_FFN_ONEDNN || !at::globalContext().userEnabledMkldnn()) return false;
  static const bool has = [] {
    const P A[2] = {}, B[2 * PANEL] = {};
    float C[PANEL];
    try {
      at::native::cpublas::brgemm(1, 1, 2, 2, PANEL, PANEL, false, A, B, C, Operand<P>::per_unit == 2);
      at::native::cpublas::brgemm_release();
    } catch (const std::exception&) {  // from torch, or from oneDNN if it does not support the type
      return false;
    }
    return true;
  }();
  return has;
}

// True if the bits of an element of a product do not depend on the number of rows and columns, as they do in
// torch's own product.
template <class P>
inline bool is_bitwise() {
  if constexpr (std::is_same_v<P, double>)
    return false;
  else
    return has_tiles<P>();
}

// C (M, N) = A (M, K) B (K, N) for one panel, plus C if `adds`, with torch's own product.
[[gnu::noinline]] inline void torch_product(ScalarType dtype, int64_t M, int64_t N, int64_t K, const void* A,
                                            int64_t lda, const void* B, int64_t ldb, void* C, int64_t ldc,
                                            bool adds) {
  auto matrix = [&](const void* data, int64_t rows, int64_t columns, int64_t ld) {
    return at::from_blob(const_cast<void*>(data), {rows, columns}, {ld, 1}, dtype);
  };
  auto a = matrix(A, M, K, lda), b = matrix(B, K, N, ldb), c = matrix(C, M, N, ldc);
  if (adds)
    at::cpu::addmm_out(c, c, a, b);
  else
    at::cpu::mm_out(c, a, b);
}

inline void product(int64_t M, int64_t N, int64_t K, const float* A, int64_t lda, const float* B, int64_t ldb,
                    float* C, int64_t ldc, bool adds) {
  if (!has_tiles<float>()) return torch_product(at::kFloat, M, N, K, A, lda, B, ldb, C, ldc, adds);
  at::native::cpublas::brgemm(M, N, K, lda, ldb, ldc, adds, A, B, C, false);
}
inline void product(int64_t M, int64_t N, int64_t K, const BFloat16* A, int64_t lda, const float* B,
                    int64_t ldb, float* C, int64_t ldc, bool adds) {
  at::native::cpublas::brgemm(M, N, K, lda, ldb, ldc, adds, A, reinterpret_cast<const BFloat16*>(B), C, true);
}
inline void product(int64_t M, int64_t N, int64_t K, const double* A, int64_t lda, const double* B, int64_t ldb,
                    double* C, int64_t ldc, bool adds) {
  torch_product(at::kDouble, M, N, K, A, lda, B, ldb, C, ldc, adds);
}

// Stride of the rows of a tile. With a power of two, rows would evict each other from the cache.
template <class T>
constexpr int64_t padded_stride(int64_t n) {
  constexpr int64_t line = 64 / sizeof(T);
  return (n + line - 1) / line * line + line;
}

// C (M, N) = A (M, K) B, plus C if `adds`. In B, the rows of a panel have stride `ldb` and the panels stride
// `next`, in units.
template <class P>
inline void multiply(int64_t M, int64_t N, int64_t K, const P* A, const Unit<P>* B, int64_t ldb, int64_t next,
                     Sum<P>* C, int64_t ldc, bool adds = false) {
  // Round M up, because oneDNN compiles one kernel per number of rows; the additional rows are not used.
  M = (M + 7) / 8 * 8;
  for (int64_t panel = 0; panel < panels(N); ++panel)
    for (int64_t k = 0; k < K; k += MAX_SUM)
      product(M, panel_width(N, panel), std::min(MAX_SUM, padded<P>(K) - k), A + k, padded_stride<P>(K),
              B + panel * next + units<P>(k) * ldb, ldb, C + panel * PANEL, ldc, adds || k > 0);
}

// The same product for copied panels, which are contiguous.
template <class P>
inline void multiply(int64_t M, int64_t N, int64_t K, const P* A, const Unit<P>* B, Sum<P>* C, int64_t ldc,
                     bool adds = false) {
  multiply<P>(M, N, K, A, B, PANEL, units<P>(K) * PANEL, C, ldc, adds);
}

// Return a product C (M, N) as an operand of other products, with a row of zeros if they read rows in pairs.
template <class P, class F>
inline const P* to_operand(int64_t M, int64_t N, int slot, const F& multiply_to) {
  const int64_t ld_sums = padded_stride<Sum<P>>(N), ld = padded_stride<P>(N), rows = (M + 8) / 8 * 8;
  Sum<P>* sums = scratch<Sum<P>>(slot, rows * ld_sums);
  multiply_to(sums, ld_sums);
  if constexpr (std::is_same_v<P, Sum<P>>) return sums;
  P* result = scratch<P>(slot + 1, rows * ld);
  for (int64_t r = 0; r < M; ++r) {
    convert(sums + r * ld_sums, result + r * ld, N);
    std::fill(result + r * ld + N, result + r * ld + padded<P>(N), P(0));
  }
  if (padded<P>(M) > M) std::fill_n(result + M * ld, ld, P(0));
  return result;
}

// C (M, N) = A (M, K) times the transpose of a matrix (N, K) that was not copied. This computes the transpose of
// C as the matrix times the transpose of A, because it is fast to transpose few rows.
template <class P>
inline void multiply_transposed(int64_t M, int64_t N, int64_t K, const P* A, const P* matrix, Sum<P>* C,
                                int64_t ldc) {
  const int64_t columns = (M + 15) / 16 * 16, length = units<P>(K);
  Unit<P>* transposed = scratch<Unit<P>>(6, length * columns);
  Sum<P>* sums = scratch<Sum<P>>(7, N * columns);
  transpose(reinterpret_cast<const Unit<P>*>(A), units<P>(padded_stride<P>(K)), transposed, columns, M, length);
  for (int64_t i = 0; i < length; ++i)
    std::fill(transposed + i * columns + M, transposed + (i + 1) * columns, Unit<P>(0));
  constexpr int64_t ROWS = 32;  // rows at a time, while the next ones are prefetched from memory
  for (int64_t n = 0; n < N; n += ROWS) {
    const int64_t rows = std::min(ROWS, N - n), ahead = std::min(ROWS, N - n - rows) * K * sizeof(P);
    const char* next = reinterpret_cast<const char*>(matrix + (n + rows) * K);
    for (int64_t i = 0; i < ahead; i += 64) __builtin_prefetch(next + i, 0, 2);
    for (int64_t panel = 0; panel < panels(columns); ++panel)
      for (int64_t k = 0; k < K; k += MAX_SUM)
        product(rows, panel_width(columns, panel), std::min(MAX_SUM, K - k), matrix + n * K + k, K,
                transposed + units<P>(k) * columns + panel * PANEL, columns, sums + n * columns + panel * PANEL,
                columns, k > 0);
  }
  transpose(sums, columns, C, ldc, N, M);
}

// Copy with stores that bypass the caches, because a large result would evict everything else.
template <class T>
inline void stream(const T* from, T* to, int64_t n) {
#ifdef CPU_CAPABILITY_AVX512
  const int64_t lines = n * sizeof(T) / 64;
  if (reinterpret_cast<uintptr_t>(to) % 64 == 0 && lines * 64 == int64_t(n * sizeof(T))) {
    for (int64_t i = 0; i < lines; ++i)
      _mm512_stream_si512(reinterpret_cast<__m512i*>(to) + i,
                          _mm512_loadu_si512(reinterpret_cast<const __m512i*>(from) + i));
    return;
  }
#endif
  std::memcpy(to, from, n * sizeof(T));
}

// Make streamed stores visible before later stores of this thread.
inline void stream_done() {
#ifdef CPU_CAPABILITY_AVX512
  _mm_sfence();
#endif
}

// -- threads

// Tasks 0 to n - 1, divided among threads. Each thread has the same share in every loop over the same tasks, so
// that its data are in the caches of its core. A thread that has finished its share takes tasks of other shares.
class Tasks {
 public:
  // Share i begins with task ends[i - 1].
  explicit Tasks(std::vector<int64_t> ends) : ends(std::move(ends)), shares(this->ends.size()) {
    for (size_t i = 1; i < shares.size(); ++i) shares[i].next = this->ends[i - 1];
  }
  // Shares of equal size.
  Tasks(int64_t n, int64_t threads) : Tasks(even(n, threads)) {}

  template <class F>
  void work(int64_t own, const F& task) {
    const int64_t threads = shares.size();
    int64_t count = 0;
    for (int64_t k = 0; k < threads; ++k) {
      const int64_t share = (own + k) % threads;
      for (int64_t i; (i = shares[share].next.fetch_add(1)) < ends[share]; ++count) task(i);
    }
    if (count) done.fetch_add(count);
  }
  bool is_done() const { return done == ends.back(); }

 private:
  struct alignas(64) Share {
    std::atomic<int64_t> next{0};
  };
  static std::vector<int64_t> even(int64_t n, int64_t threads) {
    std::vector<int64_t> ends;
    for (int64_t i = 1; i <= threads; ++i) ends.push_back(i * n / threads);
    return ends;
  }

  std::vector<int64_t> ends;
  std::vector<Share> shares;
  std::atomic<int64_t> done{0};
};

// Run work(i) on thread i, for each of `threads`. It calls torch's library, because an OpenMP loop compiled by
// clang would use another OpenMP runtime with its own threads.
template <class F>
inline void in_parallel(int64_t threads, const F& work) {
  struct Release {  // releases the CPU's tile state, even if a task fails
    ~Release() { at::native::cpublas::brgemm_release(); }
  };
  std::atomic<bool> failed{false};
  std::exception_ptr error;
  auto range = [&](int64_t from, int64_t to) {
    const Release release;
    try {
      for (int64_t i = from; i < to; ++i) work(i);
    } catch (...) {
      if (!failed.exchange(true)) error = std::current_exception();
    }
  };
  auto call = [](int64_t from, int64_t to, void* range_) { (*static_cast<decltype(range)*>(range_))(from, to); };
  TORCH_CHECK(!torch_parallel_for(0, threads, 1, call, &range), "torch could not run moe_ffn's threads");
  if (error) std::rethrow_exception(error);
}

// Run task(i) for every i below `n`, on as many threads as torch uses.
template <class F>
inline void for_each(int64_t n, const F& task) {
  const int64_t threads = std::min<int64_t>(n, at::get_num_threads());
  if (!threads) return;
  Tasks tasks(n, threads);
  in_parallel(threads, [&](int64_t own) { tasks.work(own, task); });
}

// -- activations

enum class Activation : int64_t { relu, gelu, gelu_tanh, silu, relu_squared, sigmoid, identity, clamped };

template <class T, class F>
inline void map(const T* x, T* value, T* slope, int64_t n, F f) {
  using V = Vectorized<T>;
  for (int64_t i = 0; i < n; i += V::size()) {
    const int64_t count = std::min<int64_t>(V::size(), n - i);
    V derivative, result = f(count == V::size() ? V::loadu(x + i) : V::loadu(x + i, count), derivative);
    result.store(value + i, count);
    if (slope) derivative.store(slope + i, count);
  }
}

// Compute the activation of n numbers and, if `slope` is given, its derivative.
template <class T>
inline void activate(Activation activation, double alpha, double limit, const T* x, T* value, T* slope,
                     int64_t n) {
  using V = Vectorized<T>;
  const V zero(0), one(1), half(0.5);
  auto logistic = [&](V x) { return one / (one + x.neg().exp()); };
  switch (activation) {
    case Activation::relu:
      return map(x, value, slope, n, [&](V x, V& d) {
        d = V::blendv(zero, one, x > zero);
        return at::vec::maximum(x, zero);
      });
    case Activation::relu_squared:
      return map(x, value, slope, n, [&](V x, V& d) {
        const V r = at::vec::maximum(x, zero);
        d = r + r;
        return r * r;
      });
    case Activation::gelu:
      return map(x, value, slope, n, [&](V x, V& d) {
        const V below = half * (one + (x * V(M_SQRT1_2)).erf());
        d = below + x * V(M_2_SQRTPI * M_SQRT1_2 * 0.5) * (x * x * V(-0.5)).exp();
        return x * below;
      });
    case Activation::gelu_tanh:
      return map(x, value, slope, n, [&](V x, V& d) {
        const V beta(M_SQRT2 * M_2_SQRTPI * 0.5), kappa(0.044715);
        const V t = (beta * (x + kappa * x * x * x)).tanh();
        d = half * (one + t) + half * x * (one - t * t) * beta * (one + V(3) * kappa * x * x);
        return half * x * (one + t);
      });
    case Activation::silu:
      return map(x, value, slope, n, [&](V x, V& d) {
        const V s = logistic(x);
        d = s * (one + x * (one - s));
        return x * s;
      });
    case Activation::sigmoid:
      return map(x, value, slope, n, [&](V x, V& d) {
        const V s = logistic(x);
        d = s * (one - s);
        return s;
      });
    case Activation::identity:
      return map(x, value, slope, n, [&](V x, V& d) {
        d = one;
        return x;
      });
    case Activation::clamped:
      return map(x, value, slope, n, [&](V x, V& d) {
        const V g = at::vec::clamp_max(x, V(limit)), s = logistic(V(alpha) * g);
        d = V::blendv(s * (one + V(alpha) * g * (one - s)), zero, x > V(limit));
        return g * s;
      });
  }
}

}  // namespace moe_ffn
