// Function clones for several instruction sets, and conversion between half precision and float, ties to even, in
// integer arithmetic that compilers vectorize; arrays of float16 by the instructions of the processor, where it has some.
//
// On x86-64 GCC compiles each loop three times, for AVX-512, AVX2 and the baseline, and the best one is chosen when the
// library loads. QTK_ARCH=x86-64-v3 in the environment (any name that -march takes) builds every loop for that one
// instead, to measure as on a machine that has no more (one that has less cannot run it):
//     QTK_ARCH=x86-64-v3 python setup.py build_ext --inplace --force
// Elsewhere, as on ARM, the baseline has vectors (NEON) and each loop is compiled once.
#pragma once

#include <bit>
#include <cstdint>
#include <string_view>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define INLINE inline __attribute__((always_inline))

#define QTK_TEXT_OF(name) #name
#define QTK_TEXT(name) QTK_TEXT_OF(name)

#if defined(QTK_ARCH)
#define FOR_EVERY_CPU __attribute__((target("arch=" QTK_TEXT(QTK_ARCH))))
#elif defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define FOR_EVERY_CPU __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define FOR_EVERY_CPU  // the baseline of other processors is vectorized as it is
#endif

namespace qtk {

// Whether std::fma is one instruction in the loops that run: those for AVX2 and AVX-512, or on another processor.
INLINE bool has_fma() {
#if !defined(__x86_64__)
  return true;
#elif defined(QTK_ARCH)
  constexpr std::string_view arch = QTK_TEXT(QTK_ARCH);
  return arch == "x86-64-v3" || arch == "x86-64-v4";
#elif defined(__GNUC__) && !defined(__clang__)
  return __builtin_cpu_supports("x86-64-v3");
#else
  return false;
#endif
}

// Half precision by its bits.
struct BFloat16 {
  uint16_t bits;
};
struct Half {
  uint16_t bits;
};

INLINE float as_float(uint32_t bits) { return std::bit_cast<float>(bits); }
INLINE uint32_t as_bits(float value) { return std::bit_cast<uint32_t>(value); }

INLINE float load(float value) { return value; }

INLINE float load(BFloat16 value) { return as_float(static_cast<uint32_t>(value.bits) << 16); }

INLINE float load(Half value) {
  const uint32_t sign = static_cast<uint32_t>(value.bits & 0x8000u) << 16;
  const uint32_t rest = value.bits & 0x7fffu;  // exponent and mantissa
  const uint32_t bias = 112u << 23;
  const uint32_t normal = (rest << 13) + bias + (rest >= 0x7c00u ? bias : 0u);  // inf and NaN stay what they are
  const float small = as_float(0x3f000000u + rest) - 0.5f;  // a subnormal's unit is that of a float at 0.5
  return as_float(sign | (rest < 0x0400u ? as_bits(small) : normal));
}

INLINE void store(float value, float* into) { *into = value; }

// In 16-bit arithmetic, because twice as many lanes fit into a register. The upper half of a quiet NaN is a NaN too,
// and stays one if it is not rounded up from all ones.
INLINE void store(float value, BFloat16* into) {
  const uint32_t bits = as_bits(value);
  const uint16_t upper = static_cast<uint16_t>(bits >> 16), lower = static_cast<uint16_t>(bits);
  const uint16_t sticky = static_cast<uint16_t>(lower | (upper & 1u));  // a half and more, or a half and odd
  const bool up = sticky > 0x8000u && (upper | 0x8000u) != 0xffffu;
  into->bits = static_cast<uint16_t>(upper + (up ? 1u : 0u));
}

// The same in 32-bit arithmetic: the upper half of the result is the BFloat16.
INLINE uint32_t rounded_to_upper(float value) {
  const uint32_t bits = as_bits(value), increment = 0x7fffu + (bits >> 16 & 1u);
  return bits + (value == value ? increment : 0u);
}

INLINE void store(float value, Half* into) {
  const uint32_t bits = as_bits(value);
  const uint32_t rest = bits & 0x7fffffffu;
  const uint32_t normal = (rest - (112u << 23) + 0x0fffu + (rest >> 13 & 1u)) >> 13;
  const uint32_t small = as_bits(as_float(rest) + 0.5f) - 0x3f000000u;
  const uint32_t finite = rest < 0x38800000u ? small : normal;                                 // below 2⁻¹⁴
  const uint32_t half = rest > 0x7f800000u ? 0x7e00u : (rest >= 0x47800000u ? 0x7c00u : finite);  // NaN, from 2¹⁶ on
  into->bits = static_cast<uint16_t>(half | (bits >> 16 & 0x8000u));
}

// Many at a time.
template <class T>
INLINE void load_all(const T* values, int64_t n, float* into) {
  for (int64_t i = 0; i < n; ++i) {
    into[i] = load(values[i]);
  }
}

template <class T>
INLINE void store_all(const float* values, int64_t n, T* into) {
  for (int64_t i = 0; i < n; ++i) {
    store(values[i], into + i);
  }
}

#if defined(__x86_64__)
// Processors with AVX2 have instructions for Half: the same numbers, but other bits of a NaN. GCC 12 does not vectorize
// _Float16 with them. These return how many elements they did.
__attribute__((target("avx2,f16c"))) inline int64_t load_eights(const Half* values, int64_t n, float* into) {
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    _mm256_storeu_ps(into + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(values + i))));
  }
  return i;
}

__attribute__((target("avx2,f16c"))) inline int64_t store_eights(const float* values, int64_t n, Half* into) {
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    const __m128i halves = _mm256_cvtps_ph(_mm256_loadu_ps(values + i), _MM_FROUND_TO_NEAREST_INT);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(into + i), halves);
  }
  return i;
}

INLINE void load_all(const Half* values, int64_t n, float* into) {
  const int64_t done = __builtin_cpu_supports("avx2") ? load_eights(values, n, into) : 0;
  load_all<Half>(values + done, n - done, into + done);
}

INLINE void store_all(const float* values, int64_t n, Half* into) {
  const int64_t done = __builtin_cpu_supports("avx2") ? store_eights(values, n, into) : 0;
  store_all<Half>(values + done, n - done, into + done);
}
#endif

}  // namespace qtk
