// What conv/shifted_fp16x2.cu multiplies: the filters in halves, and in pieces, and the images in halves, with what is known of both.
// Read conv/shifted_fp16x2.cuh first.
#include "conv/shifted_fp16x2.cuh"

// A filter's scale, by a block.
__device__ __forceinline__ void measure_filter(const Made &made, const Weights &weights, int filter) {
    constexpr int COUNT = IN_CHANNELS * TAPS, AT_ONCE = 4;
    Measured seen;
    for (int first = threadIdx.x; first < COUNT; first += AT_ONCE * MEASURING) {
        float found[AT_ONCE];
        #pragma unroll
        for (int j = 0; j < AT_ONCE; j++) {
            const int i = first + j * MEASURING;
            found[j] = i < COUNT && filter < OUT_CHANNELS ? weights.at(filter, i / TAPS, i % TAPS) : 0;
        }
        #pragma unroll
        for (float x : found) seen.see(x);
    }
    seen.join_block();
    if (threadIdx.x > 0) return;
    made.filters[filter] = seen.known(NORMAL, 1);
}

// The weights of FILTERS filters and the channels of a plane to scratch, in halves or in pieces, by a block.
constexpr int CUTS = 2 * BLOCKS * CHUNKS * PLANES;
__device__ __forceinline__ void cut_filters(const Made &made, const Weights &weights, int piece) {
    const bool in_halves = piece % 2;
    const int plane = piece / 2 % PLANES, chunk = piece / (2 * PLANES) % CHUNKS, block = piece / (2 * PLANES * CHUNKS);
    #pragma unroll 1
    for (int i = threadIdx.x; i < FILTERS * TAPS; i += LAYING) {
        const WeightWord at(block, chunk, i / FILTERS, plane, i % FILTERS);
        const int filter = block * FILTERS + at.line;
        float found[CHUNK_ELEMENTS];
        weights.read(found, filter, at.channel(), at.tap);
        if (!in_halves) {
            put_pieces(made.pieces, at, found);
            continue;
        }
        Chunk words[NUMBERS];
        halve(words, found, made.filters[filter].up);
        char *to = made.halves + at.stage() * OfWeights::SIZE;
        #pragma unroll
        for (int p = 0; p < NUMBERS; p++) *(Chunk *)(to + OfWeights::offset(p, plane, at.line)) = words[p];
    }
}

// First: statistics of filters and images.
KERNEL __launch_bounds__(LAYING, LAYING_BLOCKS) measure_operands(
    const T *x, const T *w, const Epilogue epilogue, int64_t batch, char *scratch) {
    wait_for_inputs();
    const Made made(scratch);
    for (int filter = blockIdx.x; filter < BLOCKS * FILTERS; filter += gridDim.x) {
        measure_filter(made, {w}, filter);
        __syncthreads();
    }
    laid_images(made, batch).measure(Inputs{x, (int)batch});
}

// Then: both packed, the filters as bf16x3 too.
KERNEL __launch_bounds__(LAYING, LAYING_BLOCKS) pack_operands(
    const T *x, const T *w, const Epilogue epilogue, int64_t batch, char *scratch) {
    wait_for_inputs();
    const Made made(scratch);
    for (int i = blockIdx.x; i < CUTS; i += gridDim.x) cut_filters(made, {w}, i);
    laid_images(made, batch).lay(Inputs{x, (int)batch});
}
