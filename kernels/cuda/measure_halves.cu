// What conv_halves.cu has to know of images and filters, and the filters in halves and in pieces. Read halves.cuh first.
#include "halves.cuh"

// A filter: its scale, and its weights to scratch, in halves and in pieces.
__device__ __forceinline__ void prepare_filter(const Made &made, const Weights &weights, int filter) {
    Measured seen;
    #pragma unroll 2
    for (int i = 0; i < WEIGHT_WORDS; i += MEASURING) {
        const WeightWord at(filter, i + threadIdx.x); // behind the last one all are 0
        float found[GROUP_OF];
        weights.read(found, filter, at.channel(), at.tap);
        #pragma unroll
        for (float x : found) seen.see(x);
    }
    seen.join_block();
    const Known known = seen.known(1);
    if (threadIdx.x == 0) made.filters[filter] = known;
    for (int i = threadIdx.x; i < WEIGHT_WORDS; i += MEASURING) {
        const WeightWord at(filter, i);
        float found[GROUP_OF];
        weights.read(found, filter, at.channel(), at.tap);
        put_pieces(made.pieces, at, found);
        Word words[2];
        halve(words, found, known.up);
        char *to = made.halves + at.stage() * OfWeights::SIZE;
        #pragma unroll
        for (int p = 0; p < 2; p++)
            *(Word *)(to + OfWeights::offset(STACKED ? 0 : p, at.plane, at.line + (STACKED ? p * FILTERS : 0))) = words[p];
    }
}

// A block a filter, then a block a part of an image.
KERNEL __launch_bounds__(MEASURING) measure_halves(
    const T *x, const T *w, const Epilogue epilogue, int64_t batch, char *scratch) {
    wait_for_inputs();
    const Made made(scratch);
    const int at = blockIdx.x - BLOCKS * FILTERS;
    if (at < 0)
        prepare_filter(made, {w}, blockIdx.x);
    else
        laid_images(made, batch).measure(Inputs{x, (int)batch}, at / PARTS<Inputs>, at % PARTS<Inputs>);
}
