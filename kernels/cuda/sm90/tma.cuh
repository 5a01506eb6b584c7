// Asynchronous bulk copies from global to shared memory: plain ones, and tensor copies by TMA.
#pragma once
#include "sm90/mbarrier.cuh"

// Starts to copy BYTES contiguous bytes into shared memory; `full` counts them as transaction bytes.
template <int BYTES> __device__ __forceinline__ void bulk_copy(char *to, const char *from, Mbarrier &full) {
    constexpr int MAX_COPY = 8192; // one copy of all bytes is up to 6% slower
    #pragma unroll
    for (int i = 0; i < BYTES; i += MAX_COPY)
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
            ::"r"((unsigned)__cvta_generic_to_shared(to + i)), "l"(from + i), "r"(min(MAX_COPY, BYTES - i)),
            "r"(full.address())
            : "memory");
}

// Starts to copy BYTES contiguous bytes from shared to global memory, or to add them as float32. The calling thread waits with
// bulk_wait_read() until shared memory may be overwritten, with bulk_wait() until the results are in global memory.
template <int BYTES> __device__ __forceinline__ void bulk_store(float *to, const char *from) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to),
        "r"((unsigned)__cvta_generic_to_shared(from)), "n"(BYTES)
        : "memory");
}
template <int BYTES> __device__ __forceinline__ void bulk_add(float *to, const char *from) {
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to),
        "r"((unsigned)__cvta_generic_to_shared(from)), "n"(BYTES)
        : "memory");
}
__device__ __forceinline__ void bulk_wait_read() {
    asm volatile("cp.async.bulk.commit_group;\ncp.async.bulk.wait_group.read 0;" ::: "memory");
}
__device__ __forceinline__ void bulk_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// The tensor map of a batch of row-major matrices of float32, or of bfloat16 as uint16_t. Kernels make it, or the host
// (`TensorMap` in core/kernel.py). A copy loads a box and stores it with a swizzle; elements outside the matrix are 0. The box of a
// map that a kernel makes has box_rows rows of 128 bytes, with the 128-byte swizzle; float32 is rounded to tf32. Rows of the matrix
// must be multiples of 16 bytes. PTX ISA, "Tensors" and "tensormap.replace".
struct alignas(128) TensorMap {
    uint64_t words[16];

    // By a warp, whose threads may then load. The map is made in shared memory, because changes in global memory
    // are slow.
    template <typename E> __device__ void encode(
        TensorMap &in_shared, const E *x, int columns, int rows, int matrices, int box_rows) {
        in_shared.make(x, columns, rows, matrices, box_rows);
        copy_from(in_shared);
    }
    // The first step: makes the map, which is in shared memory.
    template <typename E> __device__ void make(const E *x, int columns, int rows, int matrices, int box_rows) {
        const int lane = threadIdx.x % WARP;
        if (lane < 16) words[lane] = 0;
        __syncwarp();
        if (lane == 0) set((unsigned)__cvta_generic_to_shared(this), x, columns, rows, matrices, box_rows);
        __syncwarp();
    }
    // The second step: copies the map to global memory.
    __device__ void copy_from(const TensorMap &in_shared) {
        const unsigned made = (unsigned)__cvta_generic_to_shared(&in_shared);
        asm volatile("tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned [%0], [%1], 128;"
            ::"l"(this), "r"(made) : "memory");
        asm volatile("fence.proxy.tensormap::generic.acquire.gpu [%0], 128;" ::"l"(this) : "memory");
    }
    // Starts to load the box whose first element is (matrix, row, column).
    __device__ __forceinline__ void load(char *to, int column, int row, int matrix, Mbarrier &full) const {
        asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes "
                     "[%0], [%1, {%2, %3, %4}], [%5];"
            ::"r"((unsigned)__cvta_generic_to_shared(to)), "l"(this), "r"(column), "r"(row), "r"(matrix),
            "r"(full.address())
            : "memory");
    }
    // The same for a map of images (N, H, W, C) that the host made for convolutions (PTX ISA, "Im2col mode"). The rows of a box
    // are channels from `c` on, for consecutive positions of a window from (n, h, w) on. A position is that of the window's corner;
    // the pixel that is loaded is `down` rows and `right` columns after it.
    __device__ __forceinline__ void load_im2col(
        char *to, int c, int w, int h, int n, int right, int down, Mbarrier &full) const {
        asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes "
                     "[%0], [%1, {%2, %3, %4, %5}], [%6], {%7, %8};"
            ::"r"((unsigned)__cvta_generic_to_shared(to)), "l"(this), "r"(c), "r"(w), "r"(h), "r"(n), "r"(full.address()),
            "h"((short)right), "h"((short)down)
            : "memory");
    }

  private:
    // Fills the map at address `made` of shared memory.
    template <typename E> __device__ static void set(
        unsigned made, const E *x, int columns, int rows, int matrices, int box_rows) {
#define SET(FIELD, TYPE, ...) \
    asm volatile("tensormap.replace.tile." FIELD ".shared::cta.b1024." TYPE ";" ::"r"(made), __VA_ARGS__ : "memory")
        SET("global_address", "b64 [%0], %1", "l"(x));
        SET("rank", "b32 [%0], %1", "n"(2)); // rank - 1
        SET("box_dim", "b32 [%0], 0, %1", "n"(128 / (int)sizeof(E)));
        SET("box_dim", "b32 [%0], 1, %1", "r"(box_rows));
        SET("box_dim", "b32 [%0], 2, %1", "n"(1));
        SET("global_dim", "b32 [%0], 0, %1", "r"(columns));
        SET("global_dim", "b32 [%0], 1, %1", "r"(rows));
        SET("global_dim", "b32 [%0], 2, %1", "r"(matrices));
        SET("global_stride", "b64 [%0], 0, %1", "l"((int64_t)columns * (int)sizeof(E)));
        SET("global_stride", "b64 [%0], 1, %1", "l"((int64_t)columns * rows * (int)sizeof(E)));
        SET("element_stride", "b32 [%0], 0, %1", "n"(1));
        SET("element_stride", "b32 [%0], 1, %1", "n"(1));
        SET("element_stride", "b32 [%0], 2, %1", "n"(1));
        SET("elemtype", "b32 [%0], %1", "n"(sizeof(E) == 4 ? 11 : 10)); // tf32, bf16
        SET("interleave_layout", "b32 [%0], %1", "n"(0)); // none
        SET("swizzle_mode", "b32 [%0], %1", "n"(3));      // 128 bytes
        SET("fill_mode", "b32 [%0], %1", "n"(0));         // zeros
#undef SET
    }
};
