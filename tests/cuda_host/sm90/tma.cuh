// kernels/cuda/sm90/tma.cuh on the CPU: copies are done at once.
#pragma once
#include "gemm/mma.cuh"
#include "sm90/mbarrier.cuh"

template <int BYTES> void bulk_copy(char *to, const char *from, Mbarrier &full) {
    memcpy(to, from, BYTES);
    full.copied(BYTES);
}
template <int BYTES> void bulk_store(float *to, const char *from) { memcpy(to, from, BYTES); }
template <int BYTES> void bulk_add(float *to, const char *from) {
    for (int i = 0; i < BYTES / 4; i++) to[i] += ((const float *)from)[i];
}
static void bulk_wait_read() {}
static void bulk_wait() {}
struct alignas(128) TensorMap {
    const void *x;
    int columns, rows, matrices, box_rows, element;

    template <typename E> void encode(TensorMap &, const E *x, int columns, int rows, int matrices, int box_rows) {
        make(x, columns, rows, matrices, box_rows);
    }
    template <typename E> void make(const E *x, int columns, int rows, int matrices, int box_rows) {
        *this = {x, columns, rows, matrices, box_rows, (int)sizeof(E)};
    }
    void copy_from(const TensorMap &made) { *this = made; }
    void load(char *to, int column, int row, int matrix, Mbarrier &full) const {
        const int across = 128 / element;
        for (int i = 0; i < box_rows * across; i++) {
            const int down = row + i / across, right = column + i % across;
            const bool inside = down < rows && right < columns && matrix < matrices;
            const int64_t at = ((int64_t)matrix * rows + down) * columns + right;
            char *const target = to + ((i * element) ^ i / across % 8 * 16);
            if (element == 4) {
                const uint32_t rounded = Format<TF32>::rounded(inside ? ((const float *)x)[at] : 0);
                memcpy(target, &rounded, 4);
            } else {
                const uint16_t bits = inside ? ((const uint16_t *)x)[at] : 0;
                memcpy(target, &bits, 2);
            }
        }
        full.copied(box_rows * 128);
    }
};
