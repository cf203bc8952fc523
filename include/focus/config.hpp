// Version, instruction set and configuration of the library.
//
// Configuration macros, all optional, to be defined before the first include (or on the command
// line), alike in all translation units of a program:
//   FOCUS_FORCE_GENERIC   use plain C++ even where the compiler offers a vector instruction set.
//   FOCUS_PANIC(text)     called with a null-terminated text instead of a throw when exceptions are
//   off; must not return. Without it the text goes to stderr, and std::abort is called.
#pragma once

#if __cplusplus < 202002L && !(defined(_MSVC_LANG) && _MSVC_LANG >= 202002L)
#error "focus needs C++20: compile with -std=c++20."
#endif

#define FOCUS_VERSION_MAJOR 0
#define FOCUS_VERSION_MINOR 1
#define FOCUS_VERSION_PATCH 0

// One macro per feature, each tested by itself: -mavx2 implies neither FMA nor F16C.
#if defined(__AVX2__) && !defined(FOCUS_FORCE_GENERIC)
#define FOCUS_HAS_AVX2 1
#else
#define FOCUS_HAS_AVX2 0
#endif
#if defined(__FMA__) && !defined(FOCUS_FORCE_GENERIC)
#define FOCUS_HAS_FMA 1
#else
#define FOCUS_HAS_FMA 0
#endif
#if defined(__F16C__) && !defined(FOCUS_FORCE_GENERIC)
#define FOCUS_HAS_F16C 1
#else
#define FOCUS_HAS_F16C 0
#endif
// 512-bit registers may be out of bounds where AVX-512 is not (-mno-evex512, -mavx10.1-256).
// Clang 18 and 19, GCC 14 and 15 say where they are allowed; older and newer compilers know no such
// limit.
#if !defined(__EVEX512__) &&                                                   \
    (defined(__EVEX256__) ||                                                   \
     (defined(__clang__) && __clang_major__ >= 18 && __clang_major__ <= 19) || \
     (!defined(__clang__) && defined(__GNUC__) && __GNUC__ >= 14 && __GNUC__ <= 15))
#define FOCUS_HAS_512_BITS 0
#else
#define FOCUS_HAS_512_BITS 1
#endif
#if FOCUS_HAS_512_BITS && defined(__AVX512F__) && defined(__AVX512BW__) && \
    defined(__AVX512DQ__) && defined(__AVX512VL__) && !defined(FOCUS_FORCE_GENERIC)
#define FOCUS_HAS_AVX512 1
#else
#define FOCUS_HAS_AVX512 0
#endif
// Clang has spelled them without the underscore. Every processor with tiles of bfloat16 has
// AVX512_BF16, whose conversions go with them.
#if FOCUS_HAS_AVX512 && defined(__AVX512BF16__) && defined(__x86_64__) && \
    ((defined(__AMX_TILE__) && defined(__AMX_BF16__)) ||                  \
     (defined(__AMXTILE__) && defined(__AMXBF16__)))
#define FOCUS_HAS_AMX 1
#else
#define FOCUS_HAS_AMX 0
#endif
#if defined(__aarch64__) && defined(__ARM_NEON) && !defined(FOCUS_FORCE_GENERIC)
#define FOCUS_HAS_NEON 1
#else
#define FOCUS_HAS_NEON 0
#endif
// Arm's products of bfloat16 matrices (BFMMLA).
#if FOCUS_HAS_NEON && defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#define FOCUS_HAS_BFMMLA 1
#else
#define FOCUS_HAS_BFMMLA 0
#endif
// Whether bfloat16 can be multiplied as it is.
#define FOCUS_HAS_BFLOAT16_PRODUCTS (FOCUS_HAS_AMX || FOCUS_HAS_BFMMLA)
// -ffast-math, or its part that takes NaN and infinity for impossible.
#if defined(__FAST_MATH__) || (defined(__FINITE_MATH_ONLY__) && __FINITE_MATH_ONLY__ > 0)
#define FOCUS_HAS_FAST_MATH 1
#else
#define FOCUS_HAS_FAST_MATH 0
#endif
#if defined(__cpp_exceptions)
#define FOCUS_HAS_EXCEPTIONS 1
#else
#define FOCUS_HAS_EXCEPTIONS 0
#endif

