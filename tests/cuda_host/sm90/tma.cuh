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
// Made by a kernel, or by `Host`: a box of rows of 128 bytes, or of the positions of a window in images (N, H, W, C).
struct alignas(128) TensorMap {
    const void *x;
    int columns, rows, matrices, box_rows, element, box_matrices, across; // across: elements of a row of the box
    int images, lower[2], upper[2], stride[2]; // of images: columns are channels, rows the width, matrices the height

    template <typename E> void encode(TensorMap &, const E *x, int columns, int rows, int matrices, int box_rows) {
        make(x, columns, rows, matrices, box_rows);
    }
    template <typename E> void make(const E *x, int columns, int rows, int matrices, int box_rows) {
        *this = {x, columns, rows, matrices, box_rows, (int)sizeof(E), 1, 128 / (int)sizeof(E)};
    }
    void copy_from(const TensorMap &made) { *this = made; }
    void load(char *to, int column, int row, int matrix, Mbarrier &full) const {
        for (int i = 0; i < box_rows * box_matrices; i++)
            load_row(to, i, column, row + i % box_rows, matrix + i / box_rows);
        full.copied(box_rows * box_matrices * across * element);
    }
    void load_im2col(char *to, int c, int w, int h, int n, int right, int down, Mbarrier &full) const {
        for (int i = 0; i < box_rows; i++) {
            const bool inside = n < images && w + right >= 0 && h + down >= 0 && h + down < matrices;
            load_row(to, i, c, inside ? w + right : rows, inside ? n * matrices + h + down : matrices);
            w += stride[0];
            if (w <= rows - 1 + upper[0]) continue;
            w = lower[0];
            h += stride[1];
            if (h <= matrices - 1 + upper[1]) continue;
            h = lower[1];
            n++;
        }
        full.copied(box_rows * across * element);
    }

  private:
    void load_row(char *to, int i, int column, int row, int matrix) const {
        const int swizzled = across * element == 128 ? i % 8 : i / 2 % 4;
        for (int j = 0; j < across; j++) {
            const bool inside = row < rows && column + j < columns && (images || matrix < matrices);
            const int64_t at = ((int64_t)matrix * rows + row) * columns + column + j;
            char *const target = to + i * across * element + ((j * element) ^ swizzled * 16);
            if (element == 4) {
                const uint32_t rounded = Format<TF32>::rounded(inside ? ((const float *)x)[at] : 0);
                memcpy(target, &rounded, 4);
            } else {
                const uint16_t bits = inside ? ((const uint16_t *)x)[at] : 0;
                memcpy(target, &bits, 2);
            }
        }
    }
};
