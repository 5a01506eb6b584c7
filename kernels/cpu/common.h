/* Included by every C kernel.

   A source is compiled once for each element type it is used with: T is that type (U a second one), SUFFIX its name,
   and FN(softmax) the name softmax_float32. Functions come in two kinds:

     name(inputs..., outputs..., numbers...[, char *scratch][, char *prepared])     one thread, on one item or on arrays
     name(const Team *team, inputs..., outputs..., numbers...)                      all threads, which divide the work

   They return void. Those that read indices return int: 1 if one is out of range. Before its first item a thread calls
   name_prepare(shared inputs..., numbers..., char *prepared), if there is one, which computes what all items need.

   Arrays are C-contiguous and do not overlap, unless a comment says so. */

#pragma once

#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#define PASTE_(a, b) a##b
#define PASTE(a, b) PASTE_(a, b)
#define FN(name) PASTE(name, SUFFIX)

/* The threads that run a program together; each has its own copy of this. */
typedef struct {
    int64_t thread, threads;
    char *scratch; /* this thread's own bytes, aligned to 64 */
} Team;

/* Bytes of a vector register. The compiler's vector extensions turn vectors of this size into AVX-512, AVX2 or NEON. */
#if defined(__AVX512F__)
#define VECTOR_BYTES 64
#define VECTOR_REGISTERS 32
#elif defined(__AVX__)
#define VECTOR_BYTES 32
#define VECTOR_REGISTERS 16
#elif defined(__aarch64__)
#define VECTOR_BYTES 16
#define VECTOR_REGISTERS 32
#else
#define VECTOR_BYTES 16
#define VECTOR_REGISTERS 16
#endif

#define CACHE_LINE 64 /* bytes; some processors have longer ones */

/* A function that is inlined, so that its constant parameters are known. UNROLL unrolls a loop of constant length, so
   that its sums stay in registers. */
#define SPECIALISED static inline __attribute__((always_inline))
#ifdef __clang__
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL _Pragma("GCC unroll 32")
#endif

/* The type in which sums of many elements of TYPE are added, so that their error does not grow with the number. */
#define TOTAL_OF(TYPE) __typeof__(_Generic((TYPE)0, float: 0.0, double: 0.0, default: (TYPE)0))

static inline int64_t min_i64(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t max_i64(int64_t a, int64_t b) { return a > b ? a : b; }
static inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

/* Part `team->thread` of n things in equal parts, as [begin, end). */
static inline void my_share(const Team *team, int64_t n, int64_t *begin, int64_t *end) {
    *begin = n * team->thread / team->threads;
    *end = n * (team->thread + 1) / team->threads;
}

/* The same in multiples of 64 elements, which are whole cache lines: no two threads write to the same one. */
static inline void my_cache_lines(const Team *team, int64_t n, int64_t *begin, int64_t *end) {
    my_share(team, (n + 63) / 64, begin, end);
    *begin = min_i64(*begin * 64, n);
    *end = min_i64(*end * 64, n);
}
