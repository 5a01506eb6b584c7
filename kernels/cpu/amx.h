/* Products of float32 matrices by AMX, the matrix unit of some x86 processors. It multiplies bfloat16 and adds in
   float32, with sixteen times as many products a cycle as the vector unit.

   A number is the sum of three terms, bfloat16 numbers that are rounded to nearest. Together they hold all 24 bits. Of
   the nine products of terms the six largest are added; the other three are below 2^-24 of the product (Henry, Tang and
   Heinecke, "Leveraging the bfloat16 Artificial Intelligence Datatype", 2019). A sum has fewer roundings than one by
   multiply-adds: the matrix unit adds 32 products before it adds to the result.

   Two kinds of numbers need care. A number that is not finite, or not finite as bfloat16, gives a result that is not
   finite; callers compute such results again. AMX takes subnormal numbers for 0. So numbers below 2^-110 lose their
   last bits, and results below 2^-126 are 0.

   A tile register has 16 rows of 64 bytes. TILE_MULTIPLY adds to a tile of C, 16 x 16 numbers, the product of a tile of
   A, [row][k], and a tile of B, [k / 2][column][k % 2], both with 32 bfloat16 numbers along k. So the unit of packed
   memory is a pair: two neighbours along k, in 32 bits. */

#pragma once

#include "vectors.h"

#define IS_float 1
#if defined(AMX_PERMITTED) && defined(__AMX_BF16__) && PASTE(IS_, T)
#define AMX 1

enum {
    TERMS = 3,
    SIDE = 16,               /* rows of a tile register, and its columns of 32 bits */
    SQUARE = SIDE * SIDE,    /* elements of a tile register */
    LINES = 2 * SIDE,        /* rows of a packed strip of A, and columns of a packed panel of B */
    CHUNK = 2 * SIDE,        /* numbers along k of a tile of A or B */
    CHUNK_PAIRS = LINES / SIDE * TERMS * SQUARE, /* of a strip or panel, for each CHUNK of k */
    MIN_AMX_DEPTH = 64,      /* shorter sums are as fast by multiply-adds, because packing takes most of the time */
};

