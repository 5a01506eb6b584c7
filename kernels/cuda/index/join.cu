// Joins the elements of PARTS contiguous arrays to one vector, in one launch. Each block copies CHUNK bytes of one part.
#include "common/common.cuh"

#define THREADS 256
#define VECTOR 16

struct Parts {
    const T *of[PARTS];
};
struct Starts {
    int64_t of[PARTS + 1];
};

// starts: of each part in `joined`, in elements; the last one is the end. blocks: the first block of each part.
KERNEL join(const Parts parts, T *joined, const Starts starts, const Starts blocks)
{
    wait_for_inputs();
    int part = 0;
    while (part + 1 < PARTS && (int64_t)blockIdx.x >= blocks.of[part + 1]) part++;
    const T *from = parts.of[part];
    T *to = joined + starts.of[part];
    const int64_t first = (blockIdx.x - blocks.of[part]) * (int64_t)(CHUNK / sizeof(T));
    const int64_t length = starts.of[part + 1] - starts.of[part];
    const int64_t end = first + CHUNK / sizeof(T) < length ? first + CHUNK / sizeof(T) : length;
    constexpr int WIDE = VECTOR / sizeof(T);
    int64_t whole = first;
    if (starts.of[part] % WIDE == 0) { // arrays are aligned to vectors
        whole = first + (end - first) / WIDE * WIDE;
        Vector<T, WIDE> held[CHUNK / VECTOR / THREADS];
        #pragma unroll
        for (int k = 0; k < CHUNK / VECTOR / THREADS; k++) {
            const int64_t i = first + (k * THREADS + threadIdx.x) * WIDE;
            if (i < whole) held[k] = load<T, WIDE>(from + i);
        }
        #pragma unroll
        for (int k = 0; k < CHUNK / VECTOR / THREADS; k++) {
            const int64_t i = first + (k * THREADS + threadIdx.x) * WIDE;
            if (i < whole) store(to, i, held[k]);
        }
    }
    for (int64_t i = whole + threadIdx.x; i < end; i += THREADS) to[i] = from[i];
}
