// What conv_halves.cu has to know of images and filters, and the filters in halves and in pieces. Read halves.cuh first.
#ifndef MEASURING
#define MEASURING 256 // threads of a block
#endif
#include "halves.cuh"

constexpr int TOP = 14;                     // the largest element is scaled to 2^TOP
constexpr int LEAST_UP = -16, MOST_UP = 89; // exponents of a scale

// What a thread, and then all of a block, have seen of an operand.
struct Measured {
    float most = 0, least = INFINITY, sum = 0, squares = 0; // of magnitudes; the least that is not 0; times UNIT^2
    static constexpr float UNIT = 0x1p20f;                  // so that squares of what can be held are normal numbers

    __device__ __forceinline__ void see(float x) {
        const float size = fabsf(x), scaled = x * UNIT;
        most = Max::of(most, size);
        least = fminf(least, size > 0 ? size : INFINITY);
        sum += size;
        squares = fma(scaled, scaled, squares);
    }

    __device__ __forceinline__ void join(float most, float least, float sum, float squares) {
        this->most = Max::of(this->most, most);
        this->least = fminf(this->least, least);
        this->sum += sum;
        this->squares += squares;
    }

    // Of an operand of so many elements, in all threads. Share: (sum |x|)^2 / sum x^2 elements of one size would have
    // these sums.
    __device__ __forceinline__ Known known(float count) {
        __shared__ Vector<float, 4> of_warp[MEASURING / WARP];
        #pragma unroll
        for (int mask = WARP / 2; mask > 0; mask /= 2)
            join(exchanged(most, mask), exchanged(least, mask), exchanged(sum, mask), exchanged(squares, mask));
        if (threadIdx.x % WARP == 0) of_warp[threadIdx.x / WARP] = {most, least, sum, squares};
        __syncthreads();
        *this = Measured();
        for (int i = 0; i < MEASURING / WARP; i++) {
            const Vector<float, 4> &found = of_warp[i];
            join(found.lane[0], found.lane[1], found.lane[2], found.lane[3]);
        }
        if (most == 0) return {1, 1, INFINITY, 0};
        const int exponent = most < INFINITY ? TOP - ilogbf(most) : MOST_UP + 1; // not of NaN
        if (exponent < LEAST_UP || exponent > MOST_UP) return {0, 0, 0, 0};
        const float up = __int_as_float(exponent + 127 << 23), down = __int_as_float(127 - exponent << 23);
        if (least * up < 0x1p-14f) return {0, 0, 0, 0};
        const float unit = up / UNIT;
        return {up, down, sum * UNIT * (sum * UNIT / squares) / count, squares * unit * unit};
    }
};

// A filter: its scale, and its weights to scratch, in halves and in pieces.
__device__ __forceinline__ void prepare_filter(const Made &made, const Weights &weights, int filter) {
    Measured seen;
    for (int i = threadIdx.x; i < WEIGHT_WORDS * GROUP_OF; i += MEASURING) {
        const WeightWord at(filter, i / GROUP_OF);
        const int channel = at.channel() + i % GROUP_OF;
        seen.see(filter < OUT_CHANNELS && channel < IN_CHANNELS ? weights.at(filter, channel, at.tap) : 0);
    }
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

__device__ __forceinline__ void measure_image(const Made &made, const T *x, int image) {
    constexpr int COUNT = IN_CHANNELS * Inputs::AREA, WIDE = COUNT % 4 == 0 ? 4 : COUNT % 2 == 0 ? 2 : 1;
    constexpr int AT_ONCE = 4; // reads that are under way
    x += (int64_t)image * COUNT;
    Measured seen;
    for (int first = threadIdx.x; first < COUNT / WIDE; first += AT_ONCE * MEASURING) {
        Vector<T, WIDE> found[AT_ONCE];
        #pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            const int at = first + i * MEASURING;
            found[i] = at < COUNT / WIDE ? load<T, WIDE>(x + at * WIDE) : Vector<T, WIDE>{};
        }
        #pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            #pragma unroll
            for (int j = 0; j < WIDE; j++) seen.see(found[i].lane[j]);
        }
    }
    const Known known = seen.known(COUNT);
    if (threadIdx.x == 0) made.images[image] = known;
}

// A block a filter, then a block an image.
KERNEL __launch_bounds__(MEASURING) measure_halves(
    const T *x, const T *w, const Epilogue epilogue, int64_t batch, char *scratch) {
    wait_for_inputs();
    const Made made(scratch, batch);
    if (blockIdx.x < BLOCKS * FILTERS)
        prepare_filter(made, {w}, blockIdx.x);
    else
        measure_image(made, x, blockIdx.x - BLOCKS * FILTERS);
}
