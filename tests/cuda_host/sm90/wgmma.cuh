// kernels/cuda/sm90/wgmma.cuh on the CPU: products are done at once.
#pragma once
#include "common/mma_sync.cuh"
#include "gemm/mma.cuh"
#include "sm90/mbarrier.cuh"

static void wgmma_fence() { __syncwarp(); }
static void wgmma_commit_group() {}
template <int GROUPS> static void wgmma_wait_group() { __syncwarp(); }
template <class Sums> void wgmma_fence_operand(Sums &) {}

static int accumulator_row(int i) {
    return threadIdx.x % WARPGROUP / WARP * 16 + i / 2 % 2 * 8 + threadIdx.x % WARP / 4;
}
static int accumulator_column(int i) { return i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2; }

static int swizzle_128b(int row, int chunk) { return row * 128 + (chunk ^ row % 8) * 16; }
constexpr int DESCRIPTOR_K_STEP = 2;
enum Swizzle { NO_SWIZZLE = 0, SWIZZLE_128B = 1, SWIZZLE_64B = 2 };
static uint64_t smem_descriptor(const void *rows) {
    return ((const unsigned char *)rows - shared_bytes) >> 4 | (uint64_t)64 << 32 | (uint64_t)SWIZZLE_128B << 62;
}
static uint64_t smem_descriptor(const void *from, int leading, int stride, Swizzle swizzle) {
    const uint64_t at = (const unsigned char *)from - shared_bytes;
    return at >> 4 | (uint64_t)(leading >> 4) << 16 | (uint64_t)(stride >> 4) << 32 | (uint64_t)swizzle << 62;
}

// The number in the lower half of a word.
template <MmaKind KIND> static float half_value(uint32_t word) {
    return KIND == FP16X2 ? float_of_half(word & 0xffff) : __uint_as_float(word << 16);
}

// The matrix that a descriptor describes. PTX ISA, "Strides".
struct DescribedOperand {
    int start, leading, stride;
    uint64_t swizzle;

    explicit DescribedOperand(uint64_t word)
        : start((word & 0x3fff) << 4), leading((word >> 16 & 0x3fff) << 4), stride((word >> 32 & 0x3fff) << 4),
          swizzle(word >> 62) {}

    template <MmaKind KIND> float element(int row, int k, bool transposed) const {
        return transposed ? row_major<KIND>(row, k) : k_major<KIND>(row, k);
    }

  private:
    template <MmaKind KIND> static float load(int at) {
        if (KIND == TF32) {
            float x;
            memcpy(&x, shared_bytes + at, 4);
            return x;
        }
        uint16_t bits;
        memcpy(&bits, shared_bytes + at, 2);
        return half_value<KIND>(bits);
    }
    // The k of a row are contiguous.
    template <MmaKind KIND> float k_major(int row, int k) const {
        constexpr int BYTES = KIND == TF32 ? 4 : 2, CHUNK = 16 / BYTES;
        const int at = start + row * 128 + k * BYTES;
        if (swizzle == SWIZZLE_128B) return load<KIND>(at ^ (at >> 7 & 7) << 4);
        if (swizzle == SWIZZLE_64B) {
            const int in_64 = start + row % 8 * 64 + row / 8 * stride + k * BYTES;
            return load<KIND>(in_64 ^ (in_64 >> 7 & 3) << 4);
        }
        return load<KIND>(start + row / 8 * stride + row % 8 * 16 + k / CHUNK * leading + k % CHUNK * BYTES);
    }
    // The rows of a k are contiguous.
    template <MmaKind KIND> float row_major(int row, int k) const {
        if (swizzle == SWIZZLE_128B) {
            const int at = start + row / 64 * leading + row % 64 * 2 + k / 8 * stride + k % 8 * 128;
            return load<KIND>(at ^ (at >> 7 & 7) << 4);
        }
        if (swizzle != SWIZZLE_64B)
            return load<KIND>(start + row / 8 * stride + row % 8 * 2 + k / 8 * leading + k % 8 * 16);
        const int at = start + row / 32 * leading + row % 32 * 2 + k / 8 * stride + k % 8 * 64;
        return load<KIND>(at ^ (at >> 7 & 3) << 4);
    }
};

