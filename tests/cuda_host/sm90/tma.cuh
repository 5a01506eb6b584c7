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
    const float *x;
    int columns, rows, matrices, box_rows;

    void encode(const float *x, int columns, int rows, int matrices, int box_rows) {
        *this = {x, columns, rows, matrices, box_rows};
    }
    void load(char *to, int column, int row, int matrix, Mbarrier &full) const {
        for (int i = 0; i < box_rows * 32; i++) {
            const int down = row + i / 32, right = column + i % 32;
            const bool inside = down < rows && right < columns && matrix < matrices;
            const float value = inside ? x[((int64_t)matrix * rows + down) * columns + right] : 0;
            const uint32_t rounded = Format<TF32>::rounded(value);
            memcpy(to + ((i * 4) ^ i / 32 % 8 * 16), &rounded, 4);
        }
        full.copied(box_rows * 128);
    }
};