// What the compiler may use of its own accord in code that names no instruction set: the levels of
// x86-64 (or SVE), instructions for bits, and what came after the first AVX-512.
#if defined(__AVX512F__)
#define FOCUS_PLAIN_CODE_LEVEL 5
#elif defined(__AVX2__)
#define FOCUS_PLAIN_CODE_LEVEL 4
#elif defined(__AVX__)
#define FOCUS_PLAIN_CODE_LEVEL 3
#elif defined(__SSE4_1__) || defined(__POPCNT__)
#define FOCUS_PLAIN_CODE_LEVEL 2
#elif defined(__SSE3__) || defined(__ARM_FEATURE_SVE)
#define FOCUS_PLAIN_CODE_LEVEL 1
#else
#define FOCUS_PLAIN_CODE_LEVEL 0
#endif
#if defined(__BMI__) || defined(__BMI2__) || defined(__LZCNT__) || defined(__MOVBE__)
#define FOCUS_PLAIN_CODE_BITS 1
#else
#define FOCUS_PLAIN_CODE_BITS 0
#endif
#if defined(__AVX512FP16__)
#define FOCUS_PLAIN_CODE_LATER 3
#elif defined(__AVX512VPOPCNTDQ__) || defined(__AVX512BITALG__) || defined(__AVX512VBMI2__) || \
    defined(__AVX512VBMI__) || defined(__AVX512IFMA__)
#define FOCUS_PLAIN_CODE_LATER 2
#elif defined(__AVX512VNNI__) || defined(__AVX512BF16__) || defined(__AVXVNNI__) || \
    defined(__GFNI__)
#define FOCUS_PLAIN_CODE_LATER 1
#else
#define FOCUS_PLAIN_CODE_LATER 0
#endif

// Plain data (views' indices, options, 16-bit numbers, masks) lives in an inline namespace named
// after the version. Everything with a body lives in one that is named after the features above,
// too. So two translation units in one program share no function unless version and features are
// the same, and options can be handed from one to the other where the version is.
#define FOCUS_PASTE_VERSION_(major, minor, patch) v##major##_##minor##_##patch
#define FOCUS_EXPAND_VERSION_(...) FOCUS_PASTE_VERSION_(__VA_ARGS__)
#define FOCUS_VERSION_NAMESPACE \
  FOCUS_EXPAND_VERSION_(FOCUS_VERSION_MAJOR, FOCUS_VERSION_MINOR, FOCUS_VERSION_PATCH)

#define FOCUS_PASTE_ABI_(version, avx2, fma, f16c, avx512, amx, neon, bfmmla, level, bits, later, \
                         fast, throws)                                                            \
  version##_##avx2##fma##f16c##avx512##amx##neon##bfmmla##_##level##bits##later##_##fast##throws
#define FOCUS_EXPAND_ABI_(...) FOCUS_PASTE_ABI_(__VA_ARGS__)
#define FOCUS_ABI                                                                           \
  FOCUS_EXPAND_ABI_(FOCUS_VERSION_NAMESPACE, FOCUS_HAS_AVX2, FOCUS_HAS_FMA, FOCUS_HAS_F16C, \
                    FOCUS_HAS_AVX512, FOCUS_HAS_AMX, FOCUS_HAS_NEON, FOCUS_HAS_BFMMLA,      \
                    FOCUS_PLAIN_CODE_LEVEL, FOCUS_PLAIN_CODE_BITS, FOCUS_PLAIN_CODE_LATER,  \
                    FOCUS_HAS_FAST_MATH, FOCUS_HAS_EXCEPTIONS)

// A template that is not inlined into the loop over a tile costs more than the loop: these say what
// must be.
#if defined(__GNUC__) || defined(__clang__)
#define FOCUS_ALWAYS_INLINE inline __attribute__((always_inline))
#define FOCUS_LAMBDA_INLINE __attribute__((always_inline))
#define FOCUS_NOINLINE __attribute__((noinline))
#elif defined(_MSC_VER)
#define FOCUS_ALWAYS_INLINE __forceinline
#define FOCUS_LAMBDA_INLINE
#define FOCUS_NOINLINE __declspec(noinline)
#else
#define FOCUS_ALWAYS_INLINE inline
#define FOCUS_LAMBDA_INLINE
#define FOCUS_NOINLINE
#endif