// sums = (accumulate ? sums : 0) + A B over `depth` k, whose elements are a(row, k) and b(column, k). The lanes of a warp read
// B together.
template <int SUMS, class A, class B> OFTEN static void multiply(
    float (&sums)[SUMS], bool accumulate, int depth, const A &a, const B &b) {
    static float elements[FIBERS / WARP][32][2 * SUMS];
    float(&of_b)[32][2 * SUMS] = elements[current / WARP];
    for (int k = 0; k < depth; k++)
        for (int column = threadIdx.x % WARP; column < 2 * SUMS; column += WARP) of_b[k][column] = b(column, k);
    __syncwarp();
    for (int i = 0; i < SUMS && !accumulate; i++) sums[i] = 0;
    for (int k = 0; k < depth; k++) {
        const float rows[2] = {a(accumulator_row(0), k), a(accumulator_row(2), k)};
        for (int i = 0; i < SUMS; i += 4) {
            const float *const columns = of_b[k] + accumulator_column(i);
            for (int j = 0; j < 4; j++) sums[i + j] += rows[j / 2] * columns[j % 2];
        }
    }
    __syncwarp();
}
template <MmaKind KIND, bool TRANS_A = false, bool TRANS_B = false, int SUMS>
void wgmma(float (&sums)[SUMS], uint64_t a, uint64_t b, bool accumulate) {
    const DescribedOperand of_a(a), of_b(b);
    multiply(sums, accumulate, KIND == TF32 ? 8 : 16,
        [&](int row, int k) { return of_a.element<KIND>(row, k, TRANS_A); },
        [&](int column, int k) { return of_b.element<KIND>(column, k, TRANS_B); });
}
template <MmaKind KIND, bool TRANS_B, int SUMS>
void wgmma_registers(float (&sums)[SUMS], const uint32_t *a, uint64_t b, bool accumulate) {
    const DescribedOperand of_b(b);
    float rows[2][16];
    for (int k = 0; k < 16; k++)
        for (int i = 0; i < 2; i++) {
            const uint32_t word = __shfl_sync(FULL_MASK, a[k / 8 * 2 + i], threadIdx.x % WARP / 4 * 4 + k / 2 % 4);
            rows[i][k] = half_value<KIND>(word >> k % 2 * 16);
        }
    multiply(sums, accumulate, 16, [&](int row, int k) { return rows[row % 16 / 8][k]; },
        [&](int column, int k) { return of_b.element<KIND>(column, k, TRANS_B); });
}
// Of four k, the two of A that `metadata` names; lanes 0 and 1 of four hold those of the first and the last 16 k of two rows. In tf32,
// of two k the one whose halves `metadata` names; lanes 0 and 1 hold those of the first and the last 8 k.
template <MmaKind KIND, bool TRANS_A, bool TRANS_B, int SUMS> void wgmma_sparse(
    float (&sums)[SUMS], uint64_t a, uint64_t b, uint32_t metadata, bool accumulate) {
    const DescribedOperand of_a(a), of_b(b);
    const int lane = threadIdx.x % WARP / 4 * 4;
    const uint32_t first = __shfl_sync(FULL_MASK, metadata, lane), last = __shfl_sync(FULL_MASK, metadata, lane + 1);
    if (KIND == TF32)
        return multiply(sums, accumulate, 16,
            [&](int row, int k) {
                const uint32_t codes = (k < 8 ? first : last) >> row % 16 / 8 * 16, code = codes >> k % 8 / 2 * 4 & 15;
                return code == (k % 2 == 0 ? 0b0100 : 0b1110) ? of_a.element<TF32>(row, k / 2, false) : 0;
            },
            [&](int column, int k) { return of_b.element<TF32>(column, k, false); });
    multiply(sums, accumulate, 32,
        [&](int row, int k) {
            const uint32_t codes = (k < 16 ? first : last) >> row % 16 / 8 * 16, code = codes >> k % 16 / 4 * 4;
            const int low = code & 3, high = code >> 2 & 3;
            return k % 4 == low    ? of_a.element<BFLOAT16>(row, k / 4 * 2, TRANS_A)
                   : k % 4 == high ? of_a.element<BFLOAT16>(row, k / 4 * 2 + 1, TRANS_A)
                                   : 0;
        },
        [&](int column, int k) { return of_b.element<BFLOAT16>(column, k, TRANS_B); });
}