#define TILE_LOAD(tile, from) \
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #tile : : "r"(from), "r"((int64_t)SIDE * 4) : "memory")
#define TILE_STORE(tile, to, ld) \
    __asm__ volatile("tilestored %%tmm" #tile ", (%0,%1,1)" : : "r"(to), "r"((int64_t)(ld) * 4) : "memory")
#define TILE_ZERO(tile) __asm__ volatile("tilezero %%tmm" #tile : :)
#define TILE_MULTIPLY(c, a, b) __asm__ volatile("tdpbf16ps %%tmm" #b ", %%tmm" #a ", %%tmm" #c : :)

/* Tile registers are used between these two calls, in each thread. */
static void begin_tiles(void) {
    struct {
        uint8_t palette, start_row, reserved[14];
        uint16_t row_bytes[16];
        uint8_t rows[16];
    } shapes = {.palette = 1};
    for (int tile = 0; tile < 8; tile++) shapes.row_bytes[tile] = SIDE * 4, shapes.rows[tile] = SIDE;
    __asm__ volatile("ldtilecfg %0" : : "m"(shapes));
}
static void end_tiles(void) { __asm__ volatile("tilerelease" : :); }

typedef uint16_t Halves __attribute__((vector_size(VECTOR_BYTES)));
#define ODD_INDICES \
    1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31, \
    33, 35, 37, 39, 41, 43, 45, 47, 49, 51, 53, 55, 57, 59, 61, 63
#ifdef __clang__
#define UPPER_HALVES(a, b) ((Lanes)__builtin_shufflevector((Halves)(a), (Halves)(b), ODD_INDICES))
#else
#define UPPER_HALVES(a, b) ((Lanes)__builtin_shuffle((Halves)(a), (Halves)(b), (Halves){ODD_INDICES}))
#endif

/* The terms of numbers, as the upper halves of lanes. The last one is exact. It is not rounded, because rounding
   changes some NaN to 0. */
SPECIALISED void split(Vector x, Lanes terms[TERMS]) {
    UNROLL for (int t = 0; t < TERMS - 1; t++) {
        terms[t] = ((Lanes)x + 0x8000) & 0xffff0000;
        x -= (Vector)terms[t];
    }
    terms[TERMS - 1] = (Lanes)x;
}

/* Packs 16 lines, rows of A or columns of B, over a chunk of k: a tile for each term. With k_major element (line, k) is
   x[line * ld + k], otherwise x[k * ld + line]. */
SPECIALISED void pack_square(const T *x, int64_t ld, const bool k_major, const bool of_b, uint32_t *to) {
#pragma GCC unroll 1
    for (int i = 0; i < SIDE; i++) { /* a line, or a pair */
        Lanes first[TERMS], second[TERMS];
        split(load(k_major ? x + i * ld : x + 2 * i * ld), first);
        split(load(k_major ? x + i * ld + SIDE : x + (2 * i + 1) * ld), second);
        UNROLL for (int t = 0; t < TERMS; t++)
            store((T *)to + t * SQUARE + i * SIDE, (Vector)(k_major ? UPPER_HALVES(first[t], second[t])
                                                                    : first[t] >> 16 | (second[t] & 0xffff0000)));
    }
    if (k_major != of_b) return;
#pragma GCC unroll 1
    for (int t = 0; t < TERMS; t++, to += SQUARE) {
        Vector square[SIDE];
        UNROLL for (int i = 0; i < SIDE; i++) square[i] = load((T *)to + i * SIDE);
        shuffle(square, SIDE);
        UNROLL for (int i = 0; i < SIDE; i++) store((T *)to + i * SIDE, square[i]);
    }
}

/* Packs up to LINES lines over `depth` numbers of k: [chunk][half of the lines][term][tile], with zeros at the end. */
SPECIALISED void pack_lines(const T *x, int64_t ld, const bool k_major, const bool of_b, int64_t lines, int64_t depth,
                            uint32_t *to) {
    for (int64_t p = 0; p < depth; p += CHUNK)
        for (int64_t line = 0; line < LINES; line += SIDE, to += TERMS * SQUARE) {
            const int64_t count = min_i64(SIDE, lines - line), steps = min_i64(CHUNK, depth - p);
            if (count <= 0) continue;
            const T *from = x + (k_major ? line * ld + p : p * ld + line);
            if (count == SIDE && steps == CHUNK) {
                pack_square(from, ld, k_major, of_b, to);
                continue;
            }
            T square[SIDE * CHUNK] = {0};
            if (k_major)
                for (int64_t i = 0; i < count; i++) memcpy(square + i * CHUNK, from + i * ld, steps * sizeof(T));
            else
                for (int64_t i = 0; i < steps; i++) memcpy(square + i * SIDE, from + i * ld, count * sizeof(T));
            pack_square(square, k_major ? CHUNK : SIDE, k_major, of_b, to);
        }
}

static void pack_strip(const T *a, int64_t ld, bool k_major, int64_t rows, int64_t depth, uint32_t *to) {
    if (k_major)
        pack_lines(a, ld, true, false, rows, depth, to);
    else
        pack_lines(a, ld, false, false, rows, depth, to);
}
static void pack_panel(const T *b, int64_t ld, bool k_major, int64_t columns, int64_t depth, uint32_t *to) {
    if (k_major)
        pack_lines(b, ld, true, true, columns, depth, to);
    else
        pack_lines(b, ld, false, true, columns, depth, to);
}

/* Lines that will be written or read, which a product prefetches: some for each chunk, because a core waits when many
   lines are missing at once. */
typedef struct {
    int64_t count;
    const T *lines[512];
} Lines;

/* Tile registers 0 to 3 = the product of a strip and a panel, of one or two tiles each. The products of small terms are
   added before those of large ones. Between two multiplications only one operand changes. */
SPECIALISED void amx_sum(const int down, const int across, int64_t chunks, const uint32_t *a, const uint32_t *b,
                         const Lines *ahead) {
#define LOAD_A(term)                                                           \
    TILE_LOAD(4, a + (term) * SQUARE);                                         \
    if (down == 2) TILE_LOAD(5, a + (TERMS + (term)) * SQUARE)
#define LOAD_B(term)                                                           \
    TILE_LOAD(6, b + (term) * SQUARE);                                         \
    if (across == 2) TILE_LOAD(7, b + (TERMS + (term)) * SQUARE)
#define MULTIPLY                                                               \
    TILE_MULTIPLY(0, 4, 6);                                                    \
    if (across == 2) TILE_MULTIPLY(1, 4, 7);                                   \
    if (down == 2) TILE_MULTIPLY(2, 5, 6);                                     \
    if (down == 2 && across == 2) TILE_MULTIPLY(3, 5, 7)
    TILE_ZERO(0);
    TILE_ZERO(1);
    TILE_ZERO(2);
    TILE_ZERO(3);
    const int64_t each = ceil_div(ahead->count, chunks); /* lines of a chunk */
    int64_t line = 0;
    for (int64_t p = 0; p < chunks; p++, a += CHUNK_PAIRS, b += CHUNK_PAIRS) {
        for (const int64_t end = min_i64(line + each, ahead->count); line < end; line++)
            __builtin_prefetch(ahead->lines[line], 1);
        LOAD_A(0); LOAD_B(2); MULTIPLY;
        LOAD_B(1); MULTIPLY;
        LOAD_A(1); MULTIPLY;
        LOAD_B(0); MULTIPLY;
        LOAD_A(2); MULTIPLY;
        LOAD_A(0); MULTIPLY;
    }
}

/* c[rows][columns] = (or, with `add`, +=) the product of a strip and a panel, each of up to LINES lines. */
static void amx_tile(int64_t rows, int64_t columns, int64_t depth, const uint32_t *strip, const uint32_t *panel, T *c,
                     int64_t ld, bool add, const Lines *ahead) {
    const int64_t chunks = ceil_div(depth, CHUNK);
    if (rows > SIDE && columns > SIDE)
        amx_sum(2, 2, chunks, strip, panel, ahead);
    else if (rows > SIDE)
        amx_sum(2, 1, chunks, strip, panel, ahead);
    else if (columns > SIDE)
        amx_sum(1, 2, chunks, strip, panel, ahead);
    else
        amx_sum(1, 1, chunks, strip, panel, ahead);
    const bool direct = rows == LINES && columns == LINES && !add;
    T sums[LINES * LINES] __attribute__((aligned(64))), *to = direct ? c : sums;
    const int64_t to_ld = direct ? ld : LINES;
    TILE_STORE(0, to, to_ld);
    TILE_STORE(1, to + SIDE, to_ld);
    TILE_STORE(2, to + SIDE * to_ld, to_ld);
    TILE_STORE(3, to + SIDE * to_ld + SIDE, to_ld);
    if (direct) return;
    for (int64_t i = 0; i < rows; i++, c += ld) {
        const T *row = sums + i * LINES;
        if (columns == LINES)
            UNROLL for (int j = 0; j < LINES; j += LANES)
                store(c + j, add ? load(c + j) + load(row + j) : load(row + j));
        else
            for (int64_t j = 0; j < columns; j++) c[j] = add ? c[j] + row[j] : row[j];
    }
}

/* Whether all numbers of a row are finite. */
static bool all_finite(const T *row, int64_t columns) {
    Bits found = 0;
    for (int64_t j = 0; j < columns; j++) found |= row[j] - row[j] != 0;
    return !found;
}
#endif
